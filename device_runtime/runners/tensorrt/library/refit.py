"""Weights of a plan that was compiled without them, from the lowered graph next to it.

`OnnxParserRefitter` gives an engine initializers by name. It imports no nodes, so plugins need not
be registered for it, only for the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.core.errors import BrokenArtifactError, LimitError
from edgellm.core.resources import available_memory_bytes
from edgellm.device_runtime.runners.tensorrt.library.log import LibraryLog

LOWERED_SUFFIX = ".lowered.onnx"  # of the graph that a plan was compiled from, next to it
WEIGHTS_SUFFIX = ".lowered.data"  # of its weights
NEEDED = ("Refitter", "OnnxParserRefitter")
FLAGS = ("STRIP_PLAN", "REFIT_IDENTICAL")
_SHOWN = 300  # characters of a message
_HINT = "copy the whole folder again, or build the engine again without --stripWeights"


def lacking_names(trt: Any) -> list[str]:
    """Names that plans without weights need and a library's bindings lack."""
    missing = [name for name in NEEDED if not hasattr(trt, name)]
    return missing + [f"BuilderFlag.{name}" for name in FLAGS if not hasattr(trt.BuilderFlag, name)]


def refit(trt: Any, engine: Any, plan: Path, log: LibraryLog) -> None:
    """Give an engine its weights, in the GPU's context and before it has execution contexts.

    Args:
        trt: the module that loaded it.
        engine: loaded from `plan`, which has no weights.
        plan: next to its graph and weights.
        log: the engine's.

    Raises:
        BrokenArtifactError: a file is missing, or the library does not take its weights.
        LimitError: memory does not hold the refitter's copy of the weights.
    """
    graph, weights = plan.with_suffix(LOWERED_SUFFIX), plan.with_suffix(WEIGHTS_SUFFIX)
    for path in (graph, weights):
        if not path.is_file():
            raise BrokenArtifactError(f"{path} is missing: {plan.name} has no weights", hint=_HINT)
    needed, available = weights.stat().st_size, available_memory_bytes()
    if needed > available:
        raise LimitError(
            f"{plan} is given its weights while it is loaded: this needs {needed / 1e9:.2f} GB of "
            f"memory, {available / 1e9:.2f} GB are available",
            hint="close other programs, or build the engine again without --stripWeights",
        )
    said = len(log.errors)
    refitter = trt.Refitter(engine, log.logger)
    parser = trt.OnnxParserRefitter(refitter, log.logger)  # weights in memory live with it
    taken = parser.refit_from_file(str(graph))
    missing = refitter.get_missing_weights()
    done = bool(taken) and not missing and refitter.refit_cuda_engine()
    words = _reason(parser, missing, log.errors[said:])
    del parser, refitter  # in this order
    if not done:
        raise BrokenArtifactError(
            f"TensorRT {trt.__version__} does not take the weights of {plan}: {words}", hint=_HINT
        )


def _reason(parser: Any, missing: list[str], errors: list[str]) -> str:
    """Why a refit failed: missing weights, or what the library said."""
    if missing:
        named = ", ".join(name or "one without a name" for name in missing[:3])
        return f"{len(missing)} are missing ({named}{', ...' if len(missing) > 3 else ''})"[:_SHOWN]
    words = parser.get_error(0).desc() if parser.num_errors else "".join(errors[:1])
    return " ".join(words.split())[:_SHOWN] or "it does not say why"
