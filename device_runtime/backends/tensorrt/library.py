"""Which TensorRT is here, and what it compiles for.

TensorRT compiles on and for the GPU of the machine. TensorRT-RTX has nearly the same interface,
compiles ahead of time for the GPUs it knows, and needs none itself. Their engines differ.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.backends import Origin
from edgellm.device_runtime.backends.tensorrt.gpu import compute_capability, driver_cuda

_MINIMUM = (10, 15)  # of TensorRT: caches that are updated in place, rotary embeddings
_OLDEST_CUDA = (12, 0)
FEATURES = ("IAttention", "IKVCacheUpdateLayer", "IRotaryEmbeddingLayer", "IStreamWriter")
_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
_HINT = (
    "in edgellm's folder: pip install '.[tensorrt-rtx]' compiles without a GPU; "
    "on a Jetson TensorRT comes with JetPack 7.2"
)


@dataclass(frozen=True, slots=True)
class Library:
    """One of the two modules."""

    trt: Any
    is_ahead_of_time: bool  # compiles for GPUs that are not here

    @property
    def label(self) -> str:
        """What engines depend on: the library and its version."""
        return f"{_NAMES[self.trt.__name__]} {self.trt.__version__}"


@dataclass(frozen=True, slots=True)
class Target:
    """What is compiled with, and for which GPU."""

    library: Library
    sm: int  # compute capability, 89 for 8.9

    @property
    def origin(self) -> Origin:
        """What engines depend on."""
        return Origin(self.library.label, f"sm{self.sm}")


def find_library(*, ahead_of_time: bool = False) -> Library:
    """TensorRT where it can compile, else TensorRT-RTX.

    Args:
        ahead_of_time: only what compiles for a GPU that is not here will do.

    Raises:
        EdgeLLMError: neither is usable; says why.
    """
    reasons = []
    if not ahead_of_time:
        found = _load("tensorrt")
        if isinstance(found, Library):
            return found
        reasons.append(found)
    found = _load("tensorrt_rtx")
    if isinstance(found, Library):
        return found
    raise EdgeLLMError("; ".join([*reasons, found]), hint=_HINT)


def find_target(wanted: str) -> Target:
    """The library and the GPU that are compiled with and for.

    Args:
        wanted: compute capability of a GPU, "8.9", "89" or "sm89"; "" is this machine's.

    Raises:
        EdgeLLMError: no library, no GPU here while none is named, one that the library does not
            compile for, or a driver that is too old for it.
    """
    library = find_library(ahead_of_time=bool(wanted))
    sm = parse_sm(wanted) if wanted else compute_capability()
    if sm is None:
        raise EdgeLLMError(
            "there is no NVIDIA GPU here to compile for",
            hint="--gpu 89 compiles ahead of time for GPUs of compute capability 8.9",
        )
    if library.is_ahead_of_time and sm not in (known := _targets(library.trt)):
        shown = ", ".join(f"{each // 10}.{each % 10}" for each in known)
        raise EdgeLLMError(
            f"{library.label} does not compile for compute capability {sm // 10}.{sm % 10}",
            hint=f"it does for {shown}; elsewhere install TensorRT on the device itself",
        )
    if not library.is_ahead_of_time:
        _require_driver(library)
    return Target(library, sm)


def _require_driver(library: Library) -> None:
    """Refuse a driver that is older than the CUDA which TensorRT was made for."""
    found, needed = driver_cuda(), _needed_cuda()
    if found is not None and found < needed:
        raise EdgeLLMError(
            f"{library.label} needs CUDA {needed[0]}, the NVIDIA driver runs CUDA "
            f"{found[0]}.{found[1]} at most",
            hint="install a newer NVIDIA driver; on a Jetson flash JetPack 7.2",
        )


def _needed_cuda() -> tuple[int, int]:
    """13 where pip installed tensorrt-cu13, else the oldest of TensorRT 10.15."""
    try:
        importlib.metadata.distribution("tensorrt-cu13")
    except importlib.metadata.PackageNotFoundError:
        return _OLDEST_CUDA
    return 13, 0


def installed() -> dict[str, Any]:
    """The modules that can be imported, by their labels."""
    found = {}
    for name in _NAMES:
        with contextlib.suppress(ImportError):
            trt = importlib.import_module(name)
            found[Library(trt, name == "tensorrt_rtx").label] = trt
    return found


def _load(name: str) -> Library | str:
    """A module that can compile here, or why it cannot."""
    try:
        trt = importlib.import_module(name)
    except ModuleNotFoundError:
        return f"{name} is not installed"
    except ImportError as error:
        return f"{name} cannot be loaded: {error}"
    is_rtx = name == "tensorrt_rtx"
    if not is_rtx and tuple(int(part) for part in trt.__version__.split(".")[:2]) < _MINIMUM:
        needed = ".".join(map(str, _MINIMUM))
        return f"TensorRT {trt.__version__} is too old, {needed} is needed"
    missing = [feature for feature in FEATURES if not hasattr(trt, feature)]
    if missing:
        return f"{_NAMES[name]} {trt.__version__} has no {missing[0]}"
    if not is_rtx and compute_capability() is None:  # its builder would end the process
        return f"TensorRT {trt.__version__} compiles only where an NVIDIA GPU is"
    return Library(trt, is_rtx)


def parse_sm(wanted: str) -> int:
    """The compute capability that a user writes as 89, 8.9 or sm89; raises `EdgeLLMError`."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", wanted.lower())
    if match is None:
        raise EdgeLLMError(
            f"--gpu {wanted} is no compute capability", hint="give 89 or 8.9, for example"
        )
    return 10 * int(match[1]) + int(match[2])


def _targets(trt: Any) -> list[int]:
    """Compute capabilities that TensorRT-RTX knows."""
    members = trt.ComputeCapability.__members__
    return sorted(int(name[2:]) for name in members if re.fullmatch(r"SM\d+", name))
