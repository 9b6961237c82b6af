"""What a round asks of whatever foresees tokens, and what all drafters of trees share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgellm.device_runtime.session import F32, I64, ImageRows
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.gate import NetworkGate
from edgellm.device_runtime.speculate.lookup import LookupSource
from edgellm.device_runtime.speculate.policy import Policy, TreeLimits
from edgellm.device_runtime.speculate.tree import Pool, Tree


class Drafter(Protocol):
    """Proposes a tree for every round of one answer after another.

    Acceptance is exact for every tree that is a function of the text before it, so that nothing
    that a drafter does can change an answer.
    """

    def begin(self, token_ids: Sequence[int]) -> None:
        """Forget the answer before, but for rows of the prompt's beginning, which its cache holds.

        Args:
            token_ids: the tokens of these rows, and the next.
        """
        ...

    def set_images(self, images: ImageRows) -> None:
        """The images of the answer that begins; only of bases that take images."""
        ...

    def remember(self, token_ids: list[int]) -> None:
        """Committed text: the prompt, then what every round gave."""
        ...

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed rows of the base: features [M, T*H] and the token after each, int64 [M]."""
        ...

    def catch_up(self) -> None:
        """Compute what the committed text asks for, before a tree is proposed."""
        ...

    def propose(self, root: int, room: int, levels: int) -> Tree:
        """A tree of at most `room` drafted nodes and `levels` levels under `root`.

        `root` is the newest committed token. A tree of the root alone is plain decoding.
        """
        ...

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """What became of the tree: the accepted `path` from the root down, and its tokens."""
        ...

    def confidences(self, tree: Tree) -> list[float]:
        """How sure the drafter was of every node, given its parent."""
        ...


class TreeDrafter:
    """Chooses trees from a pool of candidates; alone it pools what the text foresees.

    A subclass has a network, which grows the pool before the lookups are merged into it.
    """

    def __init__(
        self,
        policy: Policy,
        limits: TreeLimits,
        *,
        lookups: Sequence[LookupSource] = (),
        gate: NetworkGate | None = None,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Wire up.

        Args:
            policy: sizes the tree.
            limits: the user's bounds.
            lookups: what they foresee is merged into the tree.
            gate: closes rounds to the network, in which the lookups alone draft.
            image_ids: of a base that takes images.
        """
        self._policy, self._limits = policy, limits
        self._lookups, self._gate, self._image_ids = lookups, gate, image_ids
        self._pool: Pool | None = None
        self._spent_ms = 0.0  # what this round's passes of a network cost
        self._is_networked = False  # whether the network drafted in this round
        self._opened_at: float | None = None  # seconds; when the gate was asked about this round

    def begin(self, token_ids: Sequence[int]) -> None:
        """Forget the answer before."""
        del token_ids  # text is remembered whole
        for source in self._lookups:
            source.lookup.begin()
        self._spent_ms = 0.0

    def set_images(self, images: ImageRows) -> None:
        """Text alone does not see them."""

    def remember(self, token_ids: list[int]) -> None:
        """Committed text for the lookups."""
        if self._image_ids is not None:  # nobody says an image
            token_ids = [token for token in token_ids if token < self._image_ids.first]
        for source in self._lookups:
            source.lookup.extend(token_ids)

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Text alone has no use for features."""

    def catch_up(self) -> None:
        """Let the network read what was committed, unless it pauses."""
        if not self._policy.is_worthwhile():
            return
        if self._gate is not None:
            self._opened_at = time.perf_counter()
        foreseen = max((source.expected() for source in self._lookups), default=0.0)
        if self._gate is None or self._gate.opens(foreseen):
            self._read()

    def _read(self) -> None:
        """Bring a network's cache up to the committed text."""

    def propose(self, root: int, room: int, levels: int) -> Tree:
        """See `Drafter.propose`."""
        deepest = min(levels, self._limits.text_steps)
        levels = min(levels, self._limits.steps)
        room = min(room, self._limits.verify_size - 1)
        self._is_networked = self._is_ready()
        if room < 1 or levels < 1 or not (self._is_networked or self._gate is not None):
            self._pool = None
            return Tree.of_root(root)
        most = sum(source.lookup.most for source in self._lookups)
        pool = self._pool = Pool(root, self._limits.pool_size + most)
        if self._is_networked:
            self._grow(pool, levels)
        self._ends = [pool.count]
        for source in self._lookups:
            source.merge(pool, deepest)
            self._ends.append(pool.count)
        tree, self._chosen = pool.tree(self._policy.select(pool, room))
        return tree

    def _is_ready(self) -> bool:
        """Whether this round drafts."""
        return self._policy.is_worthwhile()

    def _grow(self, pool: Pool, levels: int) -> None:
        """Fill the pool with a network's candidates."""

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Tell policy and lookups what became of their candidates."""
        if self._pool is not None and len(tree) > 1:
            on_path = np.zeros(len(tree), np.int64)
            on_path[path] = 1
            judged = np.flatnonzero(on_path[tree.parents[1:]]) + 1
            nodes = self._chosen[judged]
            origin = np.searchsorted(self._ends, nodes, side="right")
            learners = (self._policy, *(source.calibration for source in self._lookups))
            for index, learner in enumerate(learners):
                own = origin == index
                if own.any():
                    learner.learn(self._pool.confidences[nodes[own]], on_path[judged[own]])
        self._policy.end_round(emitted, self._spent_ms, len(tree))
        if self._gate is not None and self._opened_at is not None:
            ms = (time.perf_counter() - self._opened_at) * 1e3
            self._gate.learn(networked=self._is_networked, tokens=emitted, ms=ms)
            self._opened_at = None
        self._spent_ms = 0.0

    def confidences(self, tree: Tree) -> list[float]:
        """See `Drafter.confidences`."""
        if self._pool is None:
            return [1.0] * len(tree)
        return self._pool.confidences[self._chosen].tolist()
