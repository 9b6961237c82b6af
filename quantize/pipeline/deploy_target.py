"""What the machine that will run a model asks of it: how inputs are rounded, and in what a head is.

On a GPU a token waits for the bytes that it reads: all of the head, and all of a draft in every
level of a tree. So both take the form of the layers there, unless they are told otherwise.
`benchmarks/gpu_model.py` says what that is worth.
"""

from __future__ import annotations

import re

from edgellm.core.errors import EdgeLLMError

CPU, GPU = "cpu", "gpu"
FLOAT = "float"  # of --lm_head_quantization: as the checkpoint has it
# Forms by the first compute capability whose tensor cores compute in them
_FORMS = ((100, "nvfp4"), (89, "fp8"), (0, "int4_awq"))
_AS_LAYERS = {name: name for name in ("fp8", "nvfp4")}
_HEADS = {**_AS_LAYERS, "int8_sq": "int8", "int4_awq": "int4", "nvfp4_awq": "nvfp4"}


def capability(target: str) -> int:
    """As 110 for "11.0"; 0 for "cpu" and "gpu".

    Raises:
        EdgeLLMError: it is none of these.
    """
    if target in (CPU, GPU):
        return 0
    if re.fullmatch(r"\d{1,2}\.\d", target) is None:
        raise EdgeLLMError(
            f"--target {target}: no such choice",
            hint="give cpu, gpu, or a GPU's compute capability: 8.7 (Orin), 8.9, 11.0 (Thor), 12.0",
        )
    return int(target.replace(".", ""))


def rounds_as(target: str) -> str:
    """Who rounds inputs, "cpu" or "gpu"; raises as `capability`."""
    return GPU if capability(target) or target == GPU else CPU


def form_of_draft(target: str) -> str:
    """What a draft becomes by default; raises as `capability`."""
    sm = capability(target)
    return next(form for least, form in _FORMS if sm >= least) if sm else "fp8"


def form_of_head(target: str, body: str, *, is_modelopt: bool) -> str | None:
    """What a head becomes by default, None: it stays floats; raises as `capability`.

    Args:
        target: of `--target`.
        body: what the layers become.
        is_modelopt: the format holds heads that are rounded.
    """
    return _HEADS.get(body) if rounds_as(target) == GPU and is_modelopt else None
