"""What a request asks of the logits because of the tokens before: biases and penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.arrays import F32


@dataclass(frozen=True, slots=True)
class PenaltyRules:
    """The request's numbers; these leave the logits as they are."""

    logit_bias: Mapping[int, float]  # by token id
    repetition: float = 1.0  # divides logits above 0, multiplies others; of prompt and answer
    presence: float = 0.0  # subtracted for tokens of the answer
    frequency: float = 0.0  # subtracted for every time that the answer has the token

    @property
    def do_nothing(self) -> bool:
        """Whether logits stay as they are."""
        return not self.logit_bias and (self.repetition, self.presence, self.frequency) == (1, 0, 0)


class Penalties:
    """Rules with the text that they look at; in transformers' and vLLM's order."""

    def __init__(self, rules: PenaltyRules, prompt: Sequence[int]) -> None:
        """`prompt`: token ids; those of image rows, beyond the vocabulary, count for nothing."""
        self._rules = rules
        self._prompt = set(prompt)
        self._said: Counter[int] = Counter()

    def add(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these."""
        self._said.update(token_ids)

    def apply(self, logits: F32, path: Sequence[int] = ()) -> F32:
        """Logits [V] as the rules want them behind the text and `path`; a copy."""
        rules, logits = self._rules, logits.copy()
        said = self._said + Counter(path) if path else self._said
        if rules.logit_bias:
            biased = np.fromiter(rules.logit_bias, np.int64)
            logits[biased] += np.fromiter(rules.logit_bias.values(), np.float32)
        if rules.repetition != 1:
            seen = np.fromiter(self._prompt | said.keys(), np.int64)
            seen = seen[seen < len(logits)]
            found = logits[seen]
            logits[seen] = np.where(found > 0, found / rules.repetition, found * rules.repetition)
        if said and (rules.presence or rules.frequency):
            counts = np.fromiter(said.values(), np.float32)
            logits[np.fromiter(said, np.int64)] -= rules.presence + rules.frequency * counts
        return logits
