"""Stop detection: finds end tokens and stop strings in the output tokens of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edgellm.device_runtime.text.tokenizer import StopMatcher, TextStream


class StopResult(NamedTuple):
    """Tokens up to a stop."""

    token_ids: list[int]
    pieces: list[str]  # the text that each of them completed
    ended: bool = False  # by an end token
    stop: str | None = None  # the string that ended it


class StopDetector:
    """Detects end tokens, which have no text, and stop strings."""

    def __init__(
        self,
        *,
        stream: TextStream,
        stops: StopMatcher,
        ends: frozenset[int],
        min_tokens: int,
        stop_tokens: Mapping[int, str] | None = None,
    ) -> None:
        """No stop string ends within the text of the first `min_tokens` tokens.

        Args:
            stream: decodes the tokens.
            stops: finds stop strings.
            ends: end tokens.
            min_tokens: minimum number of tokens.
            stop_tokens: end tokens that are stop strings.
        """
        self.stream, self._stops, self._ends = stream, stops, ends
        self._stop_tokens = stop_tokens or {}
        self._early = min_tokens

    def take(self, token_ids: Sequence[int]) -> StopResult:
        """Add tokens; return them up to a stop."""
        taken: list[int] = []
        pieces: list[str] = []
        for token_id in token_ids:
            taken.append(token_id)
            if token_id in self._ends:
                stop = self._stop_tokens.get(token_id)
                return StopResult(taken, [*pieces, ""], ended=True, stop=stop)
            text, stop = self.stream.push(token_id), None
            self._early -= 1
            if self._early < 0:
                text, stop = self._stops.push(text)
            pieces.append(text)
            if stop is not None:
                return StopResult(taken, pieces, stop=stop)
        return StopResult(taken, pieces)

    def rest(self) -> str:
        """The text that was held back, if no stop string ended the output."""
        shown, stop = self._stops.push(self.stream.finish())
        return shown if stop is not None else shown + self._stops.finish()
