"""Prompt lookup: what followed the last time the text ended like this (arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.device_runtime.speculate.text_lookup import Continuation, Lookup

_CONFIDENCE = {2: 0.2, 3: 0.35, 4: 0.6}  # before anything was learned, by match length


def remember() -> Callable[[], Lookup]:
    """What starts the lookup of a request: nothing is known of those before."""
    return NgramLookup


class NgramLookup:
    """Remembers where every run of two to four tokens last occurred in this request."""

    def __init__(self, *, maximum: int = 8) -> None:
        """`maximum`: tokens of a proposal."""
        self.maximum = maximum
        self._sizes = sorted(_CONFIDENCE, reverse=True)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def end(self, token_ids: Sequence[int]) -> None:
        """Nothing is remembered."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        for token_id in token_ids:
            end = len(self._tokens)
            for size in self._sizes:
                if end >= size:  # indexed only now: a run must not find itself
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token_id)

    def continuations(self) -> list[Continuation]:
        """The tokens that followed the longest known ending."""
        for size in self._sizes:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if end is not None:
                followed = self._tokens[end : end + self.maximum]
                return [Continuation(followed, [_CONFIDENCE[size]] * len(followed))]
        return []
