"""Defaults for the target device: rounding of inputs, and the schemes of heads and drafts.

On a GPU, decoding is bound by the bytes that it loads: the whole head, and the whole draft at each
level of a tree. So both default to the scheme of the layers there. `python benchmarks/gpu.py model`
estimates the gain.
"""

from __future__ import annotations

import re

from edgellm.core.errors import EdgeLLMError

CPU, GPU = "cpu", "gpu"
FLOAT = "float"  # value of --lm_head_quantization: as in the checkpoint
# Schemes by the first compute capability whose tensor cores support them
_FORMS = ((100, "nvfp4"), (89, "fp8"), (0, "int4_awq"))
_AS_LAYERS = {name: name for name in ("fp8", "nvfp4")}
_HEADS = {**_AS_LAYERS, "int8_sq": "int8", "int4_awq": "int4", "nvfp4_awq": "nvfp4"}


def capability(target: str) -> int:
    """Return the compute capability as a number, 110 for "11.0"; 0 for "cpu" and "gpu".

    Raises:
        EdgeLLMError: `target` is none of these.
    """
    if target in (CPU, GPU):
        return 0
    if re.fullmatch(r"\d{1,2}\.\d", target) is None:
        raise EdgeLLMError(
            f"--target {target}: unknown",
            hint="give cpu, gpu, or a GPU's compute capability: 8.7 (Orin), 8.9, 11.0 (Thor), 12.0",
        )
    return int(target.replace(".", ""))


def rounds_as(target: str) -> str:
    """Return the device that quantizes inputs, "cpu" or "gpu"; raise as `capability`."""
    return GPU if capability(target) or target == GPU else CPU


def form_of_draft(target: str) -> str:
    """Return the default scheme of a draft; raise as `capability`."""
    sm = capability(target)
    return next(form for least, form in _FORMS if sm >= least) if sm else "fp8"


def form_of_head(target: str, body: str, *, is_modelopt: bool) -> str | None:
    """Return the default scheme of a head; None: float; raise as `capability`.

    Args:
        target: value of `--target`.
        body: scheme of the layers.
        is_modelopt: whether the layout supports quantized heads.
    """
    return _HEADS.get(body) if rounds_as(target) == GPU and is_modelopt else None
