"""Alternating rounds and their medians; time and memory of whole processes."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_S = 0.01


def alternating(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each function once a round; the first one changes from round to round.

    A slow minute of a shared machine then affects all of them.

    Args:
        calls: functions by name, each returns a measured value.
        rounds: values of each name in the result.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(calls[name]())
    return found


def elapsed_ms(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the milliseconds of a call."""
    start = clock()
    call()
    return (clock() - start) * 1e3


def clock_of(threads: int) -> Callable[[], float]:
    """Return a clock of processor time for one thread, which other programs hardly change."""
    return time.process_time if threads == 1 else time.perf_counter


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of each round's times."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Cost:
    """Time and peak memory of a finished process; the memory is sampled."""

    wall_s: float
    cpu_s: float
    anonymous_bytes: int  # without pages of files
    peak_bytes: int  # resident, with pages of mapped files


def run_process(*command: object) -> Cost:
    """Run a command without its output.

    Raises:
        SystemExit: the command fails.
    """
    words, anonymous, peak = [*map(str, command)], 0, 0
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        anonymous = max(anonymous, memory_bytes("RssAnon", process.pid))
        # Not ru_maxrss, which starts at the parent's value.
        peak = max(peak, memory_bytes("VmHWM", process.pid))
        time.sleep(_SAMPLE_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{words} failed")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Cost(time.perf_counter() - start, cpu_s, anonymous, peak)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Return the median of each field."""
    return Cost(
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.cpu_s for cost in costs),
        int(statistics.median(cost.anonymous_bytes for cost in costs)),
        int(statistics.median(cost.peak_bytes for cost in costs)),
    )


def memory_bytes(field: str, pid: int | str = "self") -> int:
    """Return a field of /proc/PID/status; 0 after the process ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(next(found, "0")) << 10


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    """Return the size of a folder's files."""
    return sum(path.stat().st_size for path in folder.glob(pattern))


def largest_weight(bundle: Path) -> int:
    """Return the bytes of a bundle's largest weight, as stored or in float16."""
    import onnx

    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    codes = onnx.TensorProto.UINT8  # pairs of codes, or fewer bits of more codes
    sizes = [
        (4 if each.data_type == codes else 2) * math.prod(each.dims) for each in graph.initializer
    ]
    stored = [
        int(entry.value)
        for each in graph.initializer
        for entry in each.external_data
        if entry.key == "length"
    ]
    return max(*sizes, *stored)


def module_command(module: str, *flags: object) -> list[object]:
    """Return the command line of a module's `main`, for a process of its own."""
    return [sys.executable, "-c", f"from {module} import main; main()", *flags]
