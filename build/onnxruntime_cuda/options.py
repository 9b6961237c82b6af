"""The flags that only ONNX Runtime on CUDA has."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.build.plan import FLAG, GpuOptions, Plan
from edgellm.core.errors import EdgeLLMError

AUTO, FUSED, PLAIN = "auto", "fused", "plain"  # of --attention
ON, OFF = "on", "off"  # of --intGemm, beside "auto"


@dataclass(frozen=True, slots=True)
class CudaOptions(GpuOptions):
    """Choices among several CUDA kernels."""

    # GroupQueryAttention or products; "auto": the first, if there is a kernel
    attention: str = field(default=AUTO, metadata={FLAG: "--attention"})
    # Integer tensor-core GEMMs for int4 and int8 weights; "auto": if trees are faster with them
    int_gemm: str = field(default=AUTO, metadata={FLAG: "--intGemm"})

    def __post_init__(self) -> None:
        """Raise `EdgeLLMError` for other words."""
        for flag, word, allowed in (
            ("--attention", self.attention, (AUTO, FUSED, PLAIN)),
            ("--intGemm", self.int_gemm, (AUTO, ON, OFF)),
        ):
            if word not in allowed:
                raise EdgeLLMError(f"{flag} {word}: give {', '.join(allowed)}")


def options_of(plan: Plan) -> CudaOptions:
    """The plan's options, or the defaults."""
    return plan.options if isinstance(plan.options, CudaOptions) else CudaOptions()
