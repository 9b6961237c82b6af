"""Backends, one module each: everything that one inference library needs.

A module of this package is a backend when it has the functions of `Backend`; `llm_build` and
`llm_inference` find it by its file name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from edgellm.contract import (
    BundleManifest,
    DraftBundleManifest,
    DraftEngineManifest,
    EdgeLLMError,
    EngineManifest,
    PassGraph,
    VisualBundleManifest,
    VisualEngineManifest,
)
from edgellm.device_runtime.session import DraftSession, HeadsSession, Session, VisualSession


@dataclass(frozen=True, slots=True)
class CompilerOptions:
    """For backends that compile for a GPU."""

    target_sm: str = ""  # compute capability, "89" for 8.9; "": that of this machine's GPU
    workspace_mib: int = 0  # scratch memory on the GPU; 0: no limit
    opt_level: int | None = None  # 0 to 5; None: the library's
    timing_cache: Path | None = None  # read where it exists, written at the end
    layer_report: bool = False  # write every kernel to a file of the engine

    def given(self) -> dict[str, str | int]:
        """The flags that were given, with their values."""
        flags = {
            "--gpu": self.target_sm or None,
            "--workspace": self.workspace_mib or None,
            "--optLevel": self.opt_level,
            "--timingCache": None if self.timing_cache is None else str(self.timing_cache),
            "--layerReport": self.layer_report or None,
        }
        return {flag: value for flag, value in flags.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine is built for."""

    max_input_len: int
    kv_capacity: int
    threads: int  # 0 takes all cores
    prefill: str  # "auto", "same" or "int8": how quantized engines read prompts and trees
    quantize: str = "auto"  # of float weights: "none", "int8", "int4"; "auto": int8 for drafts
    kv_cache: str = "auto"  # "float", "int8"; "auto": int8 where it was calibrated for that
    is_eagle_base: bool = False  # the bundle must give features to a draft
    max_verify_tree_size: int = 0  # rows of a token tree; 0: for plain decoding
    max_draft_tree_size: int = 0  # rows drafted in a round; of draft engines
    compiler: CompilerOptions = CompilerOptions()


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted before anything is built; bytes."""

    engine_bytes: int
    kv_bytes: int
    peak_build_bytes: int
    decode_bytes: int  # read from memory for one token, without the KV cache
    runs_on_cpu: bool = True  # this machine's memory is what it is read from
    scratch_bytes: int = 0  # of the largest pass, where it is not part of the libraries
    device_bytes: int = 0  # memory of the GPU that runs it; 0: the CPU does, or it is not here


@dataclass(frozen=True, slots=True)
class Origin:
    """What compiled graphs depend on; an engine of another origin is refused."""

    version: str  # of the library, with its name where a backend has several
    machine: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a backend made in the engine folder."""

    graphs: tuple[PassGraph, ...]
    kv_dtype: str
    pass_cost_ms: dict[str, float]  # empty where nothing could be measured
    prefill_rows: int
    notes: tuple[str, ...] = ()  # what people should know of the engine


@dataclass(frozen=True, slots=True)
class CompiledDraft:
    """What a backend made of a draft bundle; times as in `DraftEngineManifest`."""

    graphs: tuple[PassGraph, ...]
    fuse_graph: str
    kv_dtype: str
    step_cost_ms: dict[str, float]
    extend_cost_ms: dict[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VisualPlan:
    """What a visual engine is built for."""

    min_image_tokens: int  # of an image
    max_image_tokens: int  # of a request
    max_image_tokens_per_image: int
    threads: int  # 0 takes all cores
    quantize: str = "none"  # of float weights: "none", "int8"
    compiler: CompilerOptions = CompilerOptions()


@dataclass(frozen=True, slots=True)
class CompiledVisual:
    """What a backend made of a visual bundle."""

    graph: str
    precision: str
    notes: tuple[str, ...] = ()


Report = Callable[[str], None]  # told what is being done


class Backend(Protocol):
    """The functions that a backend module has."""

    __name__: str

    def available(self) -> str:
        """The library's version; raises `EdgeLLMError` with the remedy when it cannot run."""
        ...

    def origin(self, compiler: CompilerOptions) -> Origin:
        """What graphs that are compiled so depend on; raises as `available`, and for flags."""
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
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Backend:
    """The backend `name`, or for "auto" the first that is available.

    Raises:
        EdgeLLMError: unknown, or (none) available on this machine.
    """
    if name == "auto":
        reasons = {candidate: _reason_against(find(candidate)) for candidate in names()}
        usable = [candidate for candidate, reason in reasons.items() if not reason]
        if not usable:
            details = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
            raise EdgeLLMError(f"no backend can run here ({details})")
        name = usable[0]
    if name not in names():
        raise EdgeLLMError(f"unknown backend {name!r}", hint=f"backends: {', '.join(names())}")
    return cast(Backend, importlib.import_module(f"{__name__}.{name}"))


def _reason_against(backend: Backend) -> str:
    try:
        backend.available()
    except EdgeLLMError as error:
        return str(error)
    return ""
