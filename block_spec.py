"""What a manifest says of a draft that foresees whole blocks. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The block of which a pass foresees all tokens: the newest token, then mask tokens."""

    size: int  # rows
    mask_token_id: int
    from_newest: bool  # row i foresees the token behind it; if not, its own, and row 0 none
    is_causal: bool  # rows see those before them; if not, all of the block
    links: int  # likeliest candidates of a row with scores by the candidate before; 0: none
    window: int | None = None  # tokens of the text that the draft was trained to see; None: all

    @property
    def levels(self) -> int:
        """Of a tree that is made of it."""
        return self.size if self.from_newest else self.size - 1
