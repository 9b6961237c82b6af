"""Bad words: texts that an output does not contain, by their tokens, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.device_runtime.arrays import F32


class BadWords:
    """Forbids the last token of a word after its first tokens."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Start an output.

        Args:
            words: token ids of each word.
        """
        self._words = [[*word] for word in words if word]
        self._longest = max((len(word) for word in self._words), default=1) - 1
        self._last: list[int] = []  # tokens of the output, as many as matter

    def take(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the output."""
        self._last = self._tail(token_ids)

    def apply(self, logits: F32, path: Sequence[int] = ()) -> F32:
        """A copy of logits [V], with -inf for tokens that end a word after the output and `path`.

        They stay as they are if nothing else is left.
        """
        before = self._tail(path)
        ends = [
            last
            for *head, last in self._words
            if last < len(logits) and (not head or before[-len(head) :] == head)
        ]
        if not ends:
            return logits
        allowed = logits.copy()
        allowed[ends] = -np.inf
        return allowed if allowed.max() > -np.inf else logits

    def _tail(self, token_ids: Sequence[int]) -> list[int]:
        found = [*self._last, *token_ids]
        return found[len(found) - self._longest :] if self._longest < len(found) else found
