"""Attention over a linear KV cache, with the masks and tables that all layers share.

Shapes: S query tokens, C cache capacity, D head_dim. One mask has both the committed tokens and the
tree of new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgellm.core.graph_io import (
    cross_name,
    past_name,
    present_name,
)
from edgellm.export.config.layer_types import AttentionKind
from edgellm.export.config.rope import Rope
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.images import ImageRows
from edgellm.export.layers.recurrent import Recurrences
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import (
    cached_attention,
    call,
    cross_attention,
    rotary_tables,
    sink_attention,
    unrotated_attention,
    visible_both_ways,
    visible_slots,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How attention scores become weights."""

    scale: float | None = None  # factor; None: 1 / sqrt(D)
    softcap: float | None = None  # caps them by tanh
    sinks: ir.Value | None = None  # [num_heads], in the softmax without a value; needs RoPE


PLAIN_SCORES = Scores()


@dataclass(slots=True, kw_only=True)
class PassState:
    """Inputs that all layers of a pass share, and the caches that they write."""

    op: Op
    heads_of: Callable[[int], tuple[int, int]]  # num_kv_heads, head_dim of a layer
    kinds: tuple[AttentionKind | None, ...]  # of each layer; None: not an attention layer
    position_ids: ir.Value  # int64 [1, S]; [3, S] for M-RoPE
    write_index: ir.Value  # int64 [1]
    tree_mask: ir.Value  # bool [S, M]
    past: dict[str, ir.Value]  # by contract name, [1, num_kv_heads, C, D]
    is_causal: bool = True  # False: all tokens of a pass attend to each other
    images: ImageRows | None = None
    cross: dict[str, ir.Value] = field(default_factory=dict)  # by contract name, [1, heads, A, D]
    # By layer, [1, S, num_heads*D]
    audio_queries: dict[int, ir.Value] = field(default_factory=dict)
    recurrences: Recurrences | None = None  # of recurrent layers
    visible: dict[tuple[int | None, bool], ir.Value] = field(default_factory=dict)  # bool [S, C]
    # By id of a rope, cos and sin [C, R / 2]; of M-RoPE [1, S, R / 2].
    tables: dict[int, tuple[ir.Value, ir.Value]] = field(default_factory=dict)
    shared: dict[str, ir.Value] = field(default_factory=dict)  # see `once`
    present: dict[str, ir.Value] = field(default_factory=dict)
    rows: dict[int, tuple[ir.Value, ir.Value]] = field(default_factory=dict)  # k, v by layer
    residuals: list[ir.Value] = field(default_factory=list)  # [1, S, H], inputs of the layers

    def prepare(self) -> None:
        """Append nodes that layers share: RoPE tables and masks."""
        op = self.op
        with op.scope("shared"):
            capacity = op.Shape(self.past[past_name(0, "key")], start=2, end=3)
            slots = op.Range(
                op.constant(np.int64(0)), op.Squeeze(capacity), op.constant(np.int64(1))
            )
            for kind in filter(None, self.kinds):
                rope = kind.rope
                if rope is not None and id(rope) not in self.tables:
                    self.tables[id(rope)] = self._rope_tables(rope, slots, capacity)
                if self._mask_of(kind) not in self.visible:
                    self.visible[self._mask_of(kind)] = self._visible(kind, slots)

    def _mask_of(self, kind: AttentionKind) -> tuple[int | None, bool]:
        """Key of a layer's mask: its window, and whether images are causal in this layer alone."""
        return kind.window, kind.causal_images and self.images is not None

    def _visible(self, kind: AttentionKind, slots: ir.Value) -> ir.Value:
        """The mask of layers of a kind, bool [S, C]."""
        (window, causal), tail = self._mask_of(kind), (self.position_ids, self.write_index, slots)
        windowed = window is not None
        if not self.is_causal:
            return call(self.op, visible_both_ways(windowed=windowed), *tail, window=window)
        function = visible_slots(windowed=windowed, causal=causal)
        return call(self.op, function, self.tree_mask, *tail, window=window)

    def once(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        """A value that an architecture computes once for all layers."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def embed(self, table: Embedding, token_ids: ir.Value) -> ir.Value:
        """token_ids int64 [1, S] -> [1, S, H]: embeddings of tokens and images."""
        if self.images is None:
            return table(self.op, token_ids)
        return self.images.embed(self.op, table, token_ids)

    def behind(self, layer: int, x: ir.Value) -> ir.Value:
        """The residual stream [1, S, H] after a layer."""
        return x if self.images is None else self.images.add_deepstack(self.op, x, layer)

    def attend(
        self,
        layer: int,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        num_heads: int,
        *,
        scores: Scores = PLAIN_SCORES,
        is_rotated: bool = False,
    ) -> ir.Value:
        """Apply RoPE, update the cache, attend; q [1, S, num_heads*D], k, v [1, S, kv_heads*D].

        `is_rotated`: queries and keys are outputs of `rotate`.
        """
        self.rows[layer] = k, v
        y, present = self._attend(layer, q, num_heads, scores, is_rotated=is_rotated)
        for part, value in zip(("key", "value"), present, strict=True):
            value.name = present_name(self._cache(layer), part)
            self.present[value.name] = value
        return y

    def attend_shared(
        self,
        layer: int,
        q: ir.Value,
        num_heads: int,
        *,
        scores: Scores = PLAIN_SCORES,
        is_rotated: bool = False,
    ) -> ir.Value:
        """Attend to the keys and values of the layer's source; q [1, S, num_heads*D].

        The call gets its source's operands: the same rows are written to the same places.
        """
        return self._attend(layer, q, num_heads, scores, is_rotated=is_rotated)[0]

    def _attend(
        self, layer: int, q: ir.Value, num_heads: int, scores: Scores, *, is_rotated: bool = False
    ) -> tuple[ir.Value, list[ir.Value]]:
        """The outputs of a call: attention's, and the caches."""
        kind, op = self._kind(layer), self.op
        source = layer if kind.source is None else kind.source
        cache, (k, v) = self._cache(source), self.rows[source]
        past = [self.past[past_name(cache, part)] for part in ("key", "value")]
        rope, seen = kind.rope, self.visible[self._mask_of(kind)]
        given = {
            "num_heads": num_heads,
            "kv_num_heads": self.heads_of(layer)[0],
            "scale": scores.scale,
            "softcap": scores.softcap,
        }
        if rope is None or is_rotated:
            function, rope_inputs = unrotated_attention(op.dtype), ()
        else:
            function, rope_inputs = cached_attention(op.dtype), self._rotation(rope)
            if scores.sinks is not None:
                function, rope_inputs = sink_attention(op.dtype), (*rope_inputs, scores.sinks)
            given |= self._rotation_flags(layer, rope)
        y, *present = call(
            op, function, q, k, v, *past, self.write_index, seen, *rope_inputs, **given
        )
        return y, present

    def attend_audio(self, layer: int, q: ir.Value, num_heads: int) -> ir.Value:
        """Attend to the window of audio; q [1, S, num_heads*D] -> the same shape."""
        self.audio_queries[layer] = q
        given = [self.cross[cross_name(layer, part)] for part in ("key", "value")]
        return call(self.op, cross_attention(), q, *given, num_heads=num_heads)

    def rotate(
        self,
        layer: int,
        x: ir.Value,
        num_heads: int,
        tables: tuple[ir.Value, ir.Value] | None = None,
    ) -> ir.Value:
        """Apply RoPE to x [1, S, num_heads*D], for layers with nodes between RoPE and `attend`.

        `tables`: by token, see `tables_at`; None: at the positions of the tokens.
        """
        rope = self._kind(layer).rope
        if rope is None:
            return x
        flags = {name: flag for name, flag in self._rotation_flags(layer, rope).items() if flag}
        given = tables or self._rotation(rope)
        return self.op.RotaryEmbedding(x, *given, num_heads=num_heads, **flags)

    def _kind(self, layer: int) -> AttentionKind:
        kind = self.kinds[layer]
        assert kind is not None
        return kind

    def _cache(self, layer: int) -> int:
        """Index of a layer's cache; layers without a cache of their own do not count."""
        return sum(kind is not None and kind.source is None for kind in self.kinds[:layer])

    def _rotation(self, rope: Rope) -> tuple[ir.Value | None, ...]:
        return *self.tables[id(rope)], None if rope.axes else self.position_ids

    def _rotation_flags(self, layer: int, rope: Rope) -> dict[str, int | None]:
        rotary_dim = 2 * len(rope.inv_freq)
        return {
            "interleaved": 1 if rope.interleaved else None,
            "rotary_embedding_dim": None if rotary_dim == self.heads_of(layer)[1] else rotary_dim,
        }

    def _rope_tables(
        self, rope: Rope, slots: ir.Value, capacity: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Cos and sin of all positions [C, R/2].

        With M-RoPE a pair uses one of three positions, so tables are by token.
        """
        op, inv_freq = self.op, self.op.constant(rope.inv_freq)
        if rope.long_inv_freq is not None:
            is_long = op.Greater(capacity, op.constant([rope.original]))
            inv_freq = op.Where(is_long, op.constant(rope.long_inv_freq), inv_freq)
        if not rope.axes:
            return call(op, rotary_tables(op.dtype), slots, inv_freq, scale=float(rope.scale))
        chosen = op.Gather(self.position_ids, op.constant(np.array(rope.axes)), axis=0)
        return self._tables_at(chosen, inv_freq, rope.scale)

    def tables_at(self, rope: Rope, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Cos and sin by token [1, S, R/2] at other positions than the tokens', int64 [1, S]."""
        return self._tables_at(positions, self.op.constant(rope.inv_freq), rope.scale)

    def _tables_at(
        self, positions: ir.Value, inv_freq: ir.Value, scale: float
    ) -> tuple[ir.Value, ir.Value]:
        """As `tables_at`; positions [1, S], or of each pair [R/2, S]."""
        op = self.op
        rows = op.Transpose(op.Cast(positions, to=int(ir.DataType.FLOAT)), perm=[1, 0])
        angles = op.Mul(op.Unsqueeze(rows, op.constant([0])), inv_freq)
        cos, sin = (self._rope_table(table, scale) for table in (op.Cos(angles), op.Sin(angles)))
        return cos, sin

    def _rope_table(self, table: ir.Value, scale: float) -> ir.Value:
        op = self.op
        scaled = op.Mul(table, op.constant(np.float32(scale))) if scale != 1 else table
        return op.cast(scaled, op.dtype) if op.dtype != ir.DataType.FLOAT else scaled


def split_heads(op: Op, x: ir.Value, head_dim: int) -> ir.Value:
    """[1, S, heads*D] -> [1, S, heads, D]."""
    return op.Reshape(x, op.constant([0, 0, -1, head_dim]))


def merge_heads(op: Op, x: ir.Value) -> ir.Value:
    """[1, S, heads, D] -> [1, S, heads*D]."""
    return op.Reshape(x, op.constant([0, 0, -1]))


def scale_heads(op: Op, x: ir.Value, factors: ir.Value, head_dim: int) -> ir.Value:
    """Multiply heads [1, S, heads*D] by one factor each [1, S, heads]."""
    apart = split_heads(op, x, head_dim)
    return merge_heads(op, op.Mul(apart, op.Unsqueeze(factors, op.constant([-1]))))
