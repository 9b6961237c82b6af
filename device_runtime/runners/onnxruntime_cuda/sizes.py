"""How many rows a pass has, and how many it is given so that few recorded passes serve all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgellm import contract

STEP = 64  # slots of which a pass looks at the next multiple, where nothing is recorded
_LEAST_WIDTH = 256  # recorded passes look at this many slots, or twice, four times ... as many
_LARGEST_BUCKET = 128


def bucket_sizes(most: int) -> list[int]:
    """Rows that passes of up to `most` rows are padded to."""
    return [size for size in (1, 2, 4, 8, 16, 32, 64, _LARGEST_BUCKET) if size < 2 * most]


def _bucket_of(size: int) -> int:
    return next((bucket for bucket in bucket_sizes(size) if bucket >= size), size)


def sizes_of(inputs: Mapping[str, NDArray[Any]]) -> Sizes:
    """Those that a pass asks for."""
    return Sizes(inputs[contract.INPUT_IDS].shape[1], len(inputs[contract.LOGITS_INDEX]))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a pass."""

    rows: int
    outputs: int  # rows that get logits or candidates
    recurs: bool = False  # as one of few sizes

    def padded(self, inputs: Mapping[str, NDArray[Any]], capacity: int) -> Sizes:
        """Those of a recorded pass, or these where none would recur or fit.

        Prompts do not recur: they have more rows than outputs, but for a draft's.
        """
        is_likely = self.rows == self.outputs or contract.DRAFT_HIDDEN in inputs
        rows = _bucket_of(self.rows)
        end = int(inputs[contract.WRITE_INDEX][0]) + rows
        if not is_likely or rows > _LARGEST_BUCKET or end > capacity:
            return self
        return Sizes(rows, _bucket_of(self.outputs), recurs=True)

    def width(self, end: int, capacity: int) -> int:
        """Slots that a pass looks at whose rows end before slot `end`."""
        if self.recurs:
            return next(width for width in self.widths(capacity) if width >= end)
        return min(-(-end // STEP) * STEP, capacity)

    def widths(self, capacity: int) -> Iterator[int]:
        """Those of recorded passes, ascending."""
        width = _LEAST_WIDTH
        while width < capacity:
            yield width
            width *= 2
        yield capacity
