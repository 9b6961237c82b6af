"""Logit biases and penalties for tokens of the text so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyRules:
    """The request's values; the defaults change nothing."""

    logit_bias: Mapping[int, float]  # by token id
    repetition: float = 1.0  # divides logits above 0, multiplies others; of prompt and output
    presence: float = 0.0  # subtracted for tokens of the output
    frequency: float = 0.0  # subtracted for every occurrence in the output

    @classmethod
    def of(cls, params: SamplingParams) -> PenaltyRules:
        """The rules of a request."""
        return cls(
            logit_bias=params.logit_bias,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )

    @property
    def do_nothing(self) -> bool:
        """Whether logits stay unchanged."""
        return not self.logit_bias and (self.repetition, self.presence, self.frequency) == (1, 0, 0)


class Penalties:
    """Rules with the text so far; in the order of transformers and vLLM."""

    def __init__(self, rules: PenaltyRules, prompt: Sequence[int]) -> None:
        """`prompt`: token ids; those of image tokens, beyond the vocabulary, are ignored."""
        self._rules = rules
        self._prompt = set(prompt)
        self._output: Counter[int] = Counter()

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the output."""
        self._output.update(token_ids)

    def apply(self, logits: F32, path: Sequence[int] = ()) -> F32:
        """A copy of logits [V], with penalties for the text and `path`."""
        rules, logits = self._rules, logits.copy()
        output = self._output + Counter(path) if path else self._output
        if rules.logit_bias:
            biased = np.fromiter(rules.logit_bias, np.int64)
            logits[biased] += np.fromiter(rules.logit_bias.values(), np.float32)
        if rules.repetition != 1:
            seen = np.fromiter(self._prompt | output.keys(), np.int64)
            seen = seen[seen < len(logits)]
            found = logits[seen]
            logits[seen] = np.where(found > 0, found / rules.repetition, found * rules.repetition)
        if output and (rules.presence or rules.frequency):
            counts = np.fromiter(output.values(), np.float32)
            logits[np.fromiter(output, np.int64)] -= rules.presence + rules.frequency * counts
        return logits
