"""Calls to the GPU, bytes and time of plain steps and drafted rounds on the production path.

Engine and session are unchanged, so rounds run on the device where it supports them; only the
device's calls are counted. `gpu.py` shows the figures. `on_the_fake_gpu` counts them
for one small model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners.tensorrt.cuda import driver
from edgellm.device_runtime.runners.tensorrt.cuda.gather import is_run
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Buffer, Device, NewRows, Planes
from edgellm.device_runtime.speculate.options import SpecOptions
from harness.gpu.clock import CudaEvents, Events
from harness.gpu.timed_runs import GREEDY

_UNCOUNTED = 2  # steps: prefill of the base and of the draft
GOALS = {"plain": (1, 64), "drafted": (1, 4096)}  # waits of a step, bytes to the host


class CountedDevice:
    """A `Device` that counts its calls.

    `counts` has waits, bytes_up, bytes_down, graphs, captures, allocations, and kernels and copies
    outside of graphs. `gpu_ms` is the time between waits, from the first queued work to the last,
    if there are events.
    """

    def __init__(self, device: Device, events: Events | None = None) -> None:
        self._device, self._events = device, events
        self.counts: Counter[str] = Counter()
        self.gpu_ms = 0.0
        self._recorded: Counter[str] | None = None  # bytes of each replay
        self._first: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def _count(self, kind: str) -> None:
        if self._recorded is not None:
            return  # the graph's, not the host's
        self.counts[kind] += 1
        if self._events is not None and self._first is None:
            self._first = self._events.record(None)

    def _moved(self, way: str, num_bytes: int) -> None:
        found = self.counts if self._recorded is None else self._recorded
        found[way] += num_bytes

    def allocate(self, num_bytes: int) -> Buffer:
        self.counts["allocations"] += 1
        return self._device.allocate(num_bytes)

    def upload(self, address: int, host: NDArray[Any]) -> None:
        self._count("copies")
        self._moved("bytes_up", host.nbytes)
        self._device.upload(address, host)

    def download(self, host: NDArray[Any], address: int) -> None:
        self._count("copies")
        self._moved("bytes_down", host.nbytes)
        self._device.download(host, address)

    def move_rows(self, planes: Planes, rows_address: int, count: int, first: int) -> None:
        self._count("kernels")
        self._device.move_rows(planes, rows_address, count, first)

    def append_rows(self, planes: Planes, rows: NewRows, count: int) -> None:
        self._count("kernels")
        self._device.append_rows(planes, rows, count)

    def gather_rows(
        self, target: int, source: int, rows: NDArray[np.int64], row_bytes: int
    ) -> None:
        self._count("kernels")
        if not is_run(rows):
            self._moved("bytes_up", 4 * len(rows))
        self._device.gather_rows(target, source, rows, row_bytes)

    def gather_rows_at(
        self, target: int, source: int, rows_address: int, count: int, row_bytes: int
    ) -> None:
        self._count("kernels")
        self._device.gather_rows_at(target, source, rows_address, count, row_bytes)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._count("copies")
        self._device.copy(target, source, num_bytes)

    def launch(self, kernel: Variant, grid: tuple[int, int, int], arguments: Sequence[int]) -> None:
        self._count("kernels")
        self._device.launch(kernel, grid, arguments)

    def synchronize(self) -> None:
        self.counts["waits"] += 1
        first, self._first = self._first, None
        if self._events is None or first is None:
            self._device.synchronize()
            return
        last = self._events.record(None)
        self._device.synchronize()
        self.gpu_ms += self._events.between_ms(first, last)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self.counts["captures"] += 1
        self._recorded = moved = Counter()
        try:
            replay = self._device.capture(enqueue)
        finally:
            self._recorded = None
        if replay is enqueue:  # it could not be recorded
            return enqueue

        def counted() -> None:
            self._count("graphs")
            self.counts.update(moved)
            replay()

        return counted


@dataclass(frozen=True, slots=True)
class Steps:
    """The counted steps of an output."""

    count: int
    tokens: int
    ms: float  # median of a step
    cpu_ms: float  # mean of a step, all threads
    gpu_ms: float  # mean of a step; 0 without events
    largest: dict[str, int]  # maximum of a step, by count
    token_ids: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.count / self.ms

    def as_json(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "token_ids"}
        return {**found, "tokens_per_s": self.tokens_per_s}

    def line(self, name: str) -> str:
        return (
            f"{name:8} {self.tokens_per_s:.1f} tokens/s, {self.ms:.3f} ms a step of "
            f"{self.tokens / self.count:.2f} tokens, GPU {self.gpu_ms:.3f}, CPU {self.cpu_ms:.3f}; "
            f"{self._counted(name)}"
        )

    def _counted(self, name: str) -> str:
        peak, (waits, num_bytes) = self.largest, GOALS[name]
        if not peak:
            return "not counted: no engine of TensorRT"
        return (
            f"at most {peak['waits']} waits (goal {waits}), {peak['bytes_down']} bytes back (goal "
            f"{num_bytes}), {peak['bytes_up']} there, {peak['graphs']} graphs, {peak['kernels']} "
            f"kernels and {peak['copies']} copies by themselves"
        )


def steps_of(
    llm: LLM, device: CountedDevice | None, prompt: str, tokens: int, *, speculative: bool
) -> Steps:
    """Return the steps of the second of two outputs, without captures and allocations."""
    for _ in range(2):
        answer = llm.generate(
            prompt, sampling=GREEDY, max_generate_length=tokens, speculative=speculative
        )
        found: list[tuple[int, float, Counter[str]]] = []
        cpu, gpu, before = time.process_time(), _gpu_ms(device), _counts(device)
        start = time.perf_counter()
        for step in answer:
            now, counts = time.perf_counter(), _counts(device)
            found.append((len(step.token_ids), now - start, counts - before))
            if len(found) == _UNCOUNTED:
                cpu, gpu = time.process_time(), _gpu_ms(device)
            start, before = time.perf_counter(), counts
    steps = [each for each in found[_UNCOUNTED:] if each[0]]
    cpu, gpu = time.process_time() - cpu, _gpu_ms(device) - gpu
    largest = (
        {}
        if device is None
        else {
            kind: max(counts[kind] for _, _, counts in steps)
            for kind in (
                "waits",
                "bytes_up",
                "bytes_down",
                "graphs",
                "kernels",
                "copies",
                "captures",
                "allocations",
            )
        }
    )
    return Steps(
        len(steps),
        sum(count for count, _, _ in steps),
        1e3 * statistics.median(seconds for _, seconds, _ in steps),
        1e3 * cpu / len(steps),
        gpu / len(steps),
        largest,
        tuple(answer.token_ids),
    )


def _counts(device: CountedDevice | None) -> Counter[str]:
    return Counter() if device is None else device.counts.copy()


def _gpu_ms(device: CountedDevice | None) -> float:
    return 0.0 if device is None else device.gpu_ms


def measured(
    llm: LLM, device: CountedDevice | None, prompt: str, tokens: int, *, has_draft: bool
) -> dict[str, Any]:
    """Measure plain and drafted steps, and compare the outputs; print a line for each."""
    ways = {"plain": False, **({"drafted": True} if has_draft else {})}
    found = {
        name: steps_of(llm, device, prompt, tokens, speculative=drafts)
        for name, drafts in ways.items()
    }
    for name, steps in found.items():
        print(steps.line(name))
    answers = {steps.token_ids for steps in found.values()}
    return {**{name: each.as_json() for name, each in found.items()}, "is_plain": len(answers) == 1}


@contextmanager
def counted_gpu() -> Iterator[list[CountedDevice]]:
    """Count the GPU calls of engines opened in this context; the list is empty until then."""
    opened: list[CountedDevice] = []
    open_cuda = driver.open_device

    def open_device() -> CountedDevice:
        if not opened:  # one for all engines: they share a stream
            opened.append(CountedDevice(device := open_cuda(), CudaEvents(device)))
        return opened[0]

    with mock.patch.object(driver, "open_device", open_device):
        yield opened


def production(engine: Path, prompt: str, tokens: int, *, has_draft: bool) -> dict[str, Any]:
    """Measure an engine of this machine, with default trees."""
    with counted_gpu() as opened:
        llm = LLM(engine, spec=SpecOptions() if has_draft else None)
    device = opened[0] if opened else None
    return measured(llm, device, prompt, tokens, has_draft=has_draft)


def on_the_fake_gpu(base: Path, draft: Path, engine: Path, tokens: int) -> dict[str, Any]:
    """Measure the TensorRT graphs of two bundles, with the manifests of their engine."""
    import pytest  # modules of the tests need it
    from fake_gpu import FakeDevice
    from lowered_engines import Lowered

    device = CountedDevice(FakeDevice())
    spec = SpecOptions(top_k=4, steps=3, verify_size=12, tree="fixed")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        pair = SimpleNamespace(bundle=base, draft_bundle=draft, engine=engine)
        lowered = Lowered(pair, Path(folder))
        lowered.replace_engines(patch, device)
        llm = LLM(engine, spec=spec)
        return measured(llm, device, "red", tokens, has_draft=True)
