"""A base and a draft that are functions of the attended tokens, and that check every pass.

`StrictBase` and `StrictDraft` cache tokens and positions, derive from mask and positions what
each new token attends to, and fail unless that is one path from the first token to the new one.
Their outputs depend on that path alone.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.model_spec import DecoderSpec, KVCacheSpec
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult
from edgellm.device_runtime.networks.draft import DraftResult
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.slot_kv_cache import SlotPool
from edgellm.device_runtime.speculate.drafter import RETRIAL_ROWS

Context = tuple[int, ...]
VOCAB = 24
FEATURES: list[Context] = []  # what the base's features mean, by number
_NUMBERS: dict[Context, int] = {}
_FUSED, _RECYCLED = 0.0, 1.0


def _hash(context: Context, salt: int = 0) -> int:
    return zlib.crc32(np.array([salt, *context], np.int64).tobytes())


def feature_of(context: Context) -> int:
    """A number of its own, exact in float32."""
    if context not in _NUMBERS:
        _NUMBERS[context] = len(FEATURES)
        FEATURES.append(context)
    assert len(FEATURES) < 1 << 24
    return _NUMBERS[context]


@functools.lru_cache(maxsize=100_000)
def random_logits(context: Context) -> np.ndarray:
    """The base's logits [V] after `context`."""
    random = np.random.default_rng(_hash(context))
    return random.normal(size=VOCAB).astype(np.float32) * 2


class StrictBase:
    """See `edgellm.device_runtime.networks.decoder.DecoderNetwork`."""

    def __init__(
        self, capacity: int, logits_of: Callable[[Context], np.ndarray] = random_logits
    ) -> None:
        self.capacity, self.logits_of = capacity, logits_of
        self.rows: list[tuple[int, int]] = []  # token and position
        self.valid = 0  # rows; those of a tree are not before `compact` has chosen a path
        self.tree_sizes: list[int] = []
        self.passes: list[tuple[int, int]] = []  # write index and rows

    def run(self, token_ids, write_index, logits_index, *, position_ids=None, tree_mask=None):
        count = len(token_ids)
        if write_index + count > self.capacity:
            raise LimitError("rows exceed the capacity")
        assert write_index <= self.valid, "the cache does not hold what the loop believes"
        self.passes.append((write_index, count))
        positions = np.arange(write_index, write_index + count)
        positions = positions if position_ids is None else np.asarray(position_ids)
        mask = np.tri(count, dtype=np.bool_) if tree_mask is None else np.asarray(tree_mask)
        assert mask.shape == (count, count)
        assert mask.dtype == np.bool_
        own = [(int(t), int(p)) for t, p in zip(token_ids, positions, strict=True)]
        self.rows = [*self.rows[:write_index], *own]
        self.contexts = contexts = self._contexts(write_index, mask)
        self.valid = write_index + (count if tree_mask is None else 0)
        self.pending = write_index
        if tree_mask is not None or count == 1:
            self.tree_sizes.append(count)
        taps = np.zeros((count, 3), np.float32)
        for row, context in enumerate(contexts):
            taps[row] = feature_of(context), len(context), context[-1]
        logits = np.stack([self.logits_of(contexts[int(row)]) for row in logits_index])
        return PassResult({graph_io.LOGITS: logits[None], graph_io.HIDDEN_TAPS: taps[None]}, count)

    def _contexts(self, write_index: int, mask: np.ndarray) -> list[Context]:
        """Paths that the new tokens attend to."""
        committed = self.rows[:write_index]
        assert [position for _, position in committed] == list(range(write_index))
        above = tuple(token for token, _ in committed)
        seen = [np.flatnonzero(row).tolist() for row in mask]
        contexts: list[Context] = []
        for row, (path, (token, position)) in enumerate(
            zip(seen, self.rows[write_index:], strict=True)
        ):
            assert path[-1] == row, "a row must see itself and nothing after it"
            assert position == write_index + len(path) - 1, "no path from the root to the node"
            if len(path) > 1:
                assert path[:-1] == seen[path[-2]], "what the parent sees, and itself"
            contexts.append((*(contexts[path[-2]] if len(path) > 1 else above), token))
        return contexts

    def compact(self, length, rows):
        rows = np.asarray(rows).tolist()
        assert length == self.pending
        assert rows[0] == 0
        assert rows == sorted(set(rows))
        kept = [self.rows[length + row] for row in rows]
        assert [p for _, p in kept] == list(range(length, length + len(rows)))
        self.rows = [*self.rows[:length], *kept]
        self.valid = length + len(rows)

    def read(self, length):
        assert length <= self.valid
        return np.array(self.rows[:length], np.int64).reshape(length, 2)

    def write(self, values):
        self.rows = [tuple(row) for row in values.tolist()]
        self.valid = len(values)


class _OneSlot:
    """The cache of a scripted base, [1, length, 2] for tokens and positions; see `SlotMemory`."""

    def __init__(self, base: StrictBase) -> None:
        self.base = base

    def compact(self, slot, length, rows):
        assert slot == 0
        self.base.compact(length, rows)

    def read(self, slot, length):
        assert slot == 0
        return self.base.read(length)

    def write(self, slot, values):
        assert slot == 0
        self.base.write(values)


class _AsRunner(Runner):
    """A scripted base as the runner of a network."""

    def __init__(self, base: StrictBase) -> None:
        self.base = base
        self.kv_pool = SlotPool(_OneSlot(base), 1, base.capacity)

    def run(self, inputs):
        ids, logits_index = inputs[graph_io.INPUT_IDS][0], inputs[graph_io.LOGITS_INDEX]
        result = self.base.run(
            ids,
            int(inputs[graph_io.WRITE_INDEX][0]),
            logits_index,
            position_ids=inputs[graph_io.POSITION_IDS][0],
            tree_mask=inputs.get(graph_io.TREE_MASK),
        )
        return {graph_io.LOGITS: result.logits[None], graph_io.HIDDEN_TAPS: result.taps[None]}


def recorded(base: StrictBase) -> DecoderNetwork:
    """A network over a scripted base."""
    spec = DecoderSpec(
        model_type="scripted",
        vocab_size=VOCAB,
        hidden_size=3,
        max_positions=base.capacity,
        num_parameters=0,
        kv=KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"),
    )
    return DecoderNetwork(runner=_AsRunner(base), spec=spec, capacity=base.capacity)


class StrictModel(StrictBase):
    """An ordinary model that drafts: not every round has a tree to compact."""

    def __init__(self, capacity: int, draft: Draft) -> None:
        super().__init__(capacity, functools.partial(_logits_of, draft))

    @property
    def pass_rows(self) -> list[int]:
        """Of every pass."""
        return [rows for _, rows in self.passes]

    def compact(self, length, rows):
        assert self.valid == self.pending == length, "only a tree needs compacting"
        above = tuple(token for token, _ in self.rows[:length])
        for row in rows.tolist():
            assert self.contexts[row][:-1] == above, "no path from the committed rows"
            above = self.contexts[row]
        self.rows = [*self.rows[:length], *(self.rows[length + row] for row in rows.tolist())]
        self.valid = length + len(rows)


def _logits_of(draft: Draft, context: Context) -> np.ndarray:
    """A model of which `draft` gives the candidates."""
    logits = np.full(VOCAB, -30, np.float32)
    ids, chances = draft(context)
    logits[ids] = np.log(np.array(chances) + 1e-12)
    return logits


Draft = Callable[[Context], tuple[list[int], list[float]]]  # all candidates and probabilities


_remembered = functools.lru_cache(maxsize=100_000)  # hundreds of cases draft the same few texts


@_remembered
def oracle(context: Context, logits_of=random_logits) -> tuple[list[int], list[float]]:
    """The base's own order."""
    order = np.argsort(-logits_of(context).astype(np.float64), kind="stable")
    chances = 0.9 * 0.05 ** np.arange(len(order))
    return order.tolist(), chances.tolist()


@_remembered
def adversary(context: Context) -> tuple[list[int], list[float]]:
    """The base's unlikeliest tokens with high confidence; its choice is never a candidate."""
    order = np.argsort(random_logits(context), kind="stable")[:-1]
    return order.tolist(), (0.95 * 0.1 ** np.arange(len(order))).tolist()


@_remembered
def guesser(context: Context) -> tuple[list[int], list[float]]:
    """Random candidates, unlike the base's."""
    random = np.random.default_rng(_hash(context, 7))
    chances = np.sort(random.dirichlet(np.full(VOCAB, 0.4)))[::-1] + 1e-9
    return random.permutation(VOCAB).tolist(), (chances / chances.sum()).tolist()


def half_right(context: Context) -> tuple[list[int], list[float]]:
    """The oracle or the guesser, depending on the context."""
    return (oracle if _hash(context, 3) % 4 else guesser)(context)


def broken(context: Context) -> tuple[list[int], list[float]]:
    """NaN for all candidates."""
    order, chances = guesser(context)
    return order, [float("nan")] * len(chances)


DRAFTS: dict[str, Draft] = {
    draft.__name__: draft for draft in (oracle, adversary, guesser, half_right, broken)
}


@dataclass
class _Slot:
    """A position of the draft's cache after the committed ones."""

    path: Context  # tokens after the root
    seen: set[int] = field(default_factory=set)  # slots of its ancestors and its own


@dataclass
class DraftText:
    """Tokens of the cached positions of one request."""

    text: list[int] = field(default_factory=list)  # token 0, and the token of every committed row
    skipped: int = 0  # number of first positions that a retrial did not prefill
    is_closed: bool = False
    slots: list[_Slot] = field(default_factory=list)
    recycled: dict[int, Context] = field(default_factory=dict)  # serial number -> its path
    images, min_length = None, 0

    @property
    def committed(self) -> int:
        """Rows of the cache."""
        return max(len(self.text) - 1 - self.skipped, 0)

    def fork(self):
        assert not self.is_closed
        return DraftText(list(self.text), self.skipped)

    def free(self):
        self.is_closed = True

    def read(self, length):
        assert length <= self.committed
        pairs = list(itertools.pairwise(self.text[self.skipped :]))
        return np.array(pairs[:length], np.int64).reshape(length, 2)

    def truncate(self, length):
        assert length <= self.committed or not self.text

    def write(self, values, min_length):
        assert not min_length
        self.text, self.skipped = [*values[:1, 0].tolist(), *values[:, 1].tolist()], 0


class StrictDraft:
    """See `edgellm.device_runtime.networks.draft.DraftNetwork`.

    Row i must pair the feature of token i with token i + 1 at position i; a grown row must see
    the committed rows and its ancestors, and must be given what its parent recycled.
    """

    max_pass_tokens = max_text_tokens = 0

    def __init__(self, capacity: int, draft: Draft, max_batch_size: int = 1) -> None:
        self.capacity, self.draft, self.max_batch_size = capacity, draft, max_batch_size
        self.current = DraftText()  # of the latest pass
        self.sizes: list[int] = []  # requests of every pass
        self.growth: list[int] = []  # rows of every growth pass of this round
        self.extensions: list[int] = []

    @property
    def text(self) -> list[int]:
        return self.current.text

    @text.setter
    def text(self, text: list[int]) -> None:
        self.current.text = text

    @property
    def skipped(self) -> int:
        return self.current.skipped

    @skipped.setter
    def skipped(self, skipped: int) -> None:
        self.current.skipped = skipped

    @property
    def committed(self) -> int:
        """Rows of the cache."""
        return self.current.committed

    @property
    def slots(self) -> list[_Slot]:
        return self.current.slots

    def new_kv(self):
        return DraftText()

    def fuse(self, taps):
        hidden = np.full((len(taps), 2), _FUSED, np.float32)
        hidden[:, 1] = taps[:, 0]
        return hidden

    def on_shortage(self, evict): ...

    def run_batch(self, parts):
        assert 0 < len(parts) <= self.max_batch_size
        self.sizes.append(len(parts))
        assert len({id(part.kv) for part in parts}) == len(parts)
        return [self._run_part(part) for part in parts]

    def _run_part(self, part):
        assert not part.kv.is_closed
        self.current = part.kv
        hidden = part.hidden if part.taps is None else self.fuse(part.taps)
        return self.run(
            part.token_ids, hidden, part.write_index, part.output_rows, top_k=part.top_k,
            position_ids=part.position_ids, tree_mask=part.tree_mask,
        )  # fmt: skip

    def run(
        self, token_ids, hidden, write_index, output_rows, *, top_k, position_ids=None,
        tree_mask=None,
    ):  # fmt: skip
        if write_index + len(token_ids) > self.capacity:
            raise LimitError("rows exceed the capacity")
        if tree_mask is None:
            paths = self._extend(token_ids, hidden, write_index, position_ids)
            assert output_rows.tolist() == [len(token_ids) - 1]
            paths = [()]
        else:
            paths = self._grow(token_ids, hidden, write_index, position_ids, tree_mask)
            assert output_rows.tolist() == list(range(len(token_ids)))
        return self._answer(paths, top_k)

    def _extend(self, token_ids, hidden, write_index, position_ids) -> None:
        assert write_index <= self.committed
        assert position_ids is None
        if write_index == 0:
            self.text = list(FEATURES[int(hidden[0, 1])])
            self.skipped = len(self.text) - 1
            assert self.skipped == 0 or len(token_ids) == RETRIAL_ROWS
        self.text = self.text[: self.skipped + write_index + 1]
        for row, token in enumerate(token_ids.tolist()):
            kind, feature = hidden[row].tolist()
            assert kind == _FUSED, "a committed row takes the base's feature"
            assert list(FEATURES[int(feature)]) == self.text, "the feature of another token"
            self.text.append(token)
        self.slots.clear()
        self.current.recycled.clear()
        self.growth = []
        self.extensions.append(len(token_ids))

    def _grow(self, token_ids, hidden, write_index, position_ids, tree_mask) -> list[Context]:
        committed, used, count = self.committed, len(self.slots), len(token_ids)
        assert write_index == committed + used
        assert tree_mask.shape == (count, used + count)
        self.current.slots += [_Slot(()) for _ in range(count)]
        for row, token in enumerate(token_ids.tolist()):
            own, seen = used + row, set(np.flatnonzero(tree_mask[row]).tolist())
            assert own in seen
            above = seen - {own}
            assert all(slot < used for slot in above), "siblings and later rows are not seen"
            parent = max(above, default=None)
            assert above == (set() if parent is None else self.slots[parent].seen)
            path = () if parent is None else self.slots[parent].path
            kind, serial = hidden[row].tolist()
            assert kind == _RECYCLED, "a grown row takes what its parent recycled"
            assert self.current.recycled[int(serial)] == path, "another row's recycled hidden"
            assert position_ids[row] == committed + len(path)
            self.slots[own] = _Slot((*path, token), seen)
        self.growth.append(count)
        return [slot.path for slot in self.slots[used:]]

    def _answer(self, paths: list[Context], top_k: int) -> DraftResult:
        ids = np.zeros((len(paths), top_k), np.int64)
        log_probs = np.zeros((len(paths), top_k), np.float32)
        hidden = np.full((len(paths), 2), _RECYCLED, np.float32)
        for row, path in enumerate(paths):
            candidates, chances = self.draft((*self.text, *path))
            ids[row] = candidates[:top_k]
            log_probs[row] = np.log(chances[:top_k])
            hidden[row, 1] = serial = len(self.current.recycled)
            self.current.recycled[serial] = path
        return DraftResult(ids, log_probs, hidden)
