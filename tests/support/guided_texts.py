"""Texts that llguidance allows by a guide, with a token for each byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgellm.device_runtime.sampling.guidance import Guidance, Guide

END = 256


class Guided:
    """Guides over bytes; token 256 ends an output, and further special tokens follow it."""

    def __init__(self, folder: Path, special: Sequence[str] = ()) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: index for index, letter in enumerate([*letters, "</s>"])}
        self._tokenizer = Tokenizer(models.BPE(vocabulary, []))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["</s>", *special])
        self._tokenizer.save(str(folder / "tokenizer.json"))
        self.ids = {one: END + 1 + at for at, one in enumerate(special)}
        self.guidance = Guidance(folder, END + 1 + len(special), [END])

    def takes(self, guide: Guide, text: str) -> bool:
        """Whether a text may be the whole output."""
        constraint = self.guidance.start(guide)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return all(self._may(constraint, token) for token in [*ids, END])

    @staticmethod
    def _may(constraint, token: int) -> bool:
        is_allowed = bool(constraint._allowed(())[token])
        if is_allowed:
            constraint.take([token])
        return is_allowed

    def answer(self, guide: Guide, seed: int, longest: int = 400) -> str | None:
        """A random output that ends as soon as it may; None: it has no end before `longest`."""
        constraint, draw, ids = self.guidance.start(guide), random.Random(seed), []
        while len(ids) < longest:
            allowed = constraint._allowed(()).nonzero()[0].tolist()
            if END in allowed:
                return self._tokenizer.decode(ids)
            ids.append(draw.choice(allowed))
            constraint.take(ids[-1:])
        return None
