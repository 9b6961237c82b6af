"""Rejects NaN and infinite weights while they stream into a bundle.

The bits of a float ascend with its magnitude, and a set sign bit makes them larger. So two maxima
of a piece, as signed and unsigned integers, give the extreme values of both signs without a copy:
about a twentieth of the cost of hashing the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)

_BITS = {"F32": (np.uint32, np.int32), "F16": (np.uint16, np.int16), "BF16": (np.uint16, np.int16)}
_INFINITY = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
# The smallest values that float16 rounds to infinity: 65520, and the next bfloat16 above 65504.
_BEYOND_HALF = {"F32": 0x477FF000, "F16": 0x7C00, "BF16": 0x4780}


def checked(
    name: str, stored: str, pieces: Iterable[memoryview], *, half: bool
) -> Iterator[memoryview]:
    """The pieces of a tensor, each checked before it is passed on.

    Args:
        name: of the tensor, for messages.
        stored: "F32", "F16" or "BF16".
        pieces: of its data, with whole values.
        half: the graph computes in float16.

    Raises (while the tensor is written):
        BrokenArtifactError: a value is infinite or not a number.
        UnsupportedModelError: a value that float16 cannot hold, where `half`.
    """
    unsigned, signed = _BITS[stored]
    infinity = _INFINITY[stored]
    sign = 1 << (np.iinfo(unsigned).bits - 1)
    limit = _BEYOND_HALF[stored] if half else infinity
    for piece in pieces:
        bits = np.frombuffer(piece, unsigned)
        if bits.size:
            positive = int(bits.view(signed).max())  # below 0: none
            negative = int(bits.max()) - sign
            if (largest := max(positive, negative)) >= limit:
                _refuse(name, is_number=largest < infinity)
        yield piece


def _refuse(name: str, *, is_number: bool) -> None:
    if is_number:
        raise UnsupportedModelError(
            f"tensor {name} holds values beyond the range of fp16, which ends at 65504",
            hint="export with --dtype fp32",
        )
    raise BrokenArtifactError(
        f"tensor {name} holds values that are not numbers",
        hint="the checkpoint is damaged or its training diverged; fetch it again",
    )
