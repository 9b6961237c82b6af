"""Checks of ONNX Runtime's CUDA provider on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.onnxruntime_cuda import engine_options
from edgellm.device_runtime.runners.onnxruntime_graphs import CUDA
from edgellm.device_runtime.runners.onnxruntime_import import ort

PROVIDER = "CUDAExecutionProvider"
MINIMUM_VERSION = (1, 23)  # the first whose MatMulNBits takes 8 bits on CUDA


def require_cuda() -> str:
    """Check that CUDA sessions can be opened; returns their device.

    Raises:
        EdgeLLMError: another build of ONNX Runtime, an old one, no GPU, or missing libraries.
    """
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if PROVIDER not in ort.get_available_providers():
        raise EdgeLLMError(
            f"onnxruntime {ort.__version__} is installed without CUDA",
            hint=f"pip uninstall onnxruntime, then {install('gpu')}",
        )
    if version < MINIMUM_VERSION:
        raise EdgeLLMError(
            f"onnxruntime-gpu {ort.__version__} is too old for CUDA engines",
            hint="pip install --upgrade onnxruntime-gpu",
        )
    if compute_capability() is None:
        raise EdgeLLMError(
            "ONNX Runtime has CUDA, but this machine has no NVIDIA GPU or no driver for it",
            hint="install NVIDIA's driver, or build engines with --device cpu",
        )
    if missing := _missing_library():
        raise EdgeLLMError(
            f"ONNX Runtime's CUDA libraries do not load: {missing}",
            hint="pip install 'onnxruntime-gpu[cuda,cudnn]', or install CUDA and cuDNN 9",
        )
    if fault := _fault_of_a_kernel():
        raise EdgeLLMError(
            f"ONNX Runtime's CUDA kernels do not run on this GPU: {fault}",
            hint="onnxruntime-gpu has no kernels for this GPU (the public one for aarch64 has none "
            "for Orin and Thor): take NVIDIA's build for the board, or --backend tensorrt",
        )
    return CUDA


def require_version(options: Mapping[str, Any]) -> None:
    """Reject a version with wrong kernels for an engine's operators; raises `EdgeLLMError`.

    Args:
        options: of the engine.
    """
    least = options.get(engine_options.MINIMUM_VERSION, "0.0")
    if is_older_than(least):
        raise EdgeLLMError(
            f"onnxruntime-gpu {ort.__version__} does not compute all that this engine has (fused "
            f"attention with masks, experts); {least} does",
            hint="pip install --upgrade onnxruntime-gpu, or build with --attention plain",
        )


def is_older_than(version: str) -> bool:
    """Whether this ONNX Runtime is older, by the first two numbers."""
    here, there = (
        tuple(int(part) for part in each.split(".")[:2]) for each in (ort.__version__, version)
    )
    return here < there


def _fault_of_a_kernel() -> str:
    """The error of a test kernel; "" if its result is correct.

    The library may have been compiled for other GPUs, which only a launch shows.
    """
    x = np.arange(4, dtype=np.float32)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(_doubling(), options, providers=[PROVIDER])
        session.disable_fallback()
        found = np.asarray(session.run(None, {"x": x})[0])
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        return str(error).splitlines()[0][:200]
    return "" if np.array_equal(found, x + x) else "a sum is wrong"


def _doubling() -> bytes:
    """A graph of one node: y = x + x."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "doubling", [x], [y])
    opset = helper.make_opsetid("", 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString()


def _missing_library() -> str:
    """The loader's error for the provider's library; "" if it loads."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints missing libraries
        ort.preload_dlls(msvc=False)
    folder = Path(ort.__file__).parent / "capi"
    try:
        for name in ("shared", "cuda"):  # the second needs the first
            ctypes.CDLL(str(folder / f"libonnxruntime_providers_{name}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error).splitlines()[0]
    return ""
