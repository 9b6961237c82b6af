"""Attention as GroupQueryAttention, which updates the cache in place.

Without a bias ONNX Runtime uses XQA, cuDNN's or Flash attention, whose time depends on the used
length. With a bias, which trees need, it uses products with float32 scores. These read the keys of
a group once; opset 24's Attention with a mask copies them for each query head.

Source: contrib_ops/cuda/bert/group_query_attention.cc. A bias is supported since
microsoft/onnxruntime#29525, but not with sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.attention import CachedAttention, packed_rows
from edgellm.build.lowering.contrib_ops import CONTRIB, LOWEST, rotate
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.onnxruntime_cuda.plain_attention import stored_sinks
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import LAST_ROW, LIVE_ROWS

_HEAD_MULTIPLE = 8  # of head_dim


def why_not_fused(layers: Sequence[CachedAttention], dtype: ir.DataType) -> str:
    """Why ONNX Runtime has no fused kernel for these layers; "" if it has."""
    if dtype != ir.DataType.FLOAT16:
        return f"that computes float16, and this bundle's activations are {dtype.name.lower()}"
    if uneven := {layer.head_dim for layer in layers if layer.head_dim % _HEAD_MULTIPLE}:
        return f"head_dim {uneven.pop()} is no multiple of {_HEAD_MULTIPLE}"
    return ""


class FusedLayers:
    """Emits layers that share lengths and biases."""

    def __init__(
        self,
        *,
        graph: GraphEditor,
        dtype: ir.DataType,
        seen: Mapping[ir.Value, ir.Value],
        windows: Mapping[ir.Value, int | None],
        batch: int | str = 1,
    ) -> None:
        """Without `seen`, attention is causal, in windows if layers have one."""
        self._graph, self._dtype, self._batch = graph, dtype, batch
        self._seen, self._windows = seen, windows
        self._lengths: tuple[ir.Value, ir.Value] | None = None
        self._biases: dict[ir.Value, ir.Value] = {}

    def emit(self, layer: CachedAttention, tables: tuple[ir.Value, ...]) -> Sequence[ir.Value]:
        """Rows [B, S, num_heads * D] and the caches.

        Args:
            layer: at the graph's cursor.
            tables: positions, cos and sin; () without RoPE.
        """
        graph, window = self._graph, self._windows[layer.visible]
        turns_inside = bool(tables) and layer.positions is not None and layer.turns_inside
        q, k = layer.q, layer.k
        if tables and not turns_inside:
            flags = layer.interleaved, layer.rotary_embedding_dim
            q = rotate(graph, q, tables, layer.num_heads, *flags)
            k = rotate(graph, k, tables, layer.kv_num_heads, *flags)
        # Without a bias, positions equal slots, the only case that Flash decoding supports
        positions = tables[0] if turns_inside and self._seen else None
        bias, sinks = self._bias(layer.visible), None
        if layer.sinks is not None:
            sinks = stored_sinks(graph, layer, self._dtype, (layer.num_heads,))
        packed = packed_rows(q, k, layer.v)
        rows = (packed, None, None) if packed is not None else (q, k, layer.v)
        rotary_dim = tables[1:] if turns_inside else (None, None)
        pasts = layer.past_key, layer.past_value
        inputs = [*rows, *pasts, *self._of_lengths(), *rotary_dim, positions, bias, sinks]
        given = {"scale": layer.scale, "softcap": layer.softcap}
        given |= {"local_window_size": window if bias is None else None}
        given |= {"rotary_interleaved": layer.interleaved if turns_inside else None}
        heads = {"num_heads": layer.num_heads, "kv_num_heads": layer.kv_num_heads}
        return graph.nodes(
            "GroupQueryAttention",
            inputs,
            3,
            domain=CONTRIB,
            do_rotary=int(turns_inside),
            **heads,
            **{name: value for name, value in given.items() if value},
        )

    def _of_lengths(self) -> tuple[ir.Value, ir.Value]:
        if self._lengths is None:
            last = self._graph.input(LAST_ROW, ir.DataType.INT32, [self._batch])
            self._lengths = last, self._graph.input(LIVE_ROWS, ir.DataType.INT32, [])
        return self._lengths

    def _bias(self, visible: ir.Value) -> ir.Value | None:
        """[B, 1, S, T]; the lowest finite number, since -inf in a fully masked row gives NaN."""
        if not self._seen:
            return None
        graph, dtype = self._graph, self._dtype.numpy()
        if visible not in self._biases:
            shut, open_ = (
                graph.constant(name, np.array(number, dtype))
                for name, number in (("lowest", LOWEST[self._dtype]), ("open", 0))
            )
            self._biases[visible] = graph.node("Where", [self._seen[visible], open_, shut])
        return self._biases[visible]
