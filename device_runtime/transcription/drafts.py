"""Drafts of a window's text: tokens that the model verifies in one pass.

A draft is a function of the tokens before it, so the text is that of decoding token by token, with
any temperature (see `edgellm.device_runtime.speculate.acceptance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.speech import SpeechNetwork
from edgellm.device_runtime.speculate.drafters.ngram import NgramLookup
from edgellm.device_runtime.transcription.decoding_rules import DecodingRules, log_sum_exp

NGRAM = "ngram"
_MAX_TOKENS = 6  # of a draft
_LEAST_LOGPROB = np.log(0.4)  # of a token that a model drafts; verification costs more than it


class Draft(Protocol):
    """Predicts the tokens that follow a text.

    Attributes:
        num_mel_bins: of the features that its own encoder takes; 0: it has none.
    """

    num_mel_bins: int

    def listen(self, hidden: F32, features: F32) -> None:
        """A new window.

        Args:
            hidden: states of the model's encoder, [1, A, H].
            features: [num_mel_bins, F]; those of the model without an encoder.
        """
        ...

    def begin(self, prompt: Sequence[int], rules: DecodingRules) -> None:
        """A new text after a prompt."""
        ...

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens after the text so far, whose last token was just chosen."""
        ...


class NgramDraft:
    """What followed the last occurrence of the newest n-gram, in the text or its prompt."""

    num_mel_bins = 0

    def __init__(self) -> None:
        self._lookup, self._known = NgramLookup(maximum=_MAX_TOKENS), 0

    def listen(self, hidden: F32, features: F32) -> None:
        """See `Draft`; it hears nothing."""

    def begin(self, prompt: Sequence[int], rules: DecodingRules) -> None:
        """See `Draft`; what the rules exclude is not accepted."""
        del rules
        self._lookup, self._known = NgramLookup(maximum=_MAX_TOKENS), 0
        self._lookup.extend(prompt)

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """See `Draft`."""
        self._lookup.extend(text[self._known :])
        self._known = len(text)
        found = self._lookup.continuations()
        return [*found[0].token_ids[:limit]] if found else []


class ModelDraft:
    """A smaller speech model with the same tokens, which decodes greedily while it is sure."""

    def __init__(self, network: SpeechNetwork, end_id: int) -> None:
        """Args: `network`, without an encoder if it has the model's; its smallest end token."""
        self._network, self._end_id, self.num_mel_bins = network, end_id, network.num_mel_bins
        self._prompt: list[int] = []
        self._rules: DecodingRules | None = None

    def listen(self, hidden: F32, features: F32) -> None:
        """See `Draft`."""
        self._network.listen(self._network.encode(features) if self.num_mel_bins else hidden)

    def begin(self, prompt: Sequence[int], rules: DecodingRules) -> None:
        """See `Draft`."""
        self._prompt, self._rules = [*prompt], rules
        self._network.restart()

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """See `Draft`."""
        assert self._rules is not None
        found: list[int] = []
        # The newest token is never computed before it is chosen
        self._network.truncate(min(self._network.length, len(self._prompt) + len(text) - 1))
        while len(found) < min(limit, _MAX_TOKENS):
            whole = [*self._prompt, *text, *found]
            logits = self._network.next_logits(np.array(whole[self._network.length :]))
            self._rules.apply(logits, [*text, *found])
            token = int(logits.argmax())
            if token == self._end_id or logits[token] - log_sum_exp(logits) < _LEAST_LOGPROB:
                break
            found.append(token)
        return found
