"""What is built, and what a build predicts and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgellm.contract import PassGraph


@dataclass(frozen=True, slots=True)
class CompilerOptions:
    """What graphs are compiled for, by compilers of GPU code."""

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
