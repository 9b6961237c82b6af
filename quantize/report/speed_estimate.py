"""Expected decoding speed of a result, from bytes and this machine's memory bandwidth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from edgellm.quantize.report.report import Report

_MEASURED_BYTES, _REPEATS = 256 << 20, 5


def speed_line(report: Report, bandwidth: Callable[[], float]) -> str:
    """Expected tokens/s, or why they are not estimated.

    Args:
        report: of the run.
        bandwidth: measures this machine's memory, bytes/s.
    """
    if report.subject == "draft":
        return (
            "speed: not estimated: the base accepts some of a draft's tokens; edgellm-bench counts"
        )
    if not report.read_bytes:
        return "speed: not estimated: a token reads some experts only; llm_build measures it"
    size = f"a token reads {report.read_bytes / 1e6:.1f} MB"
    if report.settings.get("target", "cpu") != "cpu":
        return f"speed: not estimated for a GPU: {size}; llm_build measures it there"
    rate = bandwidth()
    return (
        f"speed: at most about {rate / report.read_bytes:.0f} tokens/s on this machine, an "
        f"estimate: {size}, and its memory gave {rate / 1e9:.1f} GB/s now; llm_build measures it"
    )


def memory_bandwidth() -> float:
    """Memory read bandwidth of all cores, bytes/s: the best of a few sums over 256 MB."""
    import torch

    block, best = torch.ones(_MEASURED_BYTES // 4), math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return _MEASURED_BYTES / best
