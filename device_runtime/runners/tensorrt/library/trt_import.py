"""Which TensorRT is here.

TensorRT compiles on and for the GPU of the machine. TensorRT-RTX has nearly the same interface,
compiles ahead of time for the GPUs it knows, and needs none itself. Their engines differ.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability

OLDEST = (10, 3)  # of TensorRT, that of JetPack 6.1; the table of operators begins with it
RTX_TAKES = (11, 4)  # the TensorRT whose trunk TensorRT-RTX 1.7 shares
# Plugins whose kernels lie in the plan: by headers and `tensorrt.plugin` of the bindings wheels.
# Before them a plugin's class is needed where an engine runs; one in Python launches its kernel.
FIRST_QUICK_PLUGINS, BROKEN_PLUGINS = (10, 9), ((10, 14),)
_IN_PLACE = (10, 15)  # caches that are updated where they lie, rotary embeddings
FEATURES = ("IAttention", "IKVCacheUpdateLayer", "IRotaryEmbeddingLayer")  # from then on
_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
_HINT = (
    f"{install('tensorrt-rtx')} compiles without a GPU; "
    "on a Jetson TensorRT comes with JetPack 6.1 and newer"
)
# TensorRT of a Jetson needs it; JetPack 6's host gives it to containers, JetPack 7.2 has none.
_DLA_LIBRARY = "libnvdla_compiler.so"
_DLA_HINT = (
    "install nvidia-l4t-dla-compiler on the board, and run a container with --runtime nvidia, "
    "in an image of the board's JetPack"
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

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of the TensorRT whose operators it takes."""
        return RTX_TAKES if self.is_ahead_of_time else _version(self.trt)

    @property
    def runs_python_plugins(self) -> bool:
        """Whether edgellm's kernels are launched by plugins in Python, which must be registered."""
        return not self.is_ahead_of_time and self.version < FIRST_QUICK_PLUGINS

    @property
    def maps_weights(self) -> bool:
        """Whether its parser takes addresses of weights; older ones read the file."""
        return hasattr(getattr(self.trt, "OnnxParser", None), "load_initializer")

    @property
    def updates_in_place(self) -> bool:
        """Whether it writes rows into a cache where it lies; older ones hand them out."""
        return self.version >= _IN_PLACE


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
    said = "; ".join([*reasons, found])
    raise EdgeLLMError(said, hint=_DLA_HINT if _DLA_LIBRARY in said else _HINT)


def installed() -> dict[str, Any]:
    """The modules that can be imported, by their labels."""
    found = {}
    for name in _NAMES:
        with contextlib.suppress(ImportError):
            trt = importlib.import_module(name)
            found[Library(trt, name == "tensorrt_rtx").label] = trt
    return found


def targets(trt: Any) -> list[int]:
    """Compute capabilities that TensorRT-RTX compiles for."""
    members = trt.ComputeCapability.__members__
    return sorted(int(name[2:]) for name in members if re.fullmatch(r"SM\d+", name))


def require_attributes(trt: Any) -> None:
    """Check that the bindings hand on the bytes of a plugin's attribute.

    TensorRT's bindings up to 10.15 repeat the first byte under NumPy 2.

    Raises:
        EdgeLLMError: they change bytes.
    """
    data = np.frombuffer(b"{}", np.int8)  # the field has its address only
    field = trt.PluginField("", data, trt.PluginFieldType.CHAR)
    if (found := bytes(field.data)) != b"{}":
        raise EdgeLLMError(
            f"the bindings of TensorRT {trt.__version__} change attributes of plugins with NumPy "
            f"{np.__version__}: {b'{}'!r} becomes {found!r}",
            hint="pip install 'numpy<2' 'ml_dtypes<0.6'",
        )


def plugin_module(trt: Any) -> Any:
    """The library's module `plugin`; in packages before 10.14 only the bindings have it.

    Raises:
        EdgeLLMError: there is none.
    """
    name = trt.__name__
    for package in (name, f"{name}_bindings"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{package}.plugin")
    raise EdgeLLMError(
        f"{_NAMES[name]} {trt.__version__} has no module {name}.plugin",
        hint="install all Python files of this TensorRT, or build with --kernels tensorrt",
    )


def _load(name: str) -> Library | str:
    """A module that can compile here, or why it cannot."""
    try:
        trt = importlib.import_module(name)
    except ModuleNotFoundError:
        return f"{name} is not installed"
    except ImportError as error:
        return f"{name} cannot be loaded: {error}"
    is_rtx = name == "tensorrt_rtx"
    if not is_rtx and _version(trt) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return f"TensorRT {trt.__version__} is too old, {needed} is needed"
    missing = [feature for feature in FEATURES if not hasattr(trt, feature)]
    if missing and Library(trt, is_rtx).updates_in_place:
        return f"{_NAMES[name]} {trt.__version__} has no {missing[0]}"
    if not is_rtx and compute_capability() is None:  # its builder would end the process
        return f"TensorRT {trt.__version__} compiles only where an NVIDIA GPU is"
    return Library(trt, is_rtx)


def _version(trt: Any) -> tuple[int, int]:
    major, minor = trt.__version__.split(".")[:2]
    return int(major), int(minor)
