"""ONNX Runtime's CUDA provider: whether it runs here, and why not if it does not."""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path

import onnxruntime as ort

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.onnxruntime_graphs import CUDA

PROVIDER = "CUDAExecutionProvider"
MINIMUM_VERSION = (1, 23)  # the first whose MatMulNBits takes 8 bits on CUDA


def require_cuda() -> str:
    """The device of sessions on CUDA, if they can be opened.

    Raises:
        EdgeLLMError: another build of ONNX Runtime, an old one, no GPU, or missing libraries.
    """
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if PROVIDER not in ort.get_available_providers():
        raise EdgeLLMError(
            f"onnxruntime {ort.__version__} is installed without CUDA",
            hint="pip uninstall onnxruntime, then in edgellm's folder: pip install '.[gpu]'",
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
    return CUDA


def _missing_library() -> str:
    """What the loader says of the provider's library, "" if all that it needs is there."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
        ort.preload_dlls(msvc=False)
    folder = Path(ort.__file__).parent / "capi"
    try:
        for name in ("shared", "cuda"):  # the second needs the first
            ctypes.CDLL(str(folder / f"libonnxruntime_providers_{name}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error).splitlines()[0]
    return ""
