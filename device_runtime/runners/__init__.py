"""What runs engines, one package each: a library, or a library with the device that it takes.

A package here is found by its name; `build` has one of the same name, which compiles. Users name
libraries: `onnxruntime` with the device cuda is the package `onnxruntime_cuda`.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Protocol, cast

from edgellm.contract import (
    DraftEngineManifest,
    EdgeLLMError,
    EngineManifest,
    VisualEngineManifest,
)
from edgellm.device_runtime.session import DraftSession, HeadsSession, Session, VisualSession

DEVICES = ("cpu", "cuda")  # of libraries that have several, the usual one first


class Backend(Protocol):
    """The functions that a backend's package has."""

    def available(self) -> str:
        """The library's version; raises `EdgeLLMError` with the remedy when it cannot run."""
        ...

    def open_session(self, engine: Path, manifest: EngineManifest) -> Session:
        """Load an engine that was built on this machine."""
        ...

    def open_draft_session(self, engine: Path, manifest: DraftEngineManifest) -> DraftSession:
        """Load a draft engine that was built on this machine."""
        ...

    def open_heads(self, engine: Path, manifest: DraftEngineManifest) -> HeadsSession:
        """Load a draft engine of Medusa heads that was built on this machine."""
        ...

    def open_visual_session(self, engine: Path, manifest: VisualEngineManifest) -> VisualSession:
        """Load a visual engine that was built on this machine."""
        ...


def names() -> list[str]:
    """All backends, available or not."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def library_of(name: str) -> str:
    """The library of a backend, as users name it."""
    library, _, device = name.rpartition("_")
    return library if device in DEVICES else name


def libraries() -> list[str]:
    """Those of all backends, as users name them."""
    return sorted({library_of(name) for name in names()})


def resolve(name: str, device: str = "") -> str:
    """The backend of a library on a device; "auto" is the first library that is available.

    Args:
        name: a library, a backend, or "auto".
        device: of `DEVICES`, or "" for the usual one.

    Raises:
        EdgeLLMError: unknown, or (none) available on this machine, or not for the device.
    """
    if name == "auto":
        reasons = {library: _reason_against(resolve(library, device)) for library in libraries()}
        usable = [library for library, reason in reasons.items() if not reason]
        if not usable:
            details = "; ".join(f"{library}: {reason}" for library, reason in reasons.items())
            raise EdgeLLMError(f"no backend can run here ({details})")
        name = usable[0]
    found = next((each for each in (f"{name}_{device or DEVICES[0]}", name) if each in names()), "")
    if not found:
        known = ", ".join(libraries())
        raise EdgeLLMError(f"unknown backend {name!r}", hint=f"backends: {known}")
    return found


def find(name: str) -> Backend:
    """The backend of a library or package, on the library's usual device; raises as `resolve`."""
    return cast(Backend, importlib.import_module(f"{__name__}.{resolve(name)}"))


def _reason_against(name: str) -> str:
    try:
        find(name).available()
    except EdgeLLMError as error:
        return str(error)
    return ""
