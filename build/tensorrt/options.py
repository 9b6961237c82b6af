"""Flags of the TensorRT backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgellm.build.plan import FLAG, GpuOptions, Plan

AUTO, EDGELLM, TENSORRT = "auto", "edgellm", "tensorrt"  # of --kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtOptions(GpuOptions):
    """Options of TensorRT's compiler."""

    # Compute capability, "89" for 8.9; "": that of this machine's GPU
    target_sm: str = field(default="", metadata={FLAG: "--gpu"})
    # Scratch memory on the GPU; 0: no limit
    workspace_mib: int = field(default=0, metadata={FLAG: "--workspace"})
    # 0 to 5; None: the library's default
    opt_level: int | None = field(default=None, metadata={FLAG: "--optLevel"})
    # Read if it exists, written at the end
    timing_cache: Path | None = field(default=None, metadata={FLAG: "--timingCache"})
    # Kernels of attention: "auto" uses edgellm's if library, GPU and network support them
    kernels: str = field(default=AUTO, metadata={FLAG: "--kernels"})
    # "int4" or "fp16": replaces weight types that GPU or library do not support; "": rejected
    fallback_precision: str = field(default="", metadata={FLAG: "--fallbackPrecision"})
    # Write all kernels to a file of the engine; TensorRT loads the engine for this
    layer_report: bool = field(default=False, metadata={FLAG: "--layerReport"})
    # Compile a plan without weights; the lowered graph and its weights stay next to it
    strip_weights: bool = field(default=False, metadata={FLAG: "--stripWeights"})


def options_of(plan: Plan) -> TensorRtOptions:
    """The plan's options, or the defaults."""
    return plan.options if isinstance(plan.options, TensorRtOptions) else TensorRtOptions()
