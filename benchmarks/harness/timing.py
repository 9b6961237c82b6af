"""Alternating rounds and their medians; time and memory of whole processes."""

from __future__ import annotations

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
    """Cost of a finished process, as the operating system counts it."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def run_process(*command: object) -> Cost:
    """Run a command.

    Raises:
        RuntimeError: the command fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} failed")
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.perf_counter() - start, cpu, usage.ru_maxrss * 1024)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Return the median of each field."""
    return Cost(
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.cpu_s for cost in costs),
        int(statistics.median(cost.peak_bytes for cost in costs)),
    )


@dataclass(frozen=True)
class Peak:
    """Sampled peak memory and time of one process."""

    anonymous_bytes: int  # without pages of files
    resident_bytes: int
    seconds: float


def watched(command: Sequence[object]) -> Peak:
    """Run a command, and sample its memory.

    Raises:
        SystemExit: the command fails.
    """
    start, anonymous, resident = time.perf_counter(), 0, 0
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        anonymous = max(anonymous, memory_bytes("RssAnon", process.pid))
        resident = max(resident, memory_bytes("VmHWM", process.pid))
        time.sleep(_SAMPLE_S)
    if process.returncode:
        sys.exit(f"{command} failed")
    return Peak(anonymous, resident, time.perf_counter() - start)


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


def module_command(module: str, *flags: object) -> list[object]:
    """Return the command line of a module's `main`, for a process of its own."""
    return [sys.executable, "-c", f"from {module} import main; main()", *flags]
