"""A drafter with a chosen acceptance length, at the cost of a real draft.

It runs in the ordinary loop. The inner drafter processes every committed token and proposes its
tree, which is replaced by one of equal size with the next tokens of a recorded output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
)
from edgellm.device_runtime.speculate.drafter import Drafter, Verified
from edgellm.device_runtime.speculate.open_drafter import Drafters
from edgellm.device_runtime.speculate.shared_passes import Passes
from edgellm.device_runtime.speculate.tree import Tree


class OracleDrafter:
    """See `edgellm.device_runtime.speculate.drafter.Drafter`."""

    def __init__(
        self,
        within: Drafter,
        text: Sequence[int],
        acceptance_length: float,
        max_levels: int,
        vocab_size: int,
    ) -> None:
        """Wrap a drafter.

        Args:
            within: the real drafter; its trees must be of fixed size, since its proposals are
                never accepted.
            text: prompt and greedy output.
            acceptance_length: mean tokens of a round, the bonus token included. Some rounds err
                one token earlier, so that the mean is exact.
            max_levels: maximum number of predicted tokens.
            vocab_size: larger than a tree.
        """
        self._within, self._text = within, list(text)
        self._predicted = acceptance_length - 1
        self._max_levels, self._vocab_size = max_levels, vocab_size

    def begin(self, token_ids: Sequence[int]) -> None:
        self._within.begin(token_ids)
        self._length, self._due = 0, 1e-9  # so that rounding errors cost no token

    def use_kv(self, kv: Any) -> None:
        self._within.use_kv(kv)

    def set_images(self, images: ImageRows) -> None:
        self._within.set_images(images)

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        self._within.set_adapter(adapter)

    def remember(self, token_ids: list[int]) -> None:
        self._within.remember(token_ids)
        self._length += len(token_ids)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        self._within.observe(next_token_ids, taps)

    def catch_up(self) -> Passes[None]:
        return self._within.catch_up()

    def plan_round(self, *_: Any, is_exact: bool) -> None:
        """A device would verify its own tree: an oracle's rounds need the host."""
        del is_exact

    def take_round(self, *_: Any) -> Verified:
        raise NotImplementedError

    def propose(self, root: int, room: int, levels: int) -> Passes[Tree]:
        self._own = tree = yield from self._within.propose(root, room, levels)
        following = self._text[self._length :]
        self._due += self._predicted
        count = min(int(self._due), levels, self._max_levels, len(tree) - 1, len(following))
        self._due -= count
        wrong_from = following[0] + 1 if following else 0
        wrong = (wrong_from + np.arange(len(tree) - 1 - count)) % self._vocab_size
        return _tree(root, wrong, np.array(following[:count], np.int64))

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        del tree, path
        self._within.learn(self._own, [0], emitted)

    def confidences(self, tree: Tree) -> list[float]:
        del tree
        return self._within.confidences(self._own)

    @property
    def is_paused(self) -> bool:
        """Return False: trees of fixed size are never paused."""
        return False

    def observe_plain(self, token_id: int, taps: F32) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        self._within.drop()

    def end(self) -> None:
        self._within.end()


def _tree(root: int, wrong: I64, right: I64) -> Tree:
    """Return wrong children of the root, then the right path, so that compaction is needed."""
    first = 1 + len(wrong)
    above = np.arange(first - 1, first - 1 + len(right))
    above[:1] = 0
    parents = np.concatenate([[-1], np.zeros(len(wrong), np.int64), above])
    return Tree(np.concatenate([[root], wrong, right]), parents, np.ones(len(parents)))


class _Oracles:
    """`Drafters` whose drafters are oracles."""

    def __init__(
        self, within: Drafters, text: Sequence[int], acceptance_length: float, vocab_size: int
    ) -> None:
        self._within, self.options, self.caches = within, within.options, within.caches
        self._rest = text, acceptance_length, within.options.steps, vocab_size

    def start(self, *, greedy: bool) -> OracleDrafter:
        return OracleDrafter(self._within.start(greedy=greedy), *self._rest)


@contextmanager
def predicting(llm: LLM, text: Sequence[int], acceptance_length: float) -> Iterator[None]:
    """Replace the drafter of `llm` by an oracle; its options set steps and fixed trees.

    Args:
        llm: with a draft.
        text: prompt and greedy output of the next request.
        acceptance_length: see `OracleDrafter`.
    """
    before = llm._drafters
    vocab_size = llm.manifest.decoder.vocab_size
    llm._drafters = _Oracles(before, text, acceptance_length, vocab_size)
    try:
        yield
    finally:
        llm._drafters = before
