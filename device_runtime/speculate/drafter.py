"""What a round asks of whatever foresees tokens, and what all drafters of trees share.

A drafter is the state of one request. What drafting learned over requests is apart (`SpecState`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult
from edgellm.device_runtime.networks.sequence_kv import Context
from edgellm.device_runtime.runners.device_speculation import RoundOutcome
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.acceptance import Accepted
from edgellm.device_runtime.speculate.device_rounds import DeviceRounds, RoundPart
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.policy.costs import ALONE, BatchLoad, price
from edgellm.device_runtime.speculate.policy.device_tree_size import Sizes
from edgellm.device_runtime.speculate.policy.spec_budget import TextLookupShare
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.tree_policy import Policy, TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Passes
from edgellm.device_runtime.speculate.text_lookup import LearnedLookup, TextDrafts
from edgellm.device_runtime.speculate.tree import F64, CandidatePool, Tree

RETRIAL_ROWS = 64  # that a network reads at most when it is tried again, of all answers together
LEAST_RETRIAL_ROWS = 16  # of each


@dataclass(frozen=True, slots=True)
class Verified:
    """A tree, and the base's pass over it."""

    tree: Tree
    result: PassResult
    accepted: Accepted | None = None  # by the device; None: the host's work


class Drafter(Protocol):
    """Proposes a tree for every round of an answer.

    Acceptance is exact for every tree that is a function of the text before it, so that nothing
    that a drafter does can change an answer.
    """

    batch_load: BatchLoad  # who shares the passes of the answer; set before each

    def begin(self, token_ids: Sequence[int]) -> None:
        """The prompt is about to be read, behind rows that the draft's cache may hold.

        Args:
            token_ids: the tokens of these rows, and the next.
        """
        ...

    def set_images(self, images: ImageRows) -> None:
        """The images of the answer that begins; only of bases that take images."""
        ...

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        """The base's adapter in the answer that begins."""
        ...

    def remember(self, token_ids: list[int]) -> None:
        """Committed text: the prompt, then what every round gave."""
        ...

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed rows of the base: features [M, T*H] and the token after each, int64 [M]."""
        ...

    def catch_up(self) -> Passes[None]:
        """Ask for what the committed text needs computed, before a tree is proposed."""
        ...

    def plan_round(
        self,
        session: DecoderNetwork,
        newest: tuple[int, Context, int],
        levels: int,
        sampler: Sampler,
        *,
        is_exact: bool,
    ) -> tuple[DeviceRounds, RoundPart] | None:
        """What to ask the device for, if it can run the whole round; `take_round` follows.

        Args:
            session: the base.
            newest: the newest committed token, its context and rows of the base's cache before it.
            levels: of the tree at most.
            sampler: of the request.
            is_exact: acceptance is.

        Returns:
            Who runs it, and the answer's part; None: `propose` is to be called.
        """
        ...

    def take_round(self, found: RoundOutcome, result: PassResult) -> Verified:
        """What the device gave for what was planned."""
        ...

    def propose(self, root: int, room: int, levels: int) -> Passes[Tree]:
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

    @property
    def rests(self) -> bool:
        """Whether the coming round drafts nothing: no tree is asked for, `pass_by` is called."""
        ...

    def pass_by(self, token_id: int, taps: F32) -> None:
        """While it rests: a token of plain decoding, and the features of the row before it."""
        ...

    def drop(self) -> None:
        """Nobody goes on with rows that are its alone."""
        ...

    def end(self) -> None:
        """The request is over; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class SpecState:
    """What drafting learned, over all requests of a kind: greedy ones, or sampled ones."""

    policy: Policy  # sizes trees, with the acceptance rates of a network
    controller: SpecGate
    lookups: tuple[LearnedLookup, ...] = ()
    sizes: Sizes | None = None  # of trees that a device grows alone


class TreeDrafter:
    """Chooses trees from a pool of candidates.

    A subclass has a network, which grows the pool before the lookups are merged into it.
    """

    def __init__(
        self, learned: SpecState, limits: TreeLimits, *, image_ids: ImageIds | None = None
    ) -> None:
        """Nothing is computed yet.

        Args:
            learned: from requests before, and for those to come.
            limits: the user's bounds.
            image_ids: of a base that takes images.
        """
        self._policy, self._controller, self.batch_load = learned.policy, learned.controller, ALONE
        self._learned_lookups, self._limits, self._image_ids = learned.lookups, limits, image_ids
        self._foresight = TextDrafts()  # by the text
        self._pool: CandidatePool | None = None
        self._spent_ms = self._read_ms = 0.0  # this round's; see `SpecGate.end_round`
        self._opened: bool | None = None  # whether this round asks the network; None: undecided
        self._is_networked = False  # whether the network drafted in this round
        self._passed: list[tuple[int, F32]] = []  # while it rested: tokens, features before each

    def begin(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.begin`; text is remembered whole."""
        del token_ids
        self._controller.look_away()
        self._foresight = TextDrafts(self._learned_lookups)

    def drop(self) -> None:
        """Text alone has no rows."""

    def end(self) -> None:
        """What was said may be looked up by later requests."""
        self._wake()
        self._foresight.end()

    def set_images(self, images: ImageRows) -> None:
        """Text alone does not see them."""

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        """Nor what was computed with one."""

    def remember(self, token_ids: list[int]) -> None:
        """Committed text, for lookups and for a network."""
        self._read_on(token_ids)
        if self._image_ids is not None:  # nobody says an image
            token_ids = [token for token in token_ids if token < self._image_ids.first]
        self._foresight.add(token_ids)
        if len(token_ids) > self._limits.round_rows and self._looks_up:
            self._foresight.tell()  # of a prompt: that tells nothing of what rounds take

    def _read_on(self, token_ids: Sequence[int]) -> None:
        """Committed text, for a network that reads it."""

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Text alone has no use for features."""

    def catch_up(self) -> Passes[None]:
        """Let the network read what was committed, unless it rests."""
        self._wake()
        self._controller.turn_to(self.batch_load)
        opened, self._opened = self._opened, None
        if self._opens() if opened is None else opened:
            yield from self._read() or ()

    def _book_reading(self, rows: int, prices: F64) -> None:
        """The network read `rows` rows, at `prices` of passes."""
        if rows <= self._limits.round_rows:
            self._spent_ms += price(prices, rows)
            return
        # A prompt, or what a pause left, tells nothing of what rounds take.
        self._read_ms += price(prices, min(rows, RETRIAL_ROWS))
        self._controller.look_away()

    @property
    def _asks_network(self) -> bool:
        """Whether there is one that does not rest."""
        return not self._controller.pace.network.pause

    def _opens(self) -> bool:
        return self._asks_network and self._controller.opens(self._expected)

    @property
    def _looks_up(self) -> bool:
        return bool(self._foresight.sources) and not self._controller.pace.text.pause

    def _expected(self) -> float:
        """Tokens that the text foresees."""
        if not self._looks_up:
            return 0.0
        return max(map(sum, self._foresight.chances()), default=0.0)

    def _foresees_enough(self) -> bool:
        return self._looks_up and any(map(self._policy.pays, self._foresight.chances()))

    def _read(self) -> Passes[None] | None:
        """Bring a network's cache up to the committed text; None: without passes in company."""

    def plan_round(
        self,
        session: DecoderNetwork,
        newest: tuple[int, Context, int],
        levels: int,
        sampler: Sampler,
        *,
        is_exact: bool,
    ) -> tuple[DeviceRounds, RoundPart] | None:
        """See `Drafter.plan_round`; most need the host."""
        del session, newest, levels, sampler, is_exact

    def take_round(self, found: RoundOutcome, result: PassResult) -> Verified:
        """See `Drafter.take_round`; nobody plans rounds here."""
        raise NotImplementedError

    def propose(self, root: int, room: int, levels: int) -> Passes[Tree]:
        """See `Drafter.propose`."""
        self._wake()
        self._controller.turn_to(self.batch_load)
        deepest = min(levels, self._limits.text_steps)
        levels = min(levels, self._limits.steps)
        room = min(room, self._limits.verify_size - 1)
        self._is_networked = self._is_ready()
        if room < 1 or levels < 1 or not (self._is_networked or self._foresees_enough()):
            self._pool = None
            return Tree.of_root(root)
        looks_up = self._looks_up
        maximum = self._limits.pool_size + self._foresight.maximum * looks_up
        pool = self._pool = CandidatePool(root, maximum)
        if self._is_networked:
            yield from self._grow(pool, levels) or ()
            self._controller.turn_to(self.batch_load)  # others may have gone on meanwhile
        self._ends = [pool.count]
        if looks_up:
            self._ends += self._foresight.merge(pool, deepest)
        tree, self._chosen = pool.tree(self._policy.select(pool, room))
        return tree

    def _is_ready(self) -> bool:
        """Whether the network drafts in this round."""
        return self._asks_network

    def _grow(self, pool: CandidatePool, levels: int) -> Passes[None] | None:
        """Fill the pool with a network's candidates; None: without passes in company."""

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Tell policy and lookups what became of their candidates."""
        self._controller.turn_to(self.batch_load)
        rows = tokens = 0  # of the text
        if self._pool is not None and len(tree) > 1:
            on_path, chosen = set(path), self._chosen.tolist()
            judged = [
                (chosen[index], index in on_path)
                for index, parent in enumerate(tree.parents.tolist()) if parent in on_path
            ]  # fmt: skip
            learners = (self._policy, *(source.calibration for source in self._foresight.sources))
            for begin, end, learner in zip([0, *self._ends], self._ends, learners, strict=False):
                own = [(place, accepted) for place, accepted in judged if begin <= place < end]
                if own:
                    places, accepted = zip(*own, strict=True)
                    learner.learn(self._pool.confidences[[*places]].tolist(), accepted)
            rows = sum(place >= self._ends[0] for place in chosen)
            tokens = sum(chosen[index] >= self._ends[0] for index in path)
        looked_ms = self._controller.looked_up(self._foresight)
        text = TextLookupShare(looked_ms, rows, tokens) if looked_ms or rows else None
        networked, read_ms = self._is_networked, self._read_ms
        self._controller.end_round(
            emitted, self._spent_ms, len(tree), networked=networked, read_ms=read_ms, text=text
        )
        self._spent_ms = self._read_ms = 0.0

    @property
    def rests(self) -> bool:
        """See `Drafter.rests`; what the text foresees may pay while a network rests."""
        pace = self._controller.turn_to(self.batch_load)
        self._opened = not pace.network.pause and self._opens()
        return not self._opened and (pace.text.pause > 0 or not self._foresees_enough())

    def pass_by(self, token_id: int, taps: F32) -> None:
        """See `Drafter.pass_by`; what is to be done for the token may wait until it wakes."""
        self._passed.append((token_id, taps.copy()))
        self._foresight.add((token_id,))
        self._controller.turn_to(self.batch_load)
        self._controller.pass_by(self._foresight)

    def _wake(self) -> None:
        """Take in what passed by."""
        passed, self._passed = self._passed, []
        maximum = 1 + self._limits.steps  # as of a round: of a prompt, passes are cut already
        for at in range(0, len(passed), maximum):
            token_ids, taps = zip(*passed[at : at + maximum], strict=True)
            self.observe(np.array(token_ids), np.concatenate(taps))
            self._read_on(token_ids)

    def confidences(self, tree: Tree) -> list[float]:
        """See `Drafter.confidences`."""
        if self._pool is None:
            return [1.0] * len(tree)
        return self._pool.confidences[self._chosen].tolist()


class TextDrafter(TreeDrafter):
    """Text alone drafts."""

    @property
    def _asks_network(self) -> bool:
        return False
