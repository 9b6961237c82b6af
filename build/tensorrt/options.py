"""The flags that only compilers of GPU code have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgellm.build.plan import FLAG, GpuOptions, Plan

AUTO, EDGELLM, TENSORRT = "auto", "edgellm", "tensorrt"  # of --kernels


@dataclass(frozen=True, slots=True)
class TensorRtOptions(GpuOptions):
    """How TensorRT compiles."""

    # Compute capability, "89" for 8.9; "": that of this machine's GPU
    target_sm: str = field(default="", metadata={FLAG: "--gpu"})
    # Scratch memory on the GPU; 0: no limit
    workspace_mib: int = field(default=0, metadata={FLAG: "--workspace"})
    # 0 to 5; None: the library's
    opt_level: int | None = field(default=None, metadata={FLAG: "--optLevel"})
    # Read where it exists, written at the end
    timing_cache: Path | None = field(default=None, metadata={FLAG: "--timingCache"})
    # What computes attention: "auto" takes edgellm's where library, GPU and network allow
    kernels: str = field(default=AUTO, metadata={FLAG: "--kernels"})
    # "int4" or "fp16": what weights become that GPU or library have no arithmetic for; "": refused
    fallback_precision: str = field(default="", metadata={FLAG: "--fallbackPrecision"})
    # Write every kernel to a file of the engine; TensorRT loads the engine to tell them
    layer_report: bool = field(default=False, metadata={FLAG: "--layerReport"})


def options_of(plan: Plan) -> TensorRtOptions:
    """The plan's, or the usual ones."""
    return plan.options if isinstance(plan.options, TensorRtOptions) else TensorRtOptions()
