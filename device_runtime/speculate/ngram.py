"""Prompt lookup: what followed the last time the text ended like this (arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence


class NgramLookup:
    """Remembers where every run of `longest` or fewer tokens last occurred."""

    def __init__(self, *, shortest: int = 2, longest: int = 4, most: int = 8) -> None:
        """`most`: tokens of a proposal."""
        self._sizes = range(longest, shortest - 1, -1)
        self._most = most
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        for token_id in token_ids:
            end = len(self._tokens)
            for size in self._sizes:
                if end >= size:  # indexed only now: a run must not find itself
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token_id)

    def propose(self) -> tuple[list[int], int]:
        """The tokens that followed the longest known ending, and that ending's length."""
        for size in self._sizes:
            if len(self._tokens) < size:
                continue
            end = self._ends.get(tuple(self._tokens[-size:]))
            if end is not None:
                return self._tokens[end : end + self._most], size
        return [], 0
