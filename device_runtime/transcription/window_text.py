"""Text of a window with its quality: whether it is tried again at a higher temperature.

The rules are those of transformers' `generate`.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.transcription.options import TranscriptionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowText:
    """Tokens of a window, and their quality."""

    token_ids: tuple[int, ...]  # without prompt and end
    end: tuple[int, ...]  # the end token; (): the text was cut at the capacity
    temperature: float
    # Natural logarithms of the probabilities of all tokens; NaN of those that were given
    logprobs: tuple[float, ...]
    no_speech_prob: float

    @property
    def avg_logprob(self) -> float:
        """Of the chosen tokens with the end."""
        chosen = [each for each in self.logprobs if not math.isnan(each)]
        return sum(chosen) / len(chosen)

    def is_silent(self, options: TranscriptionOptions) -> bool:
        """Whether the window has no speech, so that its text is dropped."""
        threshold = options.no_speech_threshold
        return (
            threshold is not None
            and self.no_speech_prob > threshold
            and (options.logprob_threshold is None or self._is_unsure(options.logprob_threshold))
        )

    def is_poor(self, options: TranscriptionOptions, vocab_size: int) -> bool:
        """Whether the text repeats itself, or its tokens are improbable."""
        most, least = options.compression_ratio_threshold, options.logprob_threshold
        if most is not None and self._token_ratio(vocab_size) > most:
            return True
        return least is not None and self._is_unsure(least)

    def _is_unsure(self, least: float) -> bool:
        return self.avg_logprob < least

    def _token_ratio(self, vocab_size: int) -> float:
        """Compression ratio of the token ids, each in as few bytes as all ids need."""
        size = int(math.log2(vocab_size) / 8) + 1
        ids = np.array([*self.token_ids, *self.end], "<i8")
        return compression_ratio(ids.view(np.uint8).reshape(-1, 8)[:, :size].tobytes())


def compression_ratio(content: bytes) -> float:
    """Number of bytes divided by that after zlib; repetitions have a large one."""
    return len(content) / len(zlib.compress(content))
