"""Checks combinations of flags of `edgellm-quantize` before slow imports."""

from __future__ import annotations

from typing import Any

from edgellm.core.cli import numbers
from edgellm.core.errors import EdgeLLMError
from edgellm.quantize.formats.schemes import (
    HEAD_SCHEMES,
    KV_SCHEMES,
    ROTATIONS,
    check_block_size,
    check_format,
    choose,
    choose_scheme,
)
from edgellm.quantize.job import Job

KEEP_BUDGET = 10.0  # default, percent


def float_layer_options(layers: str, budget: float | None) -> dict[str, Any]:
    """Return the options of float layers; raise `EdgeLLMError` for an invalid list."""
    if layers == "auto":
        return {"keep_budget": KEEP_BUDGET if budget is None else budget}
    if budget is not None:
        raise EdgeLLMError("--keep_budget is for --keep_layers auto", hint="leave it out")
    return {"keep_layers": numbers("--keep_layers", layers)}


def check_names(job: Job) -> None:
    """Raise `EdgeLLMError` for unknown names, or unsupported combinations."""
    scheme = choose_scheme("int4_awq" if job.chooses_precision else job.quantization, job.algo)
    head, cache = job.lm_head_quantization, job.kv_cache_quantization
    if head is not None:
        choose("--lm_head_quantization", head, HEAD_SCHEMES)
    if cache is not None:
        choose("--kv_cache_quantization", cache, KV_SCHEMES)
    if job.rotate is not None:
        choose("--rotate", job.rotate, ROTATIONS)
    check_format(job.format, scheme, head, cache)
    check_block_size(job.block_size, scheme, HEAD_SCHEMES[head] if head is not None else None)


def check_together(job: Job, minutes: float | None, points: float | None) -> None:
    """Raise `EdgeLLMError` for options whose main option is missing."""
    if minutes is not None and job.algo != "auto":
        raise EdgeLLMError(
            "--time_budget is for --algo auto, which tries several algorithms", hint="leave it out"
        )
    if points is not None and not job.chooses_precision:
        raise EdgeLLMError("--max_loss is for --quantization auto", hint="leave it out")
    if job.base_model_dir is not None and job.algo == "auto":
        raise EdgeLLMError(
            "--algo auto does not support drafts", hint="choose --quantization auto, or --algo gptq"
        )
    if job.chooses_precision and (job.algo is not None or job.block_size is not None):
        raise EdgeLLMError(
            "--quantization auto chooses --algo and --block_size itself", hint="leave them out"
        )
    if job.keep_budget is not None and job.algo == "auto":
        raise EdgeLLMError(
            "--keep_layers auto needs one --algo, and auto tries several",
            hint="find the best --algo first, then its layers",
        )
