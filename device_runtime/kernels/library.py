"""Finds and loads the compiled kernels, and registers them with sessions."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import private_folder, user_folder, utf8_path
from edgellm.device_runtime.kernels.compile import (
    LIBRARY,
    NoCompilerError,
    cached_library,
    compiler,
)

if TYPE_CHECKING:
    import onnxruntime as ort

DOMAIN = "edgellm.kernels"  # portable graphs have functions with equal names in another domain
_PREBUILT = Path(__file__).parent / "prebuilt" / LIBRARY
_HINT = (
    "install a C++ compiler, g++ 11 or clang++ 12 or newer (Debian and Ubuntu: apt install g++), "
    "or use ONNX Runtime's own operators"
)


@cache
def library_path() -> Path:
    """The path of the shared library: prebuilt in the package, or compiled on this machine.

    It is compiled once for each compiler and version of the sources, in 45 s of processor time.

    Raises:
        EdgeLLMError: there is no library and no compiler, or the folder is not writable.
    """
    if _PREBUILT.exists():
        return _PREBUILT
    cxx = compiler()
    if cxx is None:
        raise EdgeLLMError("there is no C++ compiler for edgellm's kernels", hint=_HINT)
    try:
        return _cached(cxx)
    except NoCompilerError as error:
        lines = str(error).splitlines() or ["it says nothing"]
        raise EdgeLLMError(f"{cxx} cannot compile the kernels: {lines[0]}", hint=_HINT) from None
    except OSError as error:
        raise EdgeLLMError(
            f"the kernels cannot be written to {error.filename}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from None


def _cached(cxx: str) -> Path:
    """The library in the user's cache, or in a private folder if the home cannot be written."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return cached_library(cxx, cache=user_folder("XDG_CACHE_HOME", ".cache"))
    except OSError as error:
        if given or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return cached_library(cxx, cache=private_folder() / ".cache")


@cache
def load_library() -> ctypes.CDLL:
    """The library in this process; raises `EdgeLLMError` as `library_path` does."""
    path = library_path()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise EdgeLLMError(
            f"the kernels cannot be loaded: {error}", hint=f"delete {path}"
        ) from None


@cache
def instruction_sets() -> tuple[str, ...]:
    """This processor's instruction sets with kernels, best first; last is the scalar reference."""
    name = load_library().edgellm_instruction_set
    name.restype = ctypes.c_char_p
    names: list[str] = []
    while (found := name(len(names))) is not None:
        names.append(found.decode())
    return tuple(names)


def register(options: ort.SessionOptions) -> None:
    """Register the operators of `DOMAIN` with session options.

    Raises:
        EdgeLLMError: the library is unavailable, or ONNX Runtime is too old for it.
    """
    path = library_path()
    try:
        with utf8_path(path) as name:
            options.register_custom_ops_library(name)
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        raise EdgeLLMError(
            f"ONNX Runtime does not take the kernels: {str(error).splitlines()[0]}",
            hint="update it: pip install -U onnxruntime",
        ) from None
