"""Times of the stages of a run, reported in the peer's profile format."""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PREFILL, GENERATION = "llm_prefill", "llm_generation"


@dataclass(slots=True)
class Profile:
    """Samples in milliseconds by stage, and token counts."""

    stages_ms: dict[str, list[float]] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as one run of a stage."""
        start = time.perf_counter()
        yield
        self.stages_ms.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    def total_ms(self, name: str) -> float:
        """Milliseconds that a stage took in all."""
        return sum(self.stages_ms.get(name, ()))

    def as_json(self) -> dict[str, Any]:
        """The profile file's content; times are wall clock, also where a name says GPU."""
        computed, generated = sum(self.prompt_tokens), sum(self.generated_tokens)
        prefill_ms, decode_ms = self.total_ms(PREFILL), self.total_ms(GENERATION)
        runs = len(self.prompt_tokens)
        passes = len(self.stages_ms.get(GENERATION, ()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "prefill": {
                "total_runs": runs,
                "reused_tokens": 0,
                "computed_tokens": computed,
                "average_tokens_per_run": _ratio(computed, runs),
                "average_time_per_run_ms": _ratio(prefill_ms, runs),
                "tokens_per_second": _ratio(computed, prefill_ms / 1e3),
                "average_time_per_token_ms": _ratio(prefill_ms, computed),
            },
            "generation": {
                "total_runs": runs,
                "generated_tokens": generated,
                "average_tokens_per_run": _ratio(generated, runs),
                # The first token of an answer comes out of the prefill.
                "tokens_per_second": _ratio(passes, decode_ms / 1e3),
                "average_time_per_token_ms": _ratio(decode_ms, passes),
            },
            "stages": [_stage_json(name, samples) for name, samples in self.stages_ms.items()],
            "peak_cpu_memory_bytes": peak,
            "peak_cpu_memory_mb": peak / 1e6,
        }


def _stage_json(name: str, samples: list[float]) -> dict[str, Any]:
    ordered = sorted(samples)

    def percentile(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return {
        "stage_id": name,
        "total_runs": len(samples),
        "total_gpu_time_ms": sum(samples),
        "average_time_per_run_ms": statistics.fmean(samples),
        "gpu_time_stats": {
            "count": len(samples),
            "min_ms": ordered[0],
            "max_ms": ordered[-1],
            "mean_ms": statistics.fmean(samples),
            "median_ms": statistics.median(samples),
            "p95_ms": percentile(0.95),
            "p99_ms": percentile(0.99),
            "stddev_ms": statistics.pstdev(samples),
        },
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
