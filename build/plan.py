"""Plan of a build, its estimate, and its result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.core.graph_roles import ROLES, Rows
from edgellm.core.manifest import GraphSpec
from edgellm.core.model_spec import PageSpec

RUNTIME_BYTES = 150 << 20  # interpreter, ONNX Runtime's libraries, activations of a pass
FLAG = "flag"  # metadata of the fields of `Options`: their flags


@dataclass(frozen=True, slots=True)
class Options:
    """Base class of a backend's own flags."""

    def given(self) -> dict[str, str | int]:
        """The flags that were given, with their values."""
        values = {
            one.metadata[FLAG]: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if getattr(self, one.name) != one.default
        }
        return {
            flag: str(value) if isinstance(value, Path) else value for flag, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class GpuOptions(Options):
    """Flags that all engines for GPUs share."""

    # Maximum loaded LoRA adapters; with `Plan.max_lora_rank`
    max_loras: int = field(default=4, metadata={FLAG: "--maxLoras"}, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Limits and options of an engine; a limit is 0 if the product does not have it."""

    max_input_len: int = 0
    kv_capacity: int = 0
    threads: int = 0  # 0 takes all cores
    prefill: str = "auto"  # "same" or "int8": precision of quantized engines for prompts and trees
    quantize: str = "auto"  # of float weights: "none", "int8", "int4"; "auto": integers for drafts
    kv_cache: str = "auto"  # see `--kvCache`; "auto": by the bundle and the processor
    is_eagle_base: bool = False  # the bundle must output hidden taps for a draft
    max_verify_tree_size: int = 0  # nodes of a token tree; 0: plain decoding
    max_draft_tree_size: int = 0  # nodes drafted in a round; of draft engines
    min_image_tokens: int = 0  # of an image
    max_image_tokens: int = 0  # of a request
    max_image_tokens_per_image: int = 0
    max_audio_s: int = 0  # of an audio clip
    options: Options = field(default_factory=Options)  # of the backend
    checks: bool = True  # compare lowered graphs with the bundle's
    max_batch_size: int = 1  # sequences of a pass
    max_lora_rank: int = 0  # of adapters at run time; 0: the engine takes none


def max_rows(role: str, plan: Plan) -> int:
    """Maximum rows of a pass of a role; 0 if its passes have no rows."""
    return {
        Rows.TEXT: max(plan.max_input_len, plan.max_verify_tree_size),
        Rows.DRAFTED: plan.max_input_len,
        Rows.ONE: 1,
        Rows.ITEM: 0,
        Rows.AUDIO: 0,
    }[ROLES[role].rows]


def image_plan(
    min_image_tokens: int,
    max_image_tokens: int,
    max_image_tokens_per_image: int,
    threads: int,
    quantize: str = "none",
    options: Options | None = None,
    *,
    checks: bool = True,
) -> Plan:
    """A visual engine's plan."""
    return Plan(
        threads=threads, quantize=quantize, min_image_tokens=min_image_tokens,
        max_image_tokens=max_image_tokens, max_image_tokens_per_image=max_image_tokens_per_image,
        options=options or Options(), checks=checks,
    )  # fmt: skip


def audio_plan(
    max_audio_s: int,
    threads: int,
    quantize: str = "none",
    options: Options | None = None,
    *,
    checks: bool = True,
) -> Plan:
    """An audio engine's plan."""
    return Plan(
        threads=threads,
        quantize=quantize,
        max_audio_s=max_audio_s,
        options=options or Options(),
        checks=checks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted sizes before a build, in bytes."""

    engine_bytes: int
    kv_bytes: int
    peak_build_bytes: int
    decode_bytes: int  # read from memory for one token, without the KV cache
    runs_on_cpu: bool = True  # weights are read from this machine's memory
    scratch_bytes: int = 0  # of the largest pass, if not part of the libraries
    device_bytes: int = 0  # memory of the GPU that runs it; 0: on a CPU, or no GPU here
    notes: tuple[str, ...] = ()  # layers that cost more than the bundle's precision implies
    adapter_bytes: int = 0  # LoRA slots on the GPU
    build_remedy: str = ""  # of too little memory, besides quantizing the model


@dataclass(frozen=True, slots=True)
class Origin:
    """Dependencies of compiled graphs; an engine of another origin is rejected."""

    version: str  # of the library, with its name if a backend has several
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Result of a backend in the engine folder; see `manifest.Engine`."""

    graphs: dict[str, tuple[GraphSpec, ...]]  # by role
    kv_dtype: str = ""  # "" without a cache
    cost_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    prefill_rows: int = 0
    notes: tuple[str, ...] = ()  # notes on the engine for users
    options: dict[str, Any] = field(default_factory=dict)  # further options for the runner
    checks: tuple[str, ...] = ()  # results of the comparison with the bundle's graphs
    check_s: float = 0.0  # duration of the comparison
    pages: PageSpec | None = None  # of the cache
