"""Runners of engines: protocols, and one package for each backend (library and device).

Packages are found by name; `build` has a package of the same name, which compiles. Users name
libraries: `onnxruntime` with the device cuda is the package `onnxruntime_cuda`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from edgellm.core.commands.extras import remedy
from edgellm.core.errors import EdgeLLMError, suggestion
from edgellm.core.manifest import DEVICES, Engine, library_of
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.runner import Runner

# Devices of the backends, in the order in which "auto" tries them.
DEVICE_OF = {"tensorrt": "cuda", "onnxruntime_cuda": "cuda", "onnxruntime_cpu": "cpu"}


class Backend(Protocol):
    """The functions that a backend's package has."""

    def available(self) -> str:
        """The library's version; raises `EdgeLLMError` with a hint if it is unavailable."""
        ...

    def require_device(self) -> None:
        """Raise `EdgeLLMError` with the reason if this machine cannot run its own engines."""
        ...

    def open_engine(self, folder: Path, engine: Engine) -> Mapping[str, Runner]:
        """Load an engine that was built for this machine; returns its runners by role.

        Raises:
            BrokenArtifactError: built for another machine or library, or rejected by the library.
            LimitError: the device has too little memory.
        """
        ...


def names() -> list[str]:
    """All backends, available or not."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def libraries() -> list[str]:
    """The libraries of all backends, as users name them."""
    return sorted({library_of(name) for name in names()})


def resolve(name: str, device: str = "") -> str:
    """The backend of a library on a device; "auto" is what `automatic` chooses.

    Args:
        name: a library, a backend, or "auto".
        device: one of `DEVICES`, or "" for the default.

    Raises:
        EdgeLLMError: unknown, unavailable on this machine, or not for this device.
    """
    if name == "auto":
        return automatic(device)[0]
    found = next((each for each in (f"{name}_{device or DEVICES[0]}", name) if each in names()), "")
    if not found:
        words = (suggestion(name, libraries()), f"backends: {', '.join(libraries())}")
        raise EdgeLLMError(f"unknown backend {name!r}", hint=" ".join(filter(None, words)))
    return found


def automatic(device: str = "") -> tuple[str, dict[str, str]]:
    """The first backend whose engines run here: TensorRT, ONNX Runtime on CUDA, then on the CPU.

    Args:
        device: one of `DEVICES`, or "" for any. With "cuda", ONNX Runtime engines can be built
            also without a GPU.

    Returns:
        Its name, and by name why each backend before it does not run here.

    Raises:
        EdgeLLMError: no backend runs here, or the NVIDIA driver fails.
    """
    if device != "cpu":
        compute_capability()  # a driver that fails is an error, not a machine without a GPU
    reasons: dict[str, str] = {}
    for name in (each for each, runs_on in DEVICE_OF.items() if device in (runs_on, "")):
        reasons[name] = _reason_against(name)
        if not reasons[name]:
            return name, {key: reason for key, reason in reasons.items() if key != name}
    if device == "cuda":
        return "onnxruntime_cuda", reasons
    details = "; ".join(f"{library_of(name)}: {reason}" for name, reason in reasons.items())
    hint = remedy("onnxruntime") if find_spec("onnxruntime") is None else ""
    raise EdgeLLMError(f"no backend can run here ({details})", hint=hint)


def title(name: str) -> str:
    """A backend's name for users."""
    library = library_of(name)
    return library if library == name else f"{library} on {DEVICE_OF[name]}"


def find(name: str) -> Backend:
    """The backend of a library or package, on the library's default device; raises as `resolve`."""
    return cast(Backend, importlib.import_module(f"{__name__}.{resolve(name)}"))


def _reason_against(name: str) -> str:
    try:
        find(name).require_device()
    except EdgeLLMError as error:
        return str(error)
    return ""
