"""Codes of 2 to 6 bits in planes of bytes, as bundles store those that ONNX has no type for.

A plane has some bits of each code, the lowest in the first plane. A byte has the bits of 8, 4 or 2
neighbours, the first lowest. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.core.onnx_functions import BLOCK_ROWS, OFFSET_ROWS

# Values of the sixteen codes of IQ4.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A format of codes in planes.

    Attributes:
        bits: of a code.
        is_signed: a code minus half of the range is meant, as INT8; else the code, as UINT8.
        by_table: an entry of `IQ4` is meant, as INT8.
    """

    bits: int
    is_signed: bool = False
    by_table: bool = False

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of a code in each plane."""
        return _PLANES[self.bits]

    @property
    def function(self) -> str:
        """The model-local function of the planes that returns codes [..., in]."""
        kind = "Iq" if self.by_table else "Signed" if self.is_signed else ""
        return f"{kind}Codes{self.bits}"

    def rows(self, *, has_minima: bool) -> str:
        """The function of a lookup: row numbers, planes, scales and minima."""
        return f"{OFFSET_ROWS if has_minima else BLOCK_ROWS}Of{self.function}"

    @property
    def has_4_bits(self) -> bool:
        """Whether INT4 or UINT4 have all values."""
        return self.bits <= 4 and not self.by_table

    @property
    def has_signs(self) -> bool:
        """Whether the values are INT8, not UINT8."""
        return self.is_signed or self.by_table


_ALL = [
    PackedCodes(4, by_table=True),
    *(PackedCodes(bits, is_signed) for bits in _PLANES for is_signed in (False, True)),
]
FUNCTIONS_OF_CODES = {each.function: each for each in _ALL}
# The format of the table, None: of whole bytes.
FUNCTIONS_OF_ROWS: dict[str, PackedCodes | None] = {
    BLOCK_ROWS: None,
    OFFSET_ROWS: None,
    **{each.rows(has_minima=minima): each for each in _ALL for minima in (False, True)},
}
