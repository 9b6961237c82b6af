"""TensorRT and TensorRT-RTX engines."""

from __future__ import annotations

from edgellm.build.plan import CompilerOptions, Origin
from edgellm.build.tensorrt.compiler import (
    compile_base as compile,
)
from edgellm.build.tensorrt.compiler import (
    compile_draft,
    compile_visual,
    estimate,
    estimate_visual,
)
from edgellm.build.tensorrt.target import find_target
from edgellm.contract import EdgeLLMError

__all__ = ["compile", "compile_draft", "compile_visual", "estimate", "estimate_visual", "origin"]
LABEL = "TensorRT"
DEVICE = "cuda"


def origin(compiler: CompilerOptions) -> Origin:
    """The library and the GPU that it compiles for; see `Backend.origin`.

    Raises:
        EdgeLLMError: no library, no such GPU, or an option that the library does not have.
    """
    target = find_target(compiler.target_sm)
    if compiler.timing_cache is not None and target.library.is_ahead_of_time:
        raise EdgeLLMError(
            f"{target.library.label} has no timing cache",
            hint="leave --timingCache away; kernels are chosen when an engine is loaded",
        )
    return target.origin
