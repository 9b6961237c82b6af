"""TensorRT-RTX's runtime configuration and cache, on a fake of its bindings and of the driver."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeDriver, fake_graphs

from edgellm.core.artifact import cache_folder
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.cuda import driver as cuda
from edgellm.device_runtime.runners.tensorrt.library import runtime
from edgellm.device_runtime.runners.tensorrt.library.specialized_kernels import specialize

HERE, ELSEWHERE = b"of this GPU", b"of another GPU"
Allocation = enum.Enum("Allocation", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
Strategy = enum.Enum("Strategy", "LAZY EAGER NONE")


class _Config:
    """`IRuntimeConfig`; contexts made by it have kernels compiled as it says then."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.dynamic_shapes_kernel_specialization_strategy = Strategy.LAZY
        self.allocation, self.cache = Allocation.STATIC, None

    def set_execution_context_allocation_strategy(self, strategy: Allocation) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> Any:
        held = [HERE]

        def deserialize(blob: bytes) -> bool:
            self._driver.use("deserialize")  # needs a context, to compare the GPU
            fits = blob.startswith(HERE)
            held[:] = [blob] if fits else held
            return fits

        return SimpleNamespace(
            held=held,
            deserialize=deserialize,
            serialize=lambda: (self._driver.use("serialize"), memoryview(held[0]))[1],
        )

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class Rtx:
    """`tensorrt_rtx`, and an engine of it."""

    __name__, __version__ = "tensorrt_rtx", "1.7.1"
    DynamicShapesKernelSpecializationStrategy = Strategy
    ExecutionContextAllocationStrategy = Allocation
    num_io_tensors = 0

    def __init__(self) -> None:
        self.driver = FakeDriver()
        graphs = fake_graphs(self.driver)
        self.device = cuda.CudaDevice(self.driver, graphs, self.driver.Device(0))
        self.made: list[tuple[Any, ...]] = []  # what contexts were made with
        severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=2, WARNING=3)
        self.ILogger = type("ILogger", (), {"Severity": severity, "__init__": lambda _: None})

    def Runtime(self, _logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=lambda _: self)

    def create_runtime_config(self) -> _Config:
        self.driver.use("config")
        return _Config(self.driver)

    def create_execution_context(self, given: Any) -> Any:
        strategy, allocation, cache = Strategy.LAZY, given, None
        if isinstance(given, _Config):
            strategy = given.dynamic_shapes_kernel_specialization_strategy
            allocation, cache = given.allocation, given.cache
        self.made.append((strategy, allocation, cache is not None))
        if cache is not None:
            cache.held[0] += b", a kernel"
        return SimpleNamespace(
            set_device_memory=lambda *_: True, set_optimization_profile_async=lambda *_: True
        )

    def load(self, folder: Path) -> Any:
        (folder / "plan").write_bytes(b"plan")
        return runtime.load_engine(self, folder / "plan", self.device, {}, folder / "a" / "kernels")


def test_recorded_passes_have_kernels_of_their_shapes_at_once(tmp_path):
    """A CUDA graph would keep the slower ones that run until others are compiled."""
    rtx = Rtx()
    loaded = rtx.load(tmp_path)
    loaded.new_context(0, rtx.device.allocate(1), is_recorded=True)
    loaded.new_context(0, rtx.device.allocate(1))  # of prompts, which have many shapes
    given = Allocation.USER_MANAGED, True
    assert rtx.made == [(Strategy.EAGER, *given), (Strategy.LAZY, *given)]
    assert not rtx.driver.stack


def test_kernels_are_kept_for_the_next_process(tmp_path):
    first = Rtx()
    loaded = first.load(tmp_path)
    loaded.new_context(0, first.device.allocate(1))
    loaded.kernels.save()
    path = tmp_path / "a" / "kernels"
    assert path.read_bytes() == HERE + b", a kernel"
    second = Rtx().load(tmp_path)
    path.unlink()
    second.kernels.save()  # nothing is new
    assert not path.exists()


def test_kernels_of_another_machine_are_replaced(tmp_path):
    path = tmp_path / "a" / "kernels"
    path.parent.mkdir()
    path.write_bytes(ELSEWHERE)
    Rtx().load(tmp_path).kernels.save()
    assert path.read_bytes() == HERE


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "a").write_text("a file")
    Rtx().load(tmp_path).kernels.save()
    assert (tmp_path / "a").read_text() == "a file"


def test_plans_of_full_tensorrt_have_all_kernels(tmp_path):
    rtx: Any = Rtx()
    full = SimpleNamespace(ExecutionContextAllocationStrategy=Allocation)
    assert specialize(full, rtx, rtx.device, tmp_path / "kernels") is None
    loaded = runtime.LoadedEngine(trt=full, runtime=None, engine=rtx, device=rtx.device, log=None)  # type: ignore[arg-type]
    loaded.new_context(0, rtx.device.allocate(1))
    assert rtx.made == [(Strategy.LAZY, Allocation.USER_MANAGED, False)]


def test_engines_save_them_when_they_are_loaded(tmp_path, monkeypatch):
    """By the hash of the plan; then the passes of a token have run."""
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path / "cache"))
    rtx = Rtx()
    (tmp_path / "llm.engine").write_bytes(b"plan")
    engine: Any = SimpleNamespace(
        graphs={"llm": [SimpleNamespace(path="llm.engine")]},
        cache_of=lambda _: None,
        files={"llm.engine": SimpleNamespace(sha256="5" * 64)},
    )
    monkeypatch.setattr(tensorrt, "_require_origin", lambda *_: rtx)
    monkeypatch.setattr(tensorrt, "require_memory", lambda *_: None)
    monkeypatch.setattr(cuda, "open_device", lambda: rtx.device)

    def prepare(_role: str, _engine: Any, loaded: Any, device: Any) -> None:
        loaded.new_context(0, device.allocate(1))

    monkeypatch.setattr(tensorrt, "runner_of", prepare)
    tensorrt.open_engine(tmp_path, engine)
    (saved,) = (cache_folder() / "tensorrt").iterdir()
    assert (saved.name, saved.read_bytes()) == ("5" * 32 + ".kernels", HERE + b", a kernel")


def test_the_bindings_have_these_names():
    trt = pytest.importorskip("tensorrt_rtx", reason="pip install '.[tensorrt-rtx]'")
    assert {"LAZY", "EAGER"} <= set(trt.DynamicShapesKernelSpecializationStrategy.__members__)
    assert hasattr(trt.ICudaEngine, "create_runtime_config")
    for name in (
        "dynamic_shapes_kernel_specialization_strategy",
        "set_execution_context_allocation_strategy",
        "create_runtime_cache",
        "set_runtime_cache",
    ):
        assert hasattr(trt.IRuntimeConfig, name)
    assert hasattr(trt.IRuntimeCache, "deserialize")
    assert hasattr(trt.IRuntimeCache, "serialize")
    assert "runtime_config" in trt.ICudaEngine.create_execution_context.__doc__
