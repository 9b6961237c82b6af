"""Decoding of a window: prompt in, text out, at one temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.networks.speech import SpeechNetwork
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.transcription.decoding_rules import DecodingRules, log_sum_exp
from edgellm.device_runtime.transcription.window_text import WindowText
from edgellm.device_runtime.transcription.word_times import first_positions


class Prompt(NamedTuple):
    """Tokens before the text of a window."""

    previous: tuple[int, ...]  # of earlier text, its mark included; (): none
    start: tuple[int, ...]  # from the token of the start on

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return self.previous + self.start


class WindowDecoder:
    """Decodes texts of the window that a network listened to."""

    def __init__(
        self, *, network: SpeechNetwork, spec: AudioSpec, end_ids: tuple[int, ...], capacity: int
    ) -> None:
        """Args: `capacity` of prompt and text together, in tokens."""
        self.network, self._spec, self._end_ids = network, spec, end_ids
        self._capacity = capacity

    def decode(
        self,
        prompt: Prompt,
        *,
        timestamps: bool,
        temperature: float,
        seed: int,
        aligns: bool,
        before_pass: Callable[[], object],
    ) -> WindowText:
        """The text after a prompt.

        Args:
            prompt: of the window.
            timestamps: whether the text has them.
            temperature: 0 is greedy.
            seed: of the samples at other temperatures.
            aligns: whether `align` may follow.
            before_pass: called before each forward pass; may raise.
        """
        rules = DecodingRules(self._spec, min(self._end_ids), timestamps=timestamps)
        params = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=seed)
        sampler, given = Sampler(params=params), prompt.token_ids
        self.network.restart(records_queries=aligns)
        before_pass()
        starts = [len(prompt.previous), len(given) - 1]
        start, logits = self.network.logits(np.array(given), np.array(starts))
        no_speech = float(np.exp(start[self._spec.no_speech_id] - log_sum_exp(start)))
        text, total = list[int](), 0.0
        while True:
            rules.apply(logits, text)
            token = sampler.choose(logits, int(logits.argmax()))
            total += float(logits[token] - log_sum_exp(logits))
            is_end = token in self._end_ids
            if not is_end:
                text.append(token)
            if is_end or len(given) + len(text) >= self._capacity:
                return WindowText(
                    token_ids=tuple(text),
                    end=(token,) if is_end else (),
                    temperature=temperature,
                    avg_logprob=total / (len(text) + is_end),
                    no_speech_prob=no_speech,
                )
            before_pass()
            (logits,) = self.network.logits(np.array([token]), np.array([0]))

    def align(self, prompt: Prompt, text: WindowText, num_positions: int) -> list[int]:
        """The position of audio at which each token of the latest text begins.

        Args:
            prompt: of the window.
            text: that was decoded last.
            num_positions: of audio in the window, 20 ms each.
        """
        count = len(text.token_ids) - (not text.end)  # without end, no token follows the last one
        if count < 1:
            return [0] * len(text.token_ids)
        begin = len(prompt.token_ids)
        attention = self.network.attention_to_audio(slice(begin, begin + count), num_positions)
        found = first_positions(attention, self._spec.median_filter_width).tolist()
        return found if text.end else [*found, found[-1]]
