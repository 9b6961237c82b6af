"""Calls of cached attention, one for each layer; see `edgellm.export.onnx.functions`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.core import onnx_functions
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)

_OPERANDS = (
    "q", "k", "v", "past_key", "past_value", "write_index", "visible", "cos", "sin", "positions",
    "sinks",
)  # fmt: skip
_OPTIONAL = ("positions", "sinks")
_ROTATION = ("cos", "sin", *_OPTIONAL)
_FLAGS = ("interleaved", "rotary_embedding_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention:
    """Operands and attributes of one layer."""

    call: ir.Node
    q: ir.Value  # [1, S, num_heads * D]
    k: ir.Value  # [1, S, kv_num_heads * D]
    v: ir.Value
    past_key: ir.Value  # [1, kv_num_heads, C, D]
    past_value: ir.Value
    write_index: ir.Value  # int64 [1]
    visible: ir.Value  # bool [S, C]
    cos: ir.Value | None  # by position [C, R / 2], or by token [1, S, R / 2]
    sin: ir.Value | None  # None: no RoPE
    positions: ir.Value | None  # int64 [1, S]; None if the tables are by token
    sinks: ir.Value | None  # [num_heads], scores in the softmax without a value
    num_heads: int
    kv_num_heads: int
    scale: float | None  # of the scores; None: 1 / sqrt(D)
    softcap: float | None  # what bounds them; None: nothing
    cache: int = 0  # index of the layer's cache
    is_shared: bool = False  # an earlier layer writes the same rows to the cache
    interleaved: int = 0  # 1: a number turns with its neighbour, 0: with the one R / 2 after
    rotary_embedding_dim: int = 0  # R; 0: all of D

    @classmethod
    def all_of(cls, graph: ir.Graph, *, takes_sinks: bool = False) -> list[CachedAttention]:
        """Attention calls of a portable graph, in order.

        Raises:
            UnsupportedModelError: a call has an unknown attribute, or sinks that the backend does
                not support.
        """
        calls = find_calls(
            graph,
            onnx_functions.ATTENTION,
            onnx_functions.UNROTATED_ATTENTION,
            onnx_functions.SINK_ATTENTION,
        )
        layers, caches = [], dict[ir.Value, int]()
        for layer in map(cls._of, calls):
            is_shared = layer.past_key in caches
            cache = caches.setdefault(layer.past_key, len(caches))
            layers.append(replace(layer, cache=cache, is_shared=is_shared))
        if not takes_sinks and any(layer.sinks is not None for layer in layers):
            raise UnsupportedModelError(
                "this backend does not compute attention with sinks",
                hint="build for ONNX Runtime on the CPU, with edgellm's kernels",
            )
        return layers

    @classmethod
    def _of(cls, call: ir.Node) -> CachedAttention:
        rotates = call.op_type != onnx_functions.UNROTATED_ATTENTION
        flags = _FLAGS if rotates else ()
        require_known(call, "num_heads", "kv_num_heads", "scale", "softcap", *flags)
        operands = [*call.inputs, *[None] * len(_OPERANDS)][: len(_OPERANDS)]
        given = dict(zip(_OPERANDS, operands, strict=True))
        optional = _OPTIONAL if rotates else _ROTATION
        if missing := [name for name, value in given.items() if not (value or name in optional)]:
            raise BrokenArtifactError(
                f"{call.name}: {call.op_type} without {', '.join(missing)}",
                hint="export the bundle again",
            )
        heads = {name: call.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")}
        flagged = {
            name: call.attributes[name].as_int() for name in flags if name in call.attributes
        }
        factors = {
            name: call.attributes[name].as_float() if name in call.attributes else None
            for name in ("scale", "softcap")
        }
        return cls(call=call, **given, **heads, **factors, **flagged)  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        """D, which is never symbolic."""
        assert self.past_key.shape is not None
        return int(self.past_key.shape[3])  # type: ignore[arg-type]

    @property
    def turns_inside(self) -> bool:
        """Whether GroupQueryAttention can apply RoPE for these sizes of heads and tables."""
        pairs = (self.rotary_embedding_dim or self.head_dim) // 2
        return self.head_dim % 16 == 0 and pairs % 8 == 0

    @property
    def outputs(self) -> tuple[ir.Value, ...]:
        """Y [1, S, num_heads * D], then the caches with the new tokens."""
        return tuple(self.call.outputs)


def packed_rows(*qkv: ir.Value | None) -> ir.Value | None:
    """The merged projection that q, k and v are direct splits of, else None."""
    nodes = {value.producer() if value is not None else None for value in qkv}
    node = nodes.pop()
    if nodes or node is None or node.op_type != "Split" or tuple(node.outputs) != qkv:
        return None
    return node.inputs[0]
