"""Attention over a linear KV cache, and what all layers of one pass share.

Shapes: S query rows, C cache capacity, D head_dim. The cache is written by TensorScatter-24 at
`write_index`; one additive mask holds both the committed rows and the tree among the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgellm.contract import past_name, present_name
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.images import ImageRows
from edgellm.export.op import Op
from edgellm.export.rope import Rope

_MASKED = {ir.DataType.FLOAT: -1e30, ir.DataType.FLOAT16: -3e4}


@dataclass(slots=True)
class PassState:
    """Inputs that every layer of one pass sees, and the caches that they write."""

    op: Op
    head_dim: int
    num_kv_heads: int
    position_ids: ir.Value  # int64 [1, S]; [3, S] for M-RoPE
    write_index: ir.Value  # int64 [1]
    past: dict[str, ir.Value]  # by contract name, [1, num_kv_heads, C, D]
    images: ImageRows | None = None
    mask: ir.Value = field(init=False)  # [S, C], additive
    cos: ir.Value = field(init=False)  # [C, D / 2]; of M-RoPE [1, S, D / 2]
    sin: ir.Value = field(init=False)
    rotates_rows: bool = field(init=False)  # the tables are of the pass's own rows
    present: dict[str, ir.Value] = field(default_factory=dict)
    residuals: list[ir.Value] = field(default_factory=list)  # [1, S, H], entering each layer

    def prepare(self, rope: Rope, tree_mask: ir.Value, sliding_window: int | None) -> None:
        """Append the nodes that are shared by all layers: rope tables and the mask."""
        op = self.op
        with op.scope("shared"):
            capacity = op.Shape(self.past[past_name(0, "key")], start=2, end=3)
            slots = op.Range(
                op.constant(np.int64(0)), op.Squeeze(capacity), op.constant(np.int64(1))
            )
            self.cos, self.sin = self._rope_tables(rope, slots)
            self.rotates_rows = bool(rope.axes)
            self.mask = self._mask(slots, tree_mask, sliding_window)

    def embed(self, table: Embedding, token_ids: ir.Value) -> ir.Value:
        """token_ids int64 [1, S] -> [1, S, H]: rows of the table, and of images if there are."""
        if self.images is None:
            return table(self.op, token_ids)
        return self.images.embed(self.op, table, token_ids)

    def behind(self, layer: int, x: ir.Value) -> ir.Value:
        """The residual stream [1, S, H] that the next layer sees."""
        return x if self.images is None else self.images.add_deepstack(self.op, x, layer)

    def attend(self, layer: int, q: ir.Value, k: ir.Value, v: ir.Value, num_heads: int) -> ir.Value:
        """Rotate, write the cache, attend; q [1, S, num_heads*D], k and v [1, S, kv_heads*D]."""
        op = self.op
        q = self._rotate(q, num_heads)
        k = self._rotate(k, self.num_kv_heads)
        keys = self._store(layer, "key", k)
        values = self._store(layer, "value", v)
        # The 3-D form, because with the 4-D one TensorRT writes K and V once per query head.
        return op.Attention(
            q, keys, values, self.mask, q_num_heads=num_heads, kv_num_heads=self.num_kv_heads
        )  # fmt: skip

    def _mask(self, slots: ir.Value, tree_mask: ir.Value, sliding_window: int | None) -> ir.Value:
        """Additive [S, C]: committed slots are open, new ones follow the tree, the rest is shut.

        A tree mask wider than the pass, [S, M], also rules the M - S slots before the new rows.
        """
        op = self.op
        zero, one = op.constant(np.int64(0)), op.constant(np.int64(1))
        rows = op.Squeeze(op.Shape(self.position_ids, start=1, end=2))
        columns = op.Squeeze(op.Shape(tree_mask, start=1, end=2))
        first = op.Sub(op.Add(self.write_index, rows), columns)
        column = op.Sub(slots, first)  # [C]; negative for committed slots
        committed = op.Unsqueeze(op.Less(column, zero), op.constant([0]))
        clipped = op.Clip(column, zero, op.Sub(columns, one))
        in_tree = op.Gather(tree_mask, clipped, axis=1)  # [S, C]
        is_new = op.And(op.GreaterOrEqual(column, zero), op.Less(column, columns))
        visible = op.Or(committed, op.And(is_new, in_tree))
        if sliding_window is not None:
            # Committed rows stand at their own position, tree nodes at that of their depth.
            own = op.Gather(op.Squeeze(self.position_ids, op.constant([0])), clipped)
            positions = op.Where(op.Less(column, zero), slots, own)  # [C]
            oldest = op.Sub(self.position_ids, op.constant(np.int64(sliding_window)))
            within = op.Greater(positions, op.Transpose(oldest, perm=[1, 0]))  # [S, C]
            visible = op.And(visible, within)
        shut = op.constant(_MASKED[op.dtype], op.dtype)
        return op.Where(visible, op.constant(0, op.dtype), shut)

    def _rope_tables(self, rope: Rope, slots: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Cos and sin of all positions [C, D/2], constants as soon as the capacity is bound.

        With M-RoPE a pair's angle follows one of three positions: tables of the rows themselves.
        """
        op = self.op
        if rope.axes:
            chosen = op.Gather(self.position_ids, op.constant(np.array(rope.axes)), axis=0)
            rows = op.Transpose(op.Cast(chosen, to=int(ir.DataType.FLOAT)), perm=[1, 0])
            angles = op.Mul(op.Unsqueeze(rows, op.constant([0])), op.constant(rope.inv_freq))
        else:
            positions = op.Unsqueeze(op.Cast(slots, to=int(ir.DataType.FLOAT)), op.constant([1]))
            angles = op.Mul(positions, op.constant(rope.inv_freq[None, :]))
        cos, sin = (
            self._rope_table(table, rope.scale) for table in (op.Cos(angles), op.Sin(angles))
        )
        return cos, sin

    def _rope_table(self, table: ir.Value, scale: float) -> ir.Value:
        op = self.op
        scaled = op.Mul(table, op.constant(np.float32(scale))) if scale != 1 else table
        return scaled if op.dtype == ir.DataType.FLOAT else op.Cast(scaled, to=int(op.dtype))

    def _rotate(self, x: ir.Value, num_heads: int) -> ir.Value:
        positions = None if self.rotates_rows else self.position_ids
        return self.op.RotaryEmbedding(x, self.cos, self.sin, positions, num_heads=num_heads)

    def _store(self, layer: int, part: str, x: ir.Value) -> ir.Value:
        """Write x [1, S, kv_heads*D] into the cache; returns the cache as [1, C, kv_heads*D]."""
        op = self.op
        split = op.constant([0, 0, self.num_kv_heads, self.head_dim])
        rows = op.Transpose(op.Reshape(x, split), perm=[0, 2, 1, 3])  # [1, num_kv_heads, S, D]
        name = present_name(layer, part)
        cache = op.TensorScatter(
            self.past[past_name(layer, part)], rows, self.write_index, axis=-2, name=name
        )
        self.present[name] = cache
        return op.Reshape(op.Transpose(cache, perm=[0, 2, 1, 3]), op.constant([0, 0, -1]))


def split_heads(op: Op, x: ir.Value, head_dim: int) -> ir.Value:
    """[1, S, heads*D] -> [1, S, heads, D]."""
    return op.Reshape(x, op.constant([0, 0, -1, head_dim]))


def merge_heads(op: Op, x: ir.Value) -> ir.Value:
    """[1, S, heads, D] -> [1, S, heads*D]."""
    return op.Reshape(x, op.constant([0, 0, -1]))
