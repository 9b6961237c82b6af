"""Drafting with an ordinary, smaller language model (arXiv 2211.17192, 2302.01318).

Its cache holds all committed tokens, the newest among them, whose row gives the candidates for
the root's children. A round's tree rows stand behind, and the accepted ones become committed. A
text that begins as the one before goes on behind the rows that they share.
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
    ImageRows,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart, open_decoder
from edgellm.device_runtime.networks.sequence_kv import Context
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
            f"{folder}: a model with recurrent layers cannot draft: it takes no token back",
            hint="give a model that attends in all layers",
        )
    with FileCheck(folder, manifest.files, order.verify):
        if manifest.files.get(_TOKENIZER) != base.files.get(_TOKENIZER):
            require_same_tokens(order.engine, folder)
        session = open_decoder(folder, manifest)
    if (images := manifest.decoder.images) is not None:
        session.set_images(ImageRows.none(manifest.decoder.hidden_size, images.num_deepstack))
    measured = session.costs_of(manifest)
    passes = order.pass_costs(), measured[PASS], measured[PASS]
    prices = Costs.of(*passes, *order.host_ms, levels=SharedCosts.find(PASS, measured))

    def start(learned: SpecState) -> ModelDrafter:
        return ModelDrafter(
            session, learned, order.limits, prices,
            num_candidates=base.decoder.vocab_size, num_readable=manifest.decoder.vocab_size,
            prefill_rows=manifest.prefill_rows, image_ids=order.image_ids(reads_rows=False),
        )  # fmt: skip

    return LoadedDrafter(prices, start)


def require_same_tokens(engine: Path, draft: Path) -> None:
    """Refuse a draft model to which token ids mean something else.

    Raises:
        BrokenArtifactError: names a token that differs.
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


class ModelDrafter(TreeDrafter):
    """Grows the pool with a language model of the base's vocabulary."""

    def __init__(
        self,
        session: DecoderNetwork,
        learned: SpecState,
        limits: TreeLimits,
        costs: Costs,
        *,
        num_candidates: int,
        num_readable: int,
        prefill_rows: int,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Nothing is computed yet.

        Args:
            session: the drafting model.
            learned: see `TreeDrafter`.
            limits: the user's bounds.
            costs: of the base, and of the model's passes.
            num_candidates: token ids that the base knows as well; the model's others are padding.
            num_readable: token ids that the model knows; behind one that it does not, an answer
                goes on without it.
            prefill_rows: rows per pass while a prompt is read.
            image_ids: of a base that takes images.
        """
        super().__init__(learned, limits, image_ids=image_ids)
        self._session, self._costs, self._prefill_rows = session, costs, prefill_rows
        self._num_candidates, self._num_readable = num_candidates, num_readable
        self._text: list[int] = []
        self._length = 0  # rows of the cache that hold the text
        self._grown = _NONE  # pool nodes of the rows behind
        self._context: Context | None = None  # of its rows; None before it reads
        self._shares: dict[int, F64] = {}  # milliseconds by rows, by the answers of a pass
        self._sharing = 1  # answers that shared the latest pass

    def drop(self) -> None:
        """See `Drafter.drop`; the next answer may go on behind the rows of the latest."""
        if self._context is not None:
            self._context.is_spare = True
            if self._context is not self._session.context:
                self._session.close(self._context)
        self._context = None

    def _read_on(self, token_ids: Sequence[int]) -> None:
        ids = np.asarray(token_ids, np.int64)
        self._text += (ids if self._image_ids is None else self._image_ids.for_draft(ids)).tolist()

    def _read(self) -> Passes[None]:
        """Read the committed text; its last row gives the root's children."""
        if len(self._text) > self._session.capacity:
            return
        context = self._turn_to_own()
        waiting = np.array(self._text[self._length :])
        if (waiting >= self._num_readable).any():
            return
        for begin in range(0, len(waiting), self._prefill_rows):
            piece = waiting[begin : begin + self._prefill_rows]
            part = SequencePart(context, piece, self._length, np.array([len(piece) - 1]))
            wanted = Wanted(self._session, part)
            result = yield wanted
            self._sharing = wanted.answers
            self._length += len(piece)
            self._root = self._candidates(result.logits)
        self._book_reading(len(waiting), self._share())

    def _share(self) -> F64:
        """What its rows cost an answer, by their number, of passes like the latest."""
        answers = self._sharing
        if answers not in self._shares:
            self._shares[answers] = self._costs.step_share(answers)
        return self._shares[answers]

    def _turn_to_own(self) -> Context:
        """Its rows; at first those of the answer before that it begins with."""
        session = self._session
        if self._context is None:
            latest = session.context
            self._context = latest if latest.is_spare else session.fork(latest)
            self._context.is_spare = False
            session.use(self._context)
            self._length = min(session.held(self._text), len(self._text) - 1)
        return self._context

    def _candidates(self, logits: F32) -> tuple[I64, F64]:
        """The likeliest tokens of rows [R, V] and their log-probabilities, both [R, K]."""
        scores = logits[:, : self._num_candidates]
        scores = scores - scores.max(axis=1, keepdims=True)
        count = min(self._limits.top_k, scores.shape[1])
        best = np.argpartition(scores, -count)[:, -count:]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        best = np.take_along_axis(best, order, 1)
        log_sums = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return best, np.take_along_axis(scores, best, 1).astype(np.float64) - log_sums

    def _is_ready(self) -> bool:
        """While committed text waits, the tree is the root."""
        return self._length == len(self._text)

    def _grow(self, pool: CandidatePool, levels: int) -> Passes[None]:
        self._grown, self._is_chain = _NONE, True
        newest = self._add(pool, np.zeros(1, np.int64), self._root)
        for _ in range(1, levels):
            nodes = np.sort(self._policy.frontier(pool, newest, self._prices()))
            if not len(nodes):
                return
            self._grown = np.concatenate([self._grown, nodes])
            wanted = Wanted(self._session, self._level(pool, len(nodes)))
            result = yield wanted
            self._sharing = wanted.answers
            self._book_level()
            self._controller.turn_to(self.batch_load)  # others may have gone on meanwhile
            newest = self._add(pool, nodes, self._candidates(result.logits))

    def _add(self, pool: CandidatePool, parents: I64, candidates: tuple[I64, F64]) -> I64:
        token_ids, log_probs = candidates
        return pool.add(parents, token_ids, self._policy.scores(log_probs), np.exp(log_probs))

    def _prices(self) -> F64:
        """Milliseconds of growing by one node, by two, ..., by as many as the cache has room."""
        used, room = len(self._grown), self._session.capacity - self._length
        rows = np.arange(used + 1, min(room, used + self._limits.verify_size) + 1)
        share = self._share()
        prices = price(share, rows)
        if self._is_chain:
            prices[:1] = price(share, 1)
        return prices

    def _book_level(self) -> None:
        self._spent_ms += price(self._share(), 1 if self._is_chain else len(self._grown))

    def _level(self, pool: CandidatePool, count: int) -> SequencePart:
        """What gives the candidates of the `count` nodes grown last.

        The graph's mask rules the rows of one pass alone, so that a tree is computed anew with
        every level; a chain goes on from the rows before.
        """
        assert self._context is not None
        tree, _ = pool.tree(self._grown)
        depths, mask = tree.layout()
        rows = len(self._grown)
        self._is_chain = int(depths[-1]) == rows
        if self._is_chain:
            last = tree.token_ids[-1:]
            return SequencePart(self._context, last, self._length + rows - 1, np.zeros(1, np.int64))
        return SequencePart(
            self._context,
            tree.token_ids[1:],
            self._length,
            np.arange(rows - count, rows),
            self._length + depths[1:] - 1,
            mask[1:, 1:],
        )

    def learn(self, tree: Tree, path: list[int], emitted: int) -> None:
        """Keep the rows of accepted nodes; see `TreeDrafter.learn`."""
        if self._pool is not None:
            accepted = np.flatnonzero(np.isin(self._grown, self._chosen[path]))
            if len(accepted) and not self._is_chain:
                assert self._context is not None
                self._session.use(self._context)
                self._session.compact(self._length, accepted)
            self._length += len(accepted)
        if self._context is not None:
            self._context.cut(self._length)
        super().learn(tree, path, emitted)
