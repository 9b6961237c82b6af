"""Draft model: a smaller language model drafts (arXiv 2211.17192, 2302.01318).

Its KV cache holds all committed tokens; the newest gives the candidates for the root's children.
A round's tree nodes follow, and the accepted ones become committed. A text with the prefix of the
text before reuses the cache of that prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.graph_roles import PASS
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.arrays import (
    F32,
    I64,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart, open_decoder
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.speculate.draft_cache import ImageIds
from edgellm.device_runtime.speculate.drafter import SpecState, TreeDrafter
from edgellm.device_runtime.speculate.drafter_loading import (
    DrafterContext,
    LoadedDrafter,
    check_tree_size,
)
from edgellm.device_runtime.speculate.policy.costs import Costs, price
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits
from edgellm.device_runtime.speculate.shared_passes import Passes, Wanted
from edgellm.device_runtime.speculate.tree import F64, CandidatePool, Tree
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

DEFAULTS = TreeLimits(top_k=4, steps=8)
_TOKENIZER = "tokenizer.json"
_NONE = np.zeros(0, np.int64)


def open(order: DrafterContext) -> LoadedDrafter:
    """Another engine of `llm_build`, whose model has the base's tokens."""
    base, folder = order.base, order.options.draft_engine_dir
    assert folder is not None
    check_tree_size(order)
    manifest = load_engine(folder, LLM_ENGINE)
    if manifest.decoder.recurrent is not None:
        raise EdgeLLMError(
            f"{folder}: a model with recurrent layers cannot draft: its state has no rollback",
            hint="give a model with attention in all layers",
        )
    with FileCheck(folder, manifest.files, order.verify):
        if manifest.files.get(_TOKENIZER) != base.files.get(_TOKENIZER):
            require_same_tokens(order.engine, folder)
        network = open_decoder(folder, manifest)
    measured = network.costs_of(manifest)
    passes = order.pass_costs(), measured[PASS], measured[PASS]
    prices = Costs.of(*passes, *order.host_ms, levels=SharedCosts.find(PASS, measured))

    latest = LatestKV(network)

    def start(learned: SpecState) -> ModelDrafter:
        return ModelDrafter(
            network=network, latest=latest, learned=learned, limits=order.limits, costs=prices,
            num_candidates=base.decoder.vocab_size, num_readable=manifest.decoder.vocab_size,
            prefill_rows=manifest.prefill_rows, image_ids=order.image_ids(has_embeddings=False),
        )  # fmt: skip

    return LoadedDrafter(costs=prices, start=start)


def require_same_tokens(engine: Path, draft: Path) -> None:
    """Reject a draft model with another vocabulary.

    Raises:
        BrokenArtifactError: names the first token that differs.
    """
    ours, theirs = (ChatTokenizer(folder).vocabulary() for folder in (engine, draft))
    differing = ours.items() ^ theirs.items()
    if not differing:
        return
    token_id = min(token_id for _, token_id in differing)
    here, there = (
        next((repr(token) for token, known in vocabulary.items() if known == token_id), "none")
        for vocabulary in (ours, theirs)
    )
    raise BrokenArtifactError(
        f"{draft} has other tokens than {engine}: {token_id} is {there} there, {here} here",
        hint="take a draft model of the same family, with the same tokenizer",
    )


class LatestKV:
    """The KV cache of the latest sequence of a draft model, which the next sequence continues."""

    def __init__(self, network: DecoderNetwork) -> None:
        self._kv, self._is_used = network.new_kv(), False

    def take(self) -> SequenceKV:
        """The cache for a new sequence: the latest one, or a copy while it is used."""
        if self._is_used:
            self._kv = self._kv.fork()
        self._is_used = True
        return self._kv

    def give_back(self, kv: SequenceKV) -> None:
        """End the use of a cache."""
        if kv is self._kv:
            self._is_used = False
        else:
            kv.free()


class ModelDrafter(TreeDrafter):
    """Fills the pool with a language model that has the base's vocabulary."""

    def __init__(
        self,
        *,
        network: DecoderNetwork,
        latest: LatestKV,
        learned: SpecState,
        limits: TreeLimits,
        costs: Costs,
        num_candidates: int,
        num_readable: int,
        prefill_rows: int,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Compute nothing.

        Args:
            network: the draft model.
            latest: its KV cache.
            learned: see `TreeDrafter`.
            limits: the user's limits.
            costs: pass times of the base and of the draft model.
            num_candidates: the base's vocabulary size; further ids of the draft model are padding.
            num_readable: the draft model's vocabulary size; after a larger id a sequence
                continues without drafts.
            prefill_rows: tokens per prefill pass.
            image_ids: token ids of image positions, if the base takes images.
        """
        super().__init__(learned, limits, image_ids=image_ids)
        self._network, self._latest, self._costs = network, latest, costs
        self._prefill_rows = prefill_rows
        self._num_candidates, self._num_readable = num_candidates, num_readable
        self._text: list[int] = []
        self._length = 0  # positions of the cache that hold the text
        self._expanded = _NONE  # pool nodes at the positions after the text
        self._kv: SequenceKV | None = None  # None before the first pass
        self._shares: dict[int, F64] = {}  # milliseconds by tokens, by batch size
        self._sharing = 1  # batch size of the latest pass

    def drop(self) -> None:
        """See `Drafter.drop`; the next sequence may reuse the latest sequence's cache."""
        if self._kv is not None:
            self._latest.give_back(self._kv)
        self._kv = None

    def _append_text(self, token_ids: Sequence[int]) -> None:
        ids = np.asarray(token_ids, np.int64)
        self._text += (ids if self._image_ids is None else self._image_ids.for_draft(ids)).tolist()

    def _prefill(self) -> Passes[None]:
        """Compute the committed text; its last position gives the root's children."""
        if len(self._text) > self._network.capacity:
            return
        kv = self._own_kv()
        waiting = np.array(self._text[self._length :])
        if (waiting >= self._num_readable).any():
            return
        for begin in range(0, len(waiting), self._prefill_rows):
            chunk = waiting[begin : begin + self._prefill_rows]
            part = SequencePart(kv, chunk, self._length, np.array([len(chunk) - 1]))
            wanted = Wanted(network=self._network, part=part)
            result = yield wanted
            self._sharing = wanted.answers
            self._length += len(chunk)
            self._root = self._candidates(result.logits)
        self._record_prefill(len(waiting), self._share())

    def _share(self) -> F64:
        """Milliseconds by tokens that a sequence is charged for passes like the latest."""
        answers = self._sharing
        if answers not in self._shares:
            self._shares[answers] = self._costs.step_share(answers)
        return self._shares[answers]

    def _own_kv(self) -> SequenceKV:
        """This sequence's KV cache; at first with the latest sequence's common prefix."""
        if self._kv is None:
            self._kv = self._latest.take()
            self._length = min(self._kv.num_cached(self._text), len(self._text) - 1)
        return self._kv

    def _candidates(self, logits: F32) -> tuple[I64, F64]:
        """The likeliest tokens of `logits` [R, V] and their log-probabilities, both [R, K]."""
        scores = logits[:, : self._num_candidates]
        scores = scores - scores.max(axis=1, keepdims=True)
        count = min(self._limits.top_k, scores.shape[1])
        best = np.argpartition(scores, -count)[:, -count:]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        best = np.take_along_axis(best, order, 1)
        log_sums = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return best, np.take_along_axis(scores, best, 1).astype(np.float64) - log_sums

    def _is_ready(self) -> bool:
        """False while committed text waits: the tree is then the root."""
        return self._length == len(self._text)

    def _expand(self, pool: CandidatePool, levels: int) -> Passes[None]:
        self._expanded, self._is_chain = _NONE, True
        newest = self._add(pool, np.zeros(1, np.int64), self._root)
        for _ in range(1, levels):
            nodes = np.sort(self._policy.frontier(pool, newest, self._prices()))
            if not len(nodes):
                return
            self._expanded = np.concatenate([self._expanded, nodes])
            wanted = Wanted(network=self._network, part=self._level(pool, len(nodes)))
            result = yield wanted
            self._sharing = wanted.answers
            self._book_level()
            self._controller.set_batch_load(self.batch_load)  # other drafters may have set theirs
            newest = self._add(pool, nodes, self._candidates(result.logits))

    def _add(self, pool: CandidatePool, parents: I64, candidates: tuple[I64, F64]) -> I64:
        token_ids, log_probs = candidates
        return pool.add(parents, token_ids, self._policy.scores(log_probs), np.exp(log_probs))

    def _prices(self) -> F64:
        """Milliseconds of expanding 1, 2, ... nodes, up to the free positions of the cache."""
        used, room = len(self._expanded), self._network.capacity - self._length
        rows = np.arange(used + 1, min(room, used + self._limits.verify_size) + 1)
        share = self._share()
        prices = price(share, rows)
        if self._is_chain:
            prices[:1] = price(share, 1)
        return prices

    def _book_level(self) -> None:
        self._spent_ms += price(self._share(), 1 if self._is_chain else len(self._expanded))

    def _level(self, pool: CandidatePool, count: int) -> SequencePart:
        """The pass that gives the candidates of the `count` nodes expanded last.

        The graph's tree mask covers only one pass, so each level recomputes the whole tree. A
        chain computes only its last node.
        """
        assert self._kv is not None
        tree, _ = pool.tree(self._expanded)
        depths, mask = tree.layout()
        rows = len(self._expanded)
        self._is_chain = int(depths[-1]) == rows
        if self._is_chain:
            last = tree.token_ids[-1:]
            return SequencePart(self._kv, last, self._length + rows - 1, np.zeros(1, np.int64))
        return SequencePart(
            self._kv,
            tree.token_ids[1:],
            self._length,
            np.arange(rows - count, rows),
            self._length + depths[1:] - 1,
            mask[1:, 1:],
        )

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Keep the KV positions of accepted nodes; see `TreeDrafter.learn`."""
        if self._pool is not None:
            accepted = np.flatnonzero(np.isin(self._expanded, self._chosen[path]))
            if len(accepted) and not self._is_chain:
                assert self._kv is not None
                self._kv.compact(self._length, accepted)
            self._length += len(accepted)
        if self._kv is not None:
            self._kv.truncate(self._length)
        super().learn(tree, path, emitted)
