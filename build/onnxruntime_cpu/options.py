"""The CPU backend's `--kernels`, and its resolution on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.build.plan import FLAG, Options, Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.library import instruction_sets
from edgellm.device_runtime.runners.onnxruntime_cpu import EDGELLM, ONNXRUNTIME

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class CpuOptions(Options):
    """Kernels of the CPU backend."""

    kernels: str = field(default=AUTO, metadata={FLAG: "--kernels"})


def kernels_of(plan: Plan) -> str:
    """`EDGELLM` or `ONNXRUNTIME`; "auto" is edgellm's if supported and available.

    Raises:
        EdgeLLMError: edgellm's are requested but unavailable, or with an int8 copy for prompts.
    """
    wanted = plan.options.kernels if isinstance(plan.options, CpuOptions) else AUTO
    if wanted == ONNXRUNTIME or (wanted == AUTO and plan.prefill == "int8"):
        return ONNXRUNTIME
    if wanted == EDGELLM and plan.prefill == "int8":
        raise EdgeLLMError(
            "--prefill int8 needs ONNX Runtime's operators; edgellm's kernels have one copy of "
            "the weights",
            hint="leave out --prefill, or give --kernels onnxruntime",
        )
    if wanted == EDGELLM:
        instruction_sets()
        return EDGELLM
    return ONNXRUNTIME if _what_is_missing() else EDGELLM


def notes_of(plan: Plan) -> tuple[str, ...]:
    """Reason why "auto" does not use edgellm's kernels."""
    wanted = plan.options.kernels if isinstance(plan.options, CpuOptions) else AUTO
    if wanted != AUTO or plan.prefill == "int8" or not (missing := _what_is_missing()):
        return ()
    return (
        f"ONNX Runtime's operators compute, not edgellm's kernels, which are faster: {missing}",
    )


def _what_is_missing() -> str:
    """Why edgellm's kernels are unavailable, with a hint; "": they are available."""
    try:
        instruction_sets()
    except EdgeLLMError as error:
        return f"{error} ({error.hint})"
    return ""
