"""Rules of Whisper's tokens as masks of logits: suppressed tokens, and the grammar of timestamps.

A window's text is pairs of timestamps with text between them: <|0.00|> Hello.<|1.20|><|1.20|> ...
(arXiv 2212.04356, appendix D). A text may end with one timestamp or without any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.arrays import F32

_NEVER = np.float32(-np.inf)


class DecodingRules:
    """The rules of a window's text."""

    def __init__(self, spec: AudioSpec, end_id: int, *, timestamps: bool) -> None:
        """Rules of a model.

        Args:
            spec: its tokens.
            end_id: ends a text; smaller ids are text.
            timestamps: whether the text has them.
        """
        self._spec, self._end, self._timestamps = spec, end_id, timestamps
        self._suppressed = np.array(spec.suppressed, np.int64)
        self._suppressed_first = np.array(spec.suppressed_first, np.int64)

    def apply(self, logits: F32, text: Sequence[int]) -> None:
        """Set the logits of tokens that cannot be next to minus infinity.

        Args:
            logits: [V]; overwritten.
            text: tokens of the window so far, without the prompt.
        """
        if not text:
            logits[self._suppressed_first] = _NEVER
        logits[self._suppressed] = _NEVER
        if self._timestamps:
            self._require_timestamps(logits, text)

    def _require_timestamps(self, logits: F32, text: Sequence[int]) -> None:
        first = self._spec.first_timestamp_id
        logits[self._spec.no_timestamps_id] = _NEVER
        times = [token for token in text if token >= first]
        ends_in_time = bool(text) and text[-1] >= first
        opens = ends_in_time and (len(text) < 2 or text[-2] >= first)
        if opens:  # text follows
            logits[first:] = _NEVER
        elif ends_in_time:  # the same time opens the next segment, or the text ends
            logits[: self._end] = _NEVER
        if times:
            least = times[-1] if ends_in_time and not opens else times[-1] + 1
            logits[first:least] = _NEVER
        if not text:
            logits[:first] = _NEVER
            if self._spec.max_initial_timestamp is not None:
                logits[first + self._spec.max_initial_timestamp + 1 :] = _NEVER
        if log_sum_exp(logits[first:]) > logits[:first].max():
            logits[:first] = _NEVER


def log_sum_exp(logits: F32) -> np.float32:
    """Logarithm of the summed exponentials."""
    largest = logits.max()
    if largest == _NEVER:
        return _NEVER
    return largest + np.log(np.exp(logits - largest).sum())
