"""Times of the stages of a run, in TensorRT Edge-LLM's profile format."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

IMAGES = "multimodal_processing"
PREFILL, GENERATION = "llm_prefill", "llm_generation"
RESTORE = "context_restore"
DRAFT_PREFILL, DRAFT_EXTEND = "eagle_draft_prefill", "eagle_draft_accept"
DRAFT_TREE, VERIFY, ACCEPT = "eagle_construct_draft_tree", "eagle_base_verification", "eagle_accept"
SPECULATION = (DRAFT_PREFILL, DRAFT_EXTEND, DRAFT_TREE, VERIFY, ACCEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCounts:
    """One round of speculative decoding."""

    emitted: int  # tokens added to the output
    tree_size: int  # verified nodes, root included
    tree_depth: int  # levels below the root
    accepted: int  # drafted nodes that the base accepted


class _Stage:
    """Times a block; a generator would take twice as long, and rounds time five blocks."""

    __slots__ = ("_continues", "_name", "_profile", "_start")

    def __init__(self, profile: Profile, name: str, continues: bool) -> None:
        self._profile, self._name, self._continues = profile, name, continues

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # what failed is no sample
            ms = (time.perf_counter() - self._start) * 1e3
            self._profile.book(self._name, ms, continues=self._continues)


@dataclass(slots=True, kw_only=True)
class Profile:
    """Samples in milliseconds by stage, and token counts."""

    stages_ms: dict[str, list[float]] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    reused_tokens: list[int] = field(default_factory=list)  # of prompts, from the prefix cache
    generated_tokens: list[int] = field(default_factory=list)  # of plainly decoded outputs
    speculated_tokens: list[int] = field(default_factory=list)  # of speculative outputs
    rounds: list[RoundCounts] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)  # of every image

    def stage(self, name: str, *, continues: bool = False) -> _Stage:
        """Time the block as one run of a stage, or as part of the latest run."""
        return _Stage(self, name, continues)

    def book(self, name: str, ms: float, *, continues: bool = False) -> None:
        """Add a time measured elsewhere; as `stage`."""
        if continues:
            self.stages_ms[name][-1] += ms
        else:
            self.stages_ms.setdefault(name, []).append(ms)

    def total_ms(self, name: str) -> float:
        """Total milliseconds of a stage."""
        return sum(self.stages_ms.get(name, ()))

    def decode_ms(self) -> float:
        """Milliseconds after the prefills."""
        return sum(self.total_ms(name) for name in (GENERATION, *SPECULATION))

    def decoded_tokens(self) -> int:
        """Tokens after the prefills; each prefill gives the first token of its output."""
        runs = (*self.generated_tokens, *self.speculated_tokens)
        return sum(max(count - 1, 0) for count in runs)

    def add(self, other: Profile) -> None:
        """Append another run's samples."""
        for name, samples in other.stages_ms.items():
            self.stages_ms.setdefault(name, []).extend(samples)
        self.prompt_tokens += other.prompt_tokens
        self.reused_tokens += other.reused_tokens
        self.generated_tokens += other.generated_tokens
        self.speculated_tokens += other.speculated_tokens
        self.rounds += other.rounds
        self.image_tokens += other.image_tokens

    def as_json(self) -> dict[str, Any]:
        """The profile file's content; times are wall clock, also where a name says GPU."""
        reused, generated = sum(self.reused_tokens), sum(self.generated_tokens)
        computed = sum(self.prompt_tokens) - reused
        prefill_ms, decode_ms = self.total_ms(PREFILL), self.total_ms(GENERATION)
        runs, plain_runs = len(self.prompt_tokens), len(self.generated_tokens)
        passes = len(self.stages_ms.get(GENERATION, ()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "prefill": {
                "total_runs": runs,
                "reused_tokens": reused,
                "computed_tokens": computed,
                "average_tokens_per_run": _ratio(computed, runs),
                "average_time_per_run_ms": _ratio(prefill_ms, runs),
                "tokens_per_second": _ratio(computed, prefill_ms / 1e3),
                "average_time_per_token_ms": _ratio(prefill_ms, computed),
            },
            "generation": {
                "total_runs": plain_runs,
                "generated_tokens": generated,
                "average_tokens_per_run": _ratio(generated, plain_runs),
                # The first output token comes from the prefill.
                "tokens_per_second": _ratio(passes, decode_ms / 1e3),
                "average_time_per_token_ms": _ratio(decode_ms, passes),
            },
            **({"eagle_generation": self._eagle_json()} if self.speculated_tokens else {}),
            **({"multimodal": self._images_json()} if self.image_tokens else {}),
            "stages": [_stage_json(name, samples) for name, samples in self.stages_ms.items()],
            "peak_cpu_memory_bytes": peak,
            "peak_cpu_memory_mb": peak / 1e6,
        }

    def _images_json(self) -> dict[str, Any]:
        tokens = sum(self.image_tokens)
        return {
            "total_runs": len(self.stages_ms[IMAGES]),
            "total_images": len(self.image_tokens),
            "total_image_tokens": tokens,
            "average_time_per_token_ms": _ratio(self.total_ms(IMAGES), tokens),
        }

    def _eagle_json(self) -> dict[str, Any]:
        emitted = sum(counts.emitted for counts in self.rounds)
        deepest = max((counts.tree_depth for counts in self.rounds), default=0)
        acceptance_length = _ratio(emitted, len(self.rounds))
        return {
            "total_runs": len(self.speculated_tokens),
            "total_iterations": len(self.rounds),
            "total_generated_tokens": sum(self.speculated_tokens),
            "average_tokens_per_run": _ratio(
                sum(self.speculated_tokens), len(self.speculated_tokens)
            ),
            "average_acceptance_rate": acceptance_length,  # the peer's name for it
            "overall_tokens_per_second_excluding_base_prefill": _ratio(
                emitted, sum(self.total_ms(name) for name in SPECULATION) / 1e3
            ),
            "acceptance_length": acceptance_length,
            "average_tree_size": _ratio(
                sum(counts.tree_size for counts in self.rounds), len(self.rounds)
            ),
            **self.acceptance(),
            # Share of rounds with a tree of at least this depth that accepted this depth.
            "acceptance_by_depth": [
                {
                    "depth": depth,
                    "drafted_rounds": (tried := self._rounds_with(depth, "tree_depth")),
                    "accepted_rounds": (taken := self._rounds_with(depth, "accepted")),
                    "rate": _ratio(taken, tried),
                }
                for depth in range(1, deepest + 1)
            ],
        }

    def acceptance(self) -> dict[str, float]:
        """Drafted and accepted tokens, with the names of Triton's perf metrics."""
        accepted = sum(counts.accepted for counts in self.rounds)
        drafted = sum(counts.tree_size - 1 for counts in self.rounds)
        return {
            "acceptance_rate": _ratio(accepted, drafted),
            "total_accepted_draft_tokens": accepted,
            "total_draft_tokens": drafted,
        }

    def _rounds_with(self, least: int, what: str) -> int:
        return sum(getattr(counts, what) >= least for counts in self.rounds)


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
