"""The flags that only ONNX Runtime on CUDA has."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.build.plan import FLAG, GpuOptions, Plan
from edgellm.core.errors import EdgeLLMError

AUTO, FUSED, PLAIN = "auto", "fused", "plain"  # of --attention
ON, OFF = "on", "off"  # of --intGemm, beside "auto"


@dataclass(frozen=True, slots=True)
class CudaOptions(GpuOptions):
    """What computes where ONNX Runtime has several kernels."""

    # GroupQueryAttention or products; "auto" takes the first where there is a kernel
    attention: str = field(default=AUTO, metadata={FLAG: "--attention"})
    # Tensor cores on int4 and int8 weights that are not decoded; "auto": where trees gain by it
    int_gemm: str = field(default=AUTO, metadata={FLAG: "--intGemm"})

    def __post_init__(self) -> None:
        """Raises `EdgeLLMError` for other words."""
        for flag, word, allowed in (
            ("--attention", self.attention, (AUTO, FUSED, PLAIN)),
            ("--intGemm", self.int_gemm, (AUTO, ON, OFF)),
        ):
            if word not in allowed:
                raise EdgeLLMError(f"{flag} {word}: give {', '.join(allowed)}")


def options_of(plan: Plan) -> CudaOptions:
    """The plan's, or the usual ones."""
    return plan.options if isinstance(plan.options, CudaOptions) else CudaOptions()
