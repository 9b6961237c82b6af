"""TensorRT and TensorRT-RTX engines; modules that import onnx_ir are loaded lazily."""

from __future__ import annotations

from pathlib import Path

from edgellm.build import plan as plans
from edgellm.build.plan import Compiled, Estimate, Origin, Plan
from edgellm.build.tensorrt.options import TENSORRT, options_of
from edgellm.build.tensorrt.options import TensorRtOptions as Options
from edgellm.build.tensorrt.target import find_target
from edgellm.core.commands.progress import Report
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import Bundle
from edgellm.device_runtime.runners.tensorrt.library.refit import lacking_names
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

__all__ = [
    "DEVICE",
    "LABEL",
    "TAKES_AUDIO",
    "TAKES_MIXED_LAYERS",
    "TAKES_STATES",
    "Options",
    "compile",
    "estimate",
    "mixes_rows",
    "origin",
    "takes_adapters",
    "takes_batches",
]
LABEL = "TensorRT"
DEVICE = "cuda"
TAKES_STATES = True  # if edgellm's kernels compute them
TAKES_MIXED_LAYERS = False
TAKES_AUDIO = False


def origin(options: plans.Options) -> Origin:
    """The library and the GPU that it compiles for; see `Backend.origin`.

    Raises:
        EdgeLLMError: no library, no such GPU, or an option that the library does not have.
    """
    own = options if isinstance(options, Options) else Options()
    target = find_target(own.target_sm)
    if own.timing_cache is not None and target.library.is_ahead_of_time:
        raise EdgeLLMError(
            f"{target.library.label} has no timing cache",
            hint="leave out --timingCache; kernels are chosen when an engine is loaded",
        )
    if own.strip_weights:
        _require_strip(target.library)
    return target.origin


def _require_strip(library: Library) -> None:
    if library.is_ahead_of_time:
        fault = "does not compile plans without weights where there is no GPU (1.7.1 fails)"
    elif missing := lacking_names(library.trt):
        fault = f"has no {missing[0]}, which plans without weights need"
    else:
        return
    raise EdgeLLMError(
        f"--stripWeights: {library.label} {fault}",
        hint="leave out --stripWeights: the plan then holds the weights",
    )


def takes_batches(plan: Plan) -> bool:
    """See `Backend.takes_batches`; `cache_plan.py` reports unavailable kernels."""
    return options_of(plan).kernels != TENSORRT


def takes_adapters(plan: Plan) -> bool:
    """See `Backend.takes_adapters`."""
    del plan
    return True


def mixes_rows(plan: Plan) -> bool:
    """See `Backend.mixes_rows`."""
    del plan
    return False


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `Backend.estimate`."""
    from edgellm.build.tensorrt import compiler

    return compiler.estimate(source, bundle, plan)


def compile(source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report) -> Compiled:
    """See `Backend.compile`."""
    from edgellm.build.tensorrt import compiler

    return compiler.compile_bundle(source, bundle, plan, folder, report)
