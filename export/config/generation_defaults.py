"""Defaults of requests from a model's generation_config.json, with the names of edgellm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgellm.core.errors import UnsupportedModelError

# Transformers leaves out values that equal its defaults, so a missing key has this value.
_OF_TRANSFORMERS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
_FRACTION = (0.0, 1.0)
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": _FRACTION,
    "min_p": _FRACTION,
    "repetition_penalty": (0.01, 100.0),
}
_MAX_NEW_TOKENS = "max_new_tokens"


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values for requests that do not give an option; {} if the model recommends none.

    `do_sample: false` is greedy decoding, as in transformers. Without `do_sample`, a temperature,
    top-k, top-p or min-p is taken as meant, as in vLLM; transformers would decode greedily.

    Args:
        config: the content of generation_config.json.

    Raises:
        UnsupportedModelError: a value has another type, or is out of range.
    """
    given = {name: value for name, value in config.items() if value is not None}
    found: dict[str, Any] = {
        name: _number(name, given[name], *limits)
        for name, limits in _RANGES.items()
        if name in given
    }
    if "top_k" in given:
        found["top_k"] = max(_count("top_k", given["top_k"], -1), 0)  # -1, of vLLM, keeps all
    samples = given.get("do_sample", any(name in found for name in (*_OF_TRANSFORMERS, "min_p")))
    if type(samples) is not bool:
        raise _fault("do_sample", samples)
    if samples:
        found = {**_OF_TRANSFORMERS, **found}
    elif "do_sample" in given:
        found["temperature"] = 0.0
    if found.get("top_p") == 0:
        raise _fault("top_p", given["top_p"])
    if _MAX_NEW_TOKENS in given:
        found["max_generate_length"] = _count(_MAX_NEW_TOKENS, given[_MAX_NEW_TOKENS], 1)
    return found


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fault(name, value)
    if not (math.isfinite(value) and low <= value <= high):
        raise _fault(name, value)
    return float(value)


def _count(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _fault(name, value)
    return value


def _fault(name: str, value: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} {value!r:.80} is not a valid default of requests",
        hint="correct it in generation_config.json, or remove it there",
    )
