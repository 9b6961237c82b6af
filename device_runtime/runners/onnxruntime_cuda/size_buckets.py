"""Sizes of passes, and the buckets to which they are padded for recorded CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STEP = 64  # without recordings, the attention width is a multiple of this
_MIN_WIDTH = 256  # attention width of recorded passes: this, or 2, 4, 8 ... times
_LARGEST_BUCKET = 128


def bucket_sizes(maximum: int) -> list[int]:
    """Padded sizes of passes of up to `maximum` tokens."""
    return [size for size in (1, 2, 4, 8, 16, 32, 64, _LARGEST_BUCKET) if size < 2 * maximum]


def bucket_of(size: int) -> int:
    """The padded size of a pass; passes above the largest bucket are not padded."""
    return next((bucket for bucket in bucket_sizes(size) if bucket >= size), size)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a pass."""

    rows: int
    outputs: int  # tokens with logits or candidates
    recurs: bool = False  # padded to a bucket

    def padded(self, batch: int, end: int, capacity: int, *, drafts: bool) -> Sizes:
        """Sizes padded to a bucket; unchanged if the pass does not recur or the bucket is too big.

        Prompts do not recur: they have more tokens than outputs, except with a draft.

        Args:
            batch: number of slots.
            end: maximum length before the pass.
            capacity: positions of a slot.
            drafts: whether the network is a draft.
        """
        is_likely = self.rows == self.outputs or batch > 1 or drafts
        rows = bucket_of(self.rows)
        if not is_likely or rows > _LARGEST_BUCKET or end + rows > capacity:
            return self
        outputs = batch if batch > 1 and rows == 1 else bucket_of(self.outputs)
        return Sizes(rows, min(outputs, batch * rows), recurs=True)

    def width(self, end: int, capacity: int) -> int:
        """Attention width of a pass whose tokens end before slot `end`."""
        if self.recurs:
            return next(width for width in self.widths(capacity) if width >= end)
        return min(-(-end // STEP) * STEP, capacity)

    def widths(self, capacity: int) -> Iterator[int]:
        """Attention widths of recorded passes, ascending."""
        width = _MIN_WIDTH
        while width < capacity:
            yield width
            width *= 2
        yield capacity
