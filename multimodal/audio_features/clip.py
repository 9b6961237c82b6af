"""A clip of audio as inputs of an encoder's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A clip's features and number of tokens, which are the first rows of the graph's output."""

    inputs: Mapping[str, NDArray[Any]]  # by contract name
    num_tokens: int
