"""What compiles engines, one package each; the half that runs them is in `device_runtime.runners`.

A package of this name beside this module is a backend when it has the functions of `Backend`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from edgellm.build.plan import (
    Compiled,
    CompiledDraft,
    CompiledVisual,
    CompilerOptions,
    Estimate,
    Origin,
    Plan,
    Report,
    VisualPlan,
)
from edgellm.contract import (
    BundleManifest,
    DraftBundleManifest,
    EdgeLLMError,
    VisualBundleManifest,
)
from edgellm.device_runtime import runners


class Backend(Protocol):
    """The functions that a backend's package has."""

    LABEL: str  # the library's name, for people
    DEVICE: str  # that engines run on

    def origin(self, compiler: CompilerOptions) -> Origin:
        """What graphs that are compiled so depend on.

        Raises:
            EdgeLLMError: not usable here, or a flag that is not the backend's.
        """
        ...

    def estimate(
        self, bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan
    ) -> Estimate:
        """Predict sizes without building."""
        ...

    def compile(
        self, bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
    ) -> Compiled:
        """Build the engine's graphs into `folder` and measure what a pass costs."""
        ...

    def compile_draft(
        self, bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
    ) -> CompiledDraft:
        """Build a draft's graphs into `folder` and measure what its passes cost."""
        ...

    def estimate_visual(
        self, bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan
    ) -> Estimate:
        """Predict sizes without building."""
        ...

    def compile_visual(
        self,
        bundle: Path,
        manifest: VisualBundleManifest,
        plan: VisualPlan,
        folder: Path,
        report: Report,
    ) -> CompiledVisual:
        """Build an encoder's graph into `folder`."""
        ...


def find(name: str) -> Backend:
    """The backend of a library or package; see `runners.resolve`, which raises."""
    return cast(Backend, importlib.import_module(f"edgellm.build.{runners.resolve(name)}"))


def choose(library: str, device: str) -> str:
    """The name of a library's backend for a device, "" for the library's usual one.

    Raises:
        EdgeLLMError: unknown, or (none) available on this machine, or not for the device.
    """
    name = runners.resolve(library, device)
    backend = find(name)
    if device and device != backend.DEVICE:
        raise EdgeLLMError(
            f"--device {device} is not for {backend.LABEL}",
            hint="it goes with --backend onnxruntime",
        )
    return name
