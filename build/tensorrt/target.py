"""Target of a build: the compiling library and the GPU."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from edgellm.build.plan import Origin
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability, driver_cuda
from edgellm.device_runtime.runners.tensorrt.library.trt_import import (
    Library,
    find_library,
    targets,
)

_OLDEST_CUDA = (12, 0)


@dataclass(frozen=True, slots=True)
class Target:
    """The compiling library and the GPU."""

    library: Library
    sm: int  # compute capability, 89 for 8.9

    @property
    def origin(self) -> Origin:
        """Dependencies of engines."""
        return Origin(self.library.label, f"sm{self.sm}")


def find_target(wanted: str) -> Target:
    """Find the compiling library and the GPU.

    Args:
        wanted: compute capability of a GPU, "8.9", "89" or "sm89"; "": this machine's.

    Raises:
        EdgeLLMError: no library, no GPU here and none given, a GPU that the library does not
            support, or a driver that is too old.
    """
    library = find_library(ahead_of_time=bool(wanted))
    sm = parse_sm(wanted) if wanted else compute_capability()
    if sm is None:
        raise EdgeLLMError(
            "there is no NVIDIA GPU here to compile for",
            hint="--gpu 89 compiles ahead of time for GPUs of compute capability 8.9",
        )
    if library.is_ahead_of_time and sm not in (known := targets(library.trt)):
        shown = ", ".join(f"{each // 10}.{each % 10}" for each in known)
        raise EdgeLLMError(
            f"{library.label} does not compile for compute capability {sm // 10}.{sm % 10}",
            hint=f"it does for {shown}; elsewhere install TensorRT on the device itself",
        )
    if not library.is_ahead_of_time:
        _require_driver(library)
    return Target(library, sm)


def _require_driver(library: Library) -> None:
    """Reject a driver that is too old for TensorRT's CUDA version."""
    found, needed = driver_cuda(), _needed_cuda()
    if found is not None and found < needed:
        raise EdgeLLMError(
            f"{library.label} needs CUDA {needed[0]}, the NVIDIA driver runs CUDA "
            f"{found[0]}.{found[1]} at most",
            hint="install a newer NVIDIA driver; on a Jetson flash JetPack 7.2",
        )


def _needed_cuda() -> tuple[int, int]:
    """13 if pip installed tensorrt-cu13, else the oldest of TensorRT 10.15."""
    try:
        importlib.metadata.distribution("tensorrt-cu13")
    except importlib.metadata.PackageNotFoundError:
        return _OLDEST_CUDA
    return 13, 0


def parse_sm(wanted: str) -> int:
    """Parse a compute capability, 89, 8.9 or sm89; raises `EdgeLLMError`."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", wanted.lower())
    if match is None:
        raise EdgeLLMError(
            f"--gpu {wanted} is not a compute capability", hint="give 89 or 8.9, for example"
        )
    return 10 * int(match[1]) + int(match[2])
