"""The `Drafter` protocol, and `TreeDrafter`, the base class of drafters that propose trees.

A drafter is the state of one request. `SpecState` is the state that all requests share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    LoadedAdapter,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
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

RETRIAL_ROWS = 64  # maximum tokens of all sequences that a network prefills after a pause
LEAST_RETRIAL_ROWS = 16  # minimum for each sequence


@dataclass(frozen=True, slots=True)
class Verified:
    """A tree, and the base's forward pass over it."""

    tree: Tree
    result: PassResult
    accepted: Accepted | None = None  # by the device; None: the host accepts


class Drafter(Protocol):
    """Proposes a tree for every round of a sequence.

    Acceptance is exact for every tree that is a function of the text before it, so a drafter
    cannot change the output.
    """

    batch_load: BatchLoad  # the batch of the sequence; set before each pass

    def begin(self, token_ids: Sequence[int]) -> None:
        """Called before a prompt's prefill, which follows positions that the draft may have cached.

        Args:
            token_ids: the tokens of these positions, and the next.
        """
        ...

    def use_kv(self, kv: Any) -> None:
        """Set the KV cache of the sequence that begins, from `LoadedDrafter.caches`."""
        ...

    def set_images(self, images: ImageRows) -> None:
        """Set the images of the sequence that begins; only for bases that take images."""
        ...

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        """Set the base's LoRA adapter of the sequence that begins."""
        ...

    def remember(self, token_ids: list[int]) -> None:
        """Append committed tokens: the prompt, then the tokens of every round."""
        ...

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Committed positions: hidden states [M, T*H] and each one's next token, int64 [M]."""
        ...

    def catch_up(self) -> Passes[None]:
        """Request the passes over committed tokens that must precede a proposal."""
        ...

    def plan_round(
        self,
        network: DecoderNetwork,
        newest: tuple[int, SequenceKV, int],
        levels: int,
        sampler: Sampler,
        *,
        is_exact: bool,
    ) -> tuple[DeviceRounds, RoundPart] | None:
        """Plan a round that the device runs without the host; `take_round` follows.

        Args:
            network: the base.
            newest: the newest committed token, its KV cache, its position in the base's cache.
            levels: maximum depth of the tree.
            sampler: the request's sampler.
            is_exact: whether acceptance is exact.

        Returns:
            The device's rounds, and this sequence's part; None: the caller calls `propose`.
        """
        ...

    def take_round(self, found: RoundOutcome, result: PassResult) -> Verified:
        """Convert the device's result of a planned round."""
        ...

    def propose(self, root: int, room: int, levels: int) -> Passes[Tree]:
        """Propose a tree of at most `room` drafted nodes and `levels` levels under `root`.

        `root` is the newest committed token. A tree of the root alone is plain decoding.
        """
        ...

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Record the outcome: the accepted `path`, root first, and the number of emitted tokens."""
        ...

    def confidences(self, tree: Tree) -> list[float]:
        """The draft's probability of every node, given its parent."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether drafting pauses in the next round: `observe_plain` is called, not `propose`."""
        ...

    def observe_plain(self, token_id: int, taps: F32) -> None:
        """During a pause: a token of plain decoding, and the hidden states before it."""
        ...

    def drop(self) -> None:
        """Release KV cache that only this drafter uses."""
        ...

    def end(self) -> None:
        """The request has finished; thread-safe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecState:
    """Learned state that all greedy requests share, or all sampled ones."""

    policy: Policy  # chooses tree sizes, with the acceptance rates of a network
    controller: SpecGate
    lookups: tuple[LearnedLookup, ...] = ()
    sizes: Sizes | None = None  # of trees that the device builds


class TreeDrafter:
    """Selects trees from a pool of candidates.

    A subclass has a network, which fills the pool before the lookups are merged into it.
    """

    def __init__(
        self, learned: SpecState, limits: TreeLimits, *, image_ids: ImageIds | None = None
    ) -> None:
        """Compute nothing.

        Args:
            learned: state shared with other requests.
            limits: the user's limits.
            image_ids: token ids of image positions, if the base takes images.
        """
        self._policy, self._controller, self.batch_load = learned.policy, learned.controller, ALONE
        self._learned_lookups, self._limits, self._image_ids = learned.lookups, limits, image_ids
        self._text_drafts = TextDrafts()
        self._pool: CandidatePool | None = None
        self._spent_ms = self._read_ms = 0.0  # this round's; see `SpecGate.end_round`
        self._use_network: bool | None = (
            None  # whether this round uses the network; None: undecided
        )
        self._is_networked = False  # whether the network drafted in this round
        self._passed: list[tuple[int, F32]] = []  # during a pause: tokens, hidden states before

    def begin(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.begin`; lookups start empty."""
        del token_ids
        self._controller.skip_timing()
        self._text_drafts = TextDrafts(self._learned_lookups)

    def drop(self) -> None:
        """Lookups have no KV cache."""

    def end(self) -> None:
        """See `Drafter.end`; lookups may keep the text for later requests."""
        self._wake()
        self._text_drafts.end()

    def use_kv(self, kv: Any) -> None:
        """Lookups have no KV cache."""

    def set_images(self, images: ImageRows) -> None:
        """Lookups use no images."""

    def set_adapter(self, adapter: LoadedAdapter | None) -> None:
        """Lookups use no adapter."""

    def remember(self, token_ids: list[int]) -> None:
        """Append committed tokens to the lookups and the network's text."""
        self._append_text(token_ids)
        if self._image_ids is not None:  # image positions are no text
            token_ids = [token for token in token_ids if token < self._image_ids.first]
        self._text_drafts.add(token_ids)
        if len(token_ids) > self._limits.round_rows and self._looks_up:
            self._text_drafts.flush()  # a prompt's time is not part of the lookup time of rounds

    def _append_text(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens for a network that reads token ids."""

    def observe(self, next_token_ids: I64, taps: F32) -> None:
        """Lookups use no hidden states."""

    def catch_up(self) -> Passes[None]:
        """Compute committed tokens with the network, unless it pauses."""
        self._wake()
        self._controller.set_batch_load(self.batch_load)
        use_network, self._use_network = self._use_network, None
        if self._chooses_network() if use_network is None else use_network:
            yield from self._prefill() or ()

    def _record_prefill(self, rows: int, prices: F64) -> None:
        """Record that the network computed `rows` tokens, at `prices` of passes."""
        if rows <= self._limits.round_rows:
            self._spent_ms += price(prices, rows)
            return
        # A prompt, or tokens of a pause: their cost is not part of a round's.
        self._read_ms += price(prices, min(rows, RETRIAL_ROWS))
        self._controller.skip_timing()

    @property
    def _has_active_network(self) -> bool:
        """Whether there is a network that does not pause."""
        return not self._controller.pace.network.pause

    def _chooses_network(self) -> bool:
        return self._has_active_network and self._controller.chooses_network(self._expected)

    @property
    def _looks_up(self) -> bool:
        return bool(self._text_drafts.sources) and not self._controller.pace.text.pause

    def _expected(self) -> float:
        """Expected number of accepted tokens from lookups."""
        if not self._looks_up:
            return 0.0
        return max(map(sum, self._text_drafts.chances()), default=0.0)

    def _lookups_pay(self) -> bool:
        return self._looks_up and any(map(self._policy.pays, self._text_drafts.chances()))

    def _prefill(self) -> Passes[None] | None:
        """Compute the committed tokens with the network; None: without batched passes."""

    def plan_round(
        self,
        network: DecoderNetwork,
        newest: tuple[int, SequenceKV, int],
        levels: int,
        sampler: Sampler,
        *,
        is_exact: bool,
    ) -> tuple[DeviceRounds, RoundPart] | None:
        """See `Drafter.plan_round`; most drafters need the host."""
        del network, newest, levels, sampler, is_exact

    def take_round(self, found: RoundOutcome, result: PassResult) -> Verified:
        """See `Drafter.take_round`; this class plans no rounds."""
        raise NotImplementedError

    def propose(self, root: int, room: int, levels: int) -> Passes[Tree]:
        """See `Drafter.propose`."""
        self._wake()
        self._controller.set_batch_load(self.batch_load)
        deepest = min(levels, self._limits.text_steps)
        levels = min(levels, self._limits.steps)
        room = min(room, self._limits.verify_size - 1)
        self._is_networked = self._is_ready()
        if room < 1 or levels < 1 or not (self._is_networked or self._lookups_pay()):
            self._pool = None
            return Tree.of_root(root)
        looks_up = self._looks_up
        maximum = self._limits.pool_size + self._text_drafts.maximum * looks_up
        pool = self._pool = CandidatePool(root, maximum)
        if self._is_networked:
            yield from self._expand(pool, levels) or ()
            self._controller.set_batch_load(self.batch_load)  # other drafters may have set theirs
        self._ends = [pool.count]
        if looks_up:
            self._ends += self._text_drafts.merge(pool, deepest)
        tree, self._chosen = pool.tree(self._policy.select(pool, room))
        return tree

    def _is_ready(self) -> bool:
        """Whether the network drafts in this round."""
        return self._has_active_network

    def _expand(self, pool: CandidatePool, levels: int) -> Passes[None] | None:
        """Fill the pool with a network's candidates; None: without batched passes."""

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Update the acceptance rates of policy and lookups."""
        self._controller.set_batch_load(self.batch_load)
        rows = tokens = 0  # from lookups: verified nodes, accepted nodes
        if self._pool is not None and len(tree) > 1:
            on_path, chosen = set(path), self._chosen.tolist()
            outcomes = [
                (chosen[index], index in on_path)
                for index, parent in enumerate(tree.parents.tolist()) if parent in on_path
            ]  # fmt: skip
            learners = (self._policy, *(source.calibration for source in self._text_drafts.sources))
            for begin, end, learner in zip([0, *self._ends], self._ends, learners, strict=False):
                own = [(place, accepted) for place, accepted in outcomes if begin <= place < end]
                if own:
                    places, accepted = zip(*own, strict=True)
                    learner.learn(self._pool.confidences[[*places]].tolist(), accepted)
            rows = sum(place >= self._ends[0] for place in chosen)
            tokens = sum(chosen[index] >= self._ends[0] for index in path)
        looked_ms = self._controller.looked_up(self._text_drafts)
        text = TextLookupShare(looked_ms, rows, tokens) if looked_ms or rows else None
        networked, read_ms = self._is_networked, self._read_ms
        self._controller.end_round(
            emitted, self._spent_ms, len(tree), networked=networked, read_ms=read_ms, text=text
        )
        self._spent_ms = self._read_ms = 0.0

    @property
    def is_paused(self) -> bool:
        """See `Drafter.is_paused`; lookups may pay while a network pauses."""
        pace = self._controller.set_batch_load(self.batch_load)
        self._use_network = not pace.network.pause and self._chooses_network()
        return not self._use_network and (pace.text.pause > 0 or not self._lookups_pay())

    def observe_plain(self, token_id: int, taps: F32) -> None:
        """See `Drafter.observe_plain`; the token is processed when the pause ends."""
        self._passed.append((token_id, taps.copy()))
        self._text_drafts.add((token_id,))
        self._controller.set_batch_load(self.batch_load)
        self._controller.observe_plain(self._text_drafts)

    def _wake(self) -> None:
        """Process the tokens of a pause."""
        passed, self._passed = self._passed, []
        maximum = 1 + self._limits.steps  # as in a round
        for at in range(0, len(passed), maximum):
            token_ids, taps = zip(*passed[at : at + maximum], strict=True)
            self.observe(np.array(token_ids), np.concatenate(taps))
            self._append_text(token_ids)

    def confidences(self, tree: Tree) -> list[float]:
        """See `Drafter.confidences`."""
        if self._pool is None:
            return [1.0] * len(tree)
        return self._pool.confidences[self._chosen].tolist()


class TextDrafter(TreeDrafter):
    """A drafter with lookups only."""

    @property
    def _has_active_network(self) -> bool:
        return False
