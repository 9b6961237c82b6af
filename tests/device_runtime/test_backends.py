"""The backend that `auto` chooses, and the reasons against the others."""

from __future__ import annotations

import pytest

from edgellm.build import cli
from edgellm.build.backends import choose
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import runners
from edgellm.device_runtime.runners import onnxruntime_cpu, onnxruntime_cuda, tensorrt
from edgellm.device_runtime.runners.tensorrt.cuda import driver
from edgellm.device_runtime.runners.tensorrt.library import trt_import

BACKENDS = {
    "tensorrt": tensorrt,
    "onnxruntime_cuda": onnxruntime_cuda,
    "onnxruntime_cpu": onnxruntime_cpu,
}
NO_GPU = "there is no NVIDIA GPU here"


@pytest.fixture
def machine(monkeypatch):
    """A machine on which these backends do not run."""

    def make(**reasons: str) -> None:
        for name, module in BACKENDS.items():

            def require(name: str = name) -> None:
                if name in reasons:
                    raise EdgeLLMError(reasons[name])

            monkeypatch.setattr(module, "require_device", require)

    return make


def test_backends_are_tried_fastest_first():
    assert list(runners.DEVICE_OF) == list(BACKENDS)
    assert sorted(BACKENDS) == runners.names()


@pytest.mark.parametrize(
    ("reasons", "device", "taken", "message"),
    [
        ({}, "", "tensorrt", "backend: tensorrt"),
        ({"tensorrt": "too old"}, "", "onnxruntime_cuda",
         "backend: onnxruntime on cuda (not tensorrt: too old)"),
        ({"tensorrt": "old", "onnxruntime_cuda": "no kernel"}, "", "onnxruntime_cpu",
         "backend: onnxruntime on cpu (not tensorrt: old; not onnxruntime on cuda: no kernel)"),
        ({"tensorrt": NO_GPU, "onnxruntime_cuda": NO_GPU}, "", "onnxruntime_cpu",
         f"backend: onnxruntime on cpu ({NO_GPU})"),
        ({}, "cpu", "onnxruntime_cpu", "backend: onnxruntime on cpu"),
        ({"tensorrt": NO_GPU, "onnxruntime_cuda": NO_GPU}, "cuda", "onnxruntime_cuda",
         f"backend: onnxruntime on cuda ({NO_GPU})"),
    ],
)  # fmt: skip
def test_auto_chooses_the_first_backend_that_runs(machine, capsys, reasons, device, taken, message):
    machine(**reasons)
    assert choose("auto", device) == taken
    cli.announce("auto", device)
    assert capsys.readouterr().out == f"{message}\n"
    cli.announce("tensorrt", device)
    assert capsys.readouterr().out == ""


def test_a_machine_without_backends(machine):
    machine(**dict.fromkeys(BACKENDS, "broken"))
    with pytest.raises(EdgeLLMError, match=r"no backend can run here \(tensorrt: broken; onnx"):
        runners.resolve("auto")


def test_tensorrt_needs_a_gpu_that_its_library_compiles_for(monkeypatch):
    """A GPU, a library that compiles for it, and the runtime's packages."""
    rtx = trt_import.Library(object(), is_ahead_of_time=True)
    monkeypatch.setattr(trt_import.Library, "label", "TensorRT-RTX 1.7")
    monkeypatch.setattr(trt_import, "find_library", lambda: rtx)
    monkeypatch.setattr(trt_import, "targets", lambda _: [89])
    opened = []
    monkeypatch.setattr(driver, "open_device", lambda: opened.append(1))
    for sm, fault in ((None, NO_GPU), (87, "does not compile for compute capability 8.7")):
        monkeypatch.setattr(tensorrt, "compute_capability", lambda sm=sm: sm)
        with pytest.raises(EdgeLLMError, match=fault):
            tensorrt.require_device()
    assert not opened
    monkeypatch.setattr(tensorrt, "compute_capability", lambda: 89)
    tensorrt.require_device()
    assert opened
