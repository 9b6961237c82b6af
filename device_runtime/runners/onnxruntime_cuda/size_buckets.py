"""How many rows a pass has, and how many it is given so that few recorded passes serve all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STEP = 64  # slots of which a pass looks at the next multiple, where nothing is recorded
_LEAST_WIDTH = 256  # recorded passes look at this many slots, or twice, four times ... as many
_LARGEST_BUCKET = 128


def bucket_sizes(maximum: int) -> list[int]:
    """Rows that passes of up to `maximum` rows are padded to."""
    return [size for size in (1, 2, 4, 8, 16, 32, 64, _LARGEST_BUCKET) if size < 2 * maximum]


def bucket_of(size: int) -> int:
    """Rows that a pass of so many is padded to; beyond the largest it is not."""
    return next((bucket for bucket in bucket_sizes(size) if bucket >= size), size)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a pass."""

    rows: int
    outputs: int  # rows that get logits or candidates
    recurs: bool = False  # as one of few sizes

    def padded(self, batch: int, end: int, capacity: int, *, drafts: bool) -> Sizes:
        """Those of a recorded pass, or these where none would recur or fit.

        Prompts do not recur: they have more rows than outputs, but for a draft's.

        Args:
            batch: sequences, or slots for them.
            end: rows before, of the longest.
            capacity: rows of a slot.
            drafts: the network is a draft.
        """
        is_likely = self.rows == self.outputs or batch > 1 or drafts
        rows = bucket_of(self.rows)
        if not is_likely or rows > _LARGEST_BUCKET or end + rows > capacity:
            return self
        outputs = batch if batch > 1 and rows == 1 else bucket_of(self.outputs)
        return Sizes(rows, min(outputs, batch * rows), recurs=True)

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
