"""Prompt lookup: proposes the tokens after the last match of the newest n-gram (2304.04487)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.device_runtime.speculate.text_lookup import Continuation, Lookup

_CONFIDENCE = {2: 0.2, 3: 0.35, 4: 0.6}  # initial values by match length


def remember() -> Callable[[], Lookup]:
    """The factory of lookups for requests; requests share no memory."""
    return NgramLookup


class NgramLookup:
    """Index of the last occurrence of every n-gram of 2 to 4 tokens in this request."""

    def __init__(self, *, maximum: int = 8) -> None:
        """Args: `maximum`, the length of a proposal in tokens."""
        self.maximum = maximum
        self._sizes = sorted(_CONFIDENCE, reverse=True)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def end(self, token_ids: Sequence[int]) -> None:
        """Nothing to store."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        for token_id in token_ids:
            end = len(self._tokens)
            for size in self._sizes:
                if end >= size:  # indexed late, so that the newest n-gram does not match itself
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token_id)

    def continuations(self) -> list[Continuation]:
        """The tokens that followed the longest matching suffix."""
        for size in self._sizes:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if end is not None:
                followed = self._tokens[end : end + self.maximum]
                return [Continuation(followed, [_CONFIDENCE[size]] * len(followed))]
        return []
