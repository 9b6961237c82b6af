"""Decoding of a window: prompt in, text out, at one temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.speech import SpeechNetwork
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.transcription.decoding_rules import DecodingRules, log_sum_exp
from edgellm.device_runtime.transcription.drafts import Draft
from edgellm.device_runtime.transcription.window_text import WindowText
from edgellm.device_runtime.transcription.windows import Window
from edgellm.device_runtime.transcription.word_times import first_positions


class Prompt(NamedTuple):
    """Tokens before the text of a window."""

    previous: tuple[int, ...]  # of earlier text, its mark included; (): none
    start: tuple[int, ...]  # from the token of the start on

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return self.previous + self.start


class _Text:
    """A text that grows by a token at a time."""

    def __init__(
        self,
        *,
        rules: DecodingRules,
        sampler: Sampler,
        end_ids: tuple[int, ...],
        room: int,
        prefix: Sequence[int],
    ) -> None:
        """Args: `room`, the maximum number of tokens, those of the prefix included."""
        self.token_ids: list[int] = [*prefix]
        self.end: tuple[int, ...] = ()
        self.logprobs: list[float] = []  # of tokens after the prefix, and of the end
        self._rules, self._sampler, self._end_ids, self._most = rules, sampler, end_ids, room

    @property
    def room(self) -> int:
        """Tokens that may follow."""
        return self._most - len(self.token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether no token follows."""
        return bool(self.end) or self.room <= 0

    def take(self, logits: F32) -> int:
        """Choose the next token from its logits [V], which are overwritten."""
        self._rules.apply(logits, self.token_ids)
        token = self._sampler.choose(logits, int(logits.argmax()))
        self.logprobs.append(float(logits[token] - log_sum_exp(logits)))
        if token in self._end_ids:
            self.end = (token,)
        else:
            self.token_ids.append(token)
        return token


class WindowDecoder:
    """Decodes texts of the window that a network listened to."""

    def __init__(
        self,
        *,
        network: SpeechNetwork,
        spec: AudioSpec,
        end_ids: tuple[int, ...],
        capacity: int,
        draft: Draft | None = None,
    ) -> None:
        """Args: `capacity` of prompt and text together, in tokens."""
        self.network, self._spec, self._end_ids = network, spec, end_ids
        self._capacity, self._draft = capacity, draft

    @property
    def draft_bins(self) -> int:
        """Mel bins of the features that a draft's own encoder takes; 0: it has none."""
        return 0 if self._draft is None else self._draft.num_mel_bins

    def listen(self, window: Window) -> None:
        """Encode a window."""
        hidden = self.network.encode(window.features)
        self.network.listen(hidden)
        if self._draft is not None:
            self._draft.listen(hidden, window.draft_features)

    def most_probable(self, token_ids: Sequence[int]) -> int:
        """Position of the token that is the most probable first one of a text."""
        with self.network.decoding():
            logits = self.network.next_logits(np.array([self._spec.start_id]))
        found = int(logits[[*token_ids]].argmax())
        self.network.restart()
        return found

    def decode(
        self,
        prompt: Prompt,
        *,
        timestamps: bool,
        temperature: float,
        seed: int,
        aligns: bool,
        before_pass: Callable[[], object],
        prefix: Sequence[int] = (),
    ) -> WindowText:
        """The text after a prompt.

        Args:
            prompt: of the window.
            timestamps: whether the text has them.
            temperature: 0 is greedy.
            seed: of the samples at other temperatures.
            aligns: whether `align` may follow.
            before_pass: called before each forward pass; may raise.
            prefix: tokens with which the text begins.
        """
        rules = DecodingRules(self._spec, min(self._end_ids), timestamps=timestamps)
        params = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=seed)
        given = prompt.token_ids
        self.network.restart(records_queries=aligns)
        if self._draft is not None:
            self._draft.begin(given, rules)
        text = _Text(
            rules=rules,
            sampler=Sampler(params=params),
            end_ids=self._end_ids,
            room=self._capacity - len(given),
            prefix=prefix,
        )
        with self.network.decoding():
            before_pass()
            no_speech = self._begin(text, prompt)
            while not text.is_complete:
                before_pass()
                self._extend(text, len(given))
        return WindowText(
            token_ids=tuple(text.token_ids),
            end=text.end,
            temperature=temperature,
            logprobs=(*[math.nan] * len(prefix), *text.logprobs),
            no_speech_prob=no_speech,
        )

    def _begin(self, text: _Text, prompt: Prompt) -> float:
        """Choose the first token after prompt and prefix; returns the probability of no speech."""
        begun = [*prompt.token_ids, *text.token_ids]
        starts = [len(prompt.previous), len(begun) - 1]
        start, logits = self.network.logits(np.array(begun), np.array(starts))
        no_speech = float(np.exp(start[self._spec.no_speech_id] - log_sum_exp(start)))
        text.take(logits)
        return no_speech

    def _extend(self, text: _Text, num_given: int) -> None:
        """Choose further tokens: the accepted ones of a draft, and the one after them."""
        newest, drafted = text.token_ids[-1], self._drafted(text)
        rows = self.network.logits(np.array([newest, *drafted]), np.arange(len(drafted) + 1))
        for row, guess in zip(rows, [*drafted, None], strict=True):
            if text.take(row) != guess or text.is_complete:
                break
        # The newest token is computed in the next pass
        self.network.truncate(num_given + len(text.token_ids) - (not text.end))

    def _drafted(self, text: _Text) -> list[int]:
        """Tokens to verify; each needs a place, and the token after it one, too."""
        limit = text.room - 1
        if self._draft is None or limit < 1:
            return []
        return self._draft.propose(text.token_ids, limit)

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
