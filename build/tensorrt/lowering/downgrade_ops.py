"""A lowered graph as an older TensorRT takes it: operators that it lacks become older ones.

Each rewrite takes a node and gives the value that takes its output's place; what a rewrite appends
is in the order of its computation. Numbers stay what they were, but for the order of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from edgellm.build.tensorrt.lowering.op_support import check_graph, infer_types
from edgellm.build.tensorrt.lowering.op_table import CHECKED, Rule, Version, highest_opset, rules
from edgellm.core.errors import EdgeLLMError

ROWS = "rows"  # the symbol of those that a pass computes
Known = Mapping[str, Rule]
Types = dict[str, tuple[ir.DataType | None, ir.Shape | None]]


def adapt(model: ir.Model, version: Version, *, ahead_of_time: bool = False) -> None:
    """Rewrite a lowered graph in place, so that a TensorRT of `version` takes it.

    11.x needs no changes. 10.16 gets 4-D attention and older forms of Swish and of
    integer Clip; 10.13 and 10.3 also get normalization, rotary embeddings, cache updates and
    attention in primitives. Such an engine copies caches within, and hands out the new rows
    instead, [1, heads, rows, D] under the name of the updated cache; the runner appends them.

    Args:
        model: lowered, not saved yet; weights are not changed.
        version: major and minor of the TensorRT that will parse the graph.
        ahead_of_time: see `op_table.rules`.

    Raises:
        EdgeLLMError: the version supports no form of the graph, with a hint.
    """
    rewrite(model, version)
    if faults := check_graph(model, version, ahead_of_time=ahead_of_time):
        raise EdgeLLMError(
            f"TensorRT {version[0]}.{version[1]} does not take this graph: {faults[0]}",
            hint="install a newer TensorRT (on a Jetson a newer JetPack), or quantize otherwise: "
            "nvfp4 needs TensorRT 10.8, fp8 in blocks 10.13",
        )


def rewrite(model: ir.Model, version: Version) -> None:
    """Replace unsupported operators in place, if they have another form."""
    _rewrite(model, rules(version), _REWRITES)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    model.opset_imports[""] = min(model.opset_imports[""], highest_opset(version))


def uncap_attention(model: ir.Model) -> None:
    """Rewrite attention with a soft cap, which TensorRT does not support, as primitives."""
    if any(_softcap(node) for node in model.graph):
        _rewrite(model, rules(CHECKED[-1]), {"Attention": _attention})


def _rewrite(model: ir.Model, known: Known, forms: Mapping[str, Form]) -> None:
    types = _types(model)
    for node in list(model.graph):
        form = forms.get(node.op_type) if not node.domain else None
        new = form(_Editor(model.graph, node, types), node, known) if form else None
        if new is not None:
            types[str(new.name)] = types[str(node.outputs[0].name)]
            _replace(model.graph, node, new)


def _softcap(node: ir.Node) -> float:
    """The soft cap of scores; 0: none, or not attention."""
    return node.attributes.get_float("softcap", 0.0) if node.op_type == "Attention" else 0.0


def _types(model: ir.Model) -> Types:
    """Type and shape of every value, by name."""
    found = {}
    graph = infer_types(model).graph
    for value in (
        *graph.inputs,
        *graph.initializers.values(),
        *(o for n in graph for o in n.outputs),
    ):
        found[str(value.name)] = value.dtype, value.shape
    return found


class _Editor:
    """Inserts nodes before the node that they replace."""

    def __init__(self, graph: ir.Graph, node: ir.Node, types: Types) -> None:
        self._graph, self._node, self._types, self._count = graph, node, types, 0

    def dtype(self, value: ir.Value | None) -> ir.DataType:
        assert value is not None
        dtype = self._types[str(value.name)][0]
        assert dtype is not None
        return dtype

    def shape(self, value: ir.Value | None) -> ir.Shape:
        assert value is not None
        shape = self._types[str(value.name)][1]
        assert shape is not None
        return shape

    def rank(self, value: ir.Value | None) -> int:
        return self.shape(value).rank()

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The output of a new node."""
        return self.several(op_type, inputs, 1, **attributes)[0]

    def several(
        self, op_type: str, inputs: Sequence[ir.Value | None], count: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        node = ir.Node(
            "", op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=count
        )
        self._count += 1
        node.name = f"{self._node.name}.{op_type}_{self._count}"
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}"
        self._graph.insert_before(self._node, node)
        return node.outputs

    def constant(self, array: np.ndarray | np.generic | Sequence[int]) -> ir.Value:
        """A small initializer; equal ones are shared."""
        data = np.asarray(array)
        digest = "_".join(map(str, data.reshape(-1).tolist()))
        name = f"adapted.{data.dtype}.{'x'.join(map(str, data.shape))}.{digest}"
        if name not in self._graph.initializers:
            tensor = ir.tensor(data)
            self._graph.register_initializer(
                ir.Value(
                    name=name,
                    shape=ir.Shape(data.shape),
                    type=ir.TensorType(tensor.dtype),
                    const_value=tensor,
                )
            )
        return self._graph.initializers[name]

    def hand_out(self, output: ir.Value, instead: ir.Value | None) -> None:
        """Make the graph output [1, heads, rows, D] under the name of a cache output."""
        assert output.shape is not None
        places = [at for at, given in enumerate(self._graph.outputs) if given is output]
        for place in places:
            value = self("Identity", instead)
            value.name, output.name = output.name, f"{output.name}.updated"
            value.type = output.type
            value.shape = ir.Shape([*output.shape[:2], ROWS, output.shape[3]])
            self._types[str(output.name)] = self._types[str(value.name)]
            self._graph.outputs[place] = value

    def number(self, value: float, like: ir.Value | None) -> ir.Value:
        """A constant of another value's type."""
        return self.constant(np.array(value, self.dtype(like).numpy()))


def _replace(graph: ir.Graph, node: ir.Node, new: ir.Value) -> None:
    """Replace all uses of a node's output by `new`; a graph output keeps its name."""
    old = node.outputs[0]
    new.type, new.shape = old.type, old.shape
    for position, output in enumerate(graph.outputs):
        if output is old:
            old.name, new.name = f"{old.name}.replaced", old.name
            graph.outputs[position] = new
    for user, index in tuple(old.uses()):
        user.replace_input_with(index, new)
    graph.remove(node, safe=True)


def _swish(op: _Editor, node: ir.Node, known: Known) -> ir.Value | None:
    if "Swish" in known:
        return None
    assert "alpha" not in node.attributes
    return op("Mul", node.inputs[0], op("Sigmoid", node.inputs[0]))


def _clip(op: _Editor, node: ir.Node, known: Known) -> ir.Value | None:
    """Clip of integers, for versions with floats only."""
    value, least, maximum = node.inputs
    if op.dtype(value) in known["Clip"].dtypes:
        return None
    return op("Min", op("Max", value, least), maximum)


def _rms_norm(op: _Editor, node: ir.Node, known: Known) -> ir.Value | None:
    """In float32, as the operator computes it."""
    if "RMSNormalization" in known:
        return None
    x, weight = node.inputs
    kind = op.dtype(x)
    is_float = kind == ir.DataType.FLOAT
    wide = x if is_float else op("Cast", x, to=int(ir.DataType.FLOAT))
    epsilon = op.constant(np.float32(node.attributes.get_float("epsilon", 1e-5)))
    mean = op("ReduceMean", op("Mul", wide, wide), op.constant(np.array([-1])), keepdims=1)
    scaled = op("Div", wide, op("Sqrt", op("Add", mean, epsilon)))
    return op("Mul", scaled if is_float else op("Cast", scaled, to=int(kind)), weight)


def _rotary(op: _Editor, node: ir.Node, known: Known) -> ir.Value | None:
    """RoPE of x [B, S, heads*D], tables [positions or B, S, R/2]."""
    if "RotaryEmbedding" in known:
        return None
    x, cos, sin, *rest = node.inputs
    rotary_dim = node.attributes.get_int("rotary_embedding_dim", 0)
    heads = node.attributes["num_heads"].as_int()
    if rest and rest[0] is not None:
        cos, sin = (op("Gather", table, rest[0], axis=0) for table in (cos, sin))
    apart = op("Reshape", x, op.constant(np.array([0, 0, heads, -1])))
    if not rotary_dim:
        rotated = _apply_rope(op, node, apart, (cos, sin))
    else:
        axes, end = op.constant(np.array([3])), op.constant(np.array([rotary_dim]))
        far = op.constant(np.array([np.iinfo(np.int32).max]))
        head = op("Slice", apart, op.constant(np.array([0])), end, axes)
        rest_of_head = op("Slice", apart, end, far, axes)
        rotated = op("Concat", _apply_rope(op, node, head, (cos, sin)), rest_of_head, axis=3)
    return op("Reshape", rotated, op.constant(np.array([0, 0, -1])))


def _apply_rope(
    op: _Editor, node: ir.Node, x: ir.Value, tables: tuple[ir.Value | None, ...]
) -> ir.Value:
    """Apply RoPE to x [B, S, heads, R] by tables [B, S, R/2]; pairs are neighbours or halves."""
    is_interleaved = node.attributes.get_int("interleaved", 0)
    if is_interleaved:
        x = op("Reshape", x, op.constant(np.array([0, 0, 0, -1, 2])))
    axes = np.array([2, 4] if is_interleaved else [2])
    cos, sin = (op("Unsqueeze", table, op.constant(axes)) for table in tables)
    axis = 4 if is_interleaved else 3
    low, high = op.several("Split", [x], 2, axis=axis, num_outputs=2)
    rotated = op(
        "Concat",
        op("Sub", op("Mul", low, cos), op("Mul", high, sin)),
        op("Add", op("Mul", high, cos), op("Mul", low, sin)),
        axis=axis,
    )
    flat = op.constant(np.array([0, 0, 0, -1]))
    return op("Reshape", rotated, flat) if is_interleaved else rotated


def _scatter(op: _Editor, node: ir.Node, known: Known) -> ir.Value | None:
    """Rows [1, heads, S, D] after each other from `write_index` on in a cache.

    The graph outputs the rows, and the runtime appends them: a TensorRT without the operator cannot
    share a buffer of input and output.
    """
    if "TensorScatter" in known:
        return None
    cache, rows, write_index = node.inputs
    assert node.attributes.get_string("mode", "linear") == "linear"
    count = op("Squeeze", op("Shape", rows, start=2, end=3), op.constant(np.array([0])))
    op.hand_out(node.outputs[0], rows)
    one = op.constant(np.int64(1))
    steps = op("Range", op.constant(np.int64(0)), count, one)
    slots = op("Reshape", op("Add", write_index, steps), op.constant(np.array([1, 1, -1, 1])))
    return op("ScatterElements", cache, op("Expand", slots, op("Shape", rows)), rows, axis=2)


def _attention(op: _Editor, node: ir.Node, known: Known) -> ir.Value | None:
    """3-D attention in the 4-D form, or in primitives; q [B, S, heads*D]."""
    ranks = known["Attention"].ranks if "Attention" in known else frozenset()
    assert not node.attributes.get_int("is_causal", 0)
    is_capped = bool(_softcap(node))
    if op.rank(node.inputs[0]) in ranks and not is_capped:
        return None
    heads = node.attributes["q_num_heads"].as_int()
    kv_heads = node.attributes["kv_num_heads"].as_int()
    q, k, v, *rest = node.inputs
    mask = rest[0] if rest else None
    if ranks and not is_capped:
        y = _four_dimensional(op, node, [q, k, v], mask, (heads, kv_heads))
    else:
        y = _by_primitives(op, node, [q, k, v], mask, (heads, kv_heads))
    return op("Reshape", y, op.constant(np.array([0, 0, -1])))


def _four_dimensional(
    op: _Editor,
    node: ir.Node,
    inputs: Sequence[ir.Value | None],
    mask: ir.Value | None,
    heads: tuple[int, int],
) -> ir.Value:
    """[B, S, heads, D]; a mask of fewer dimensions gets the others in front."""
    counts = heads[0], heads[1], heads[1]
    parted = [
        op("Transpose", op("Reshape", x, op.constant(np.array([0, 0, n, -1]))), perm=[0, 2, 1, 3])
        for x, n in zip(inputs, counts, strict=True)
    ]
    if mask is not None and (missing := 4 - op.rank(mask)):
        mask = op("Unsqueeze", mask, op.constant(np.arange(missing)))
    given = {key: node.attributes[key] for key in ("scale",) if key in node.attributes}
    y = op("Attention", *parted, *([] if mask is None else [mask]), **given)
    return op("Transpose", y, perm=[0, 2, 1, 3])


def _by_primitives(
    op: _Editor,
    node: ir.Node,
    inputs: Sequence[ir.Value | None],
    mask: ir.Value | None,
    heads: tuple[int, int],
) -> ir.Value:
    """[B, S, kv_heads, group, D]; keys and values are broadcast to a group, not copied.

    Queries are scaled before the product, so that scores fit fp16; their softmax is float32.
    """
    (q, k, v), (count, kv_heads) = inputs, heads
    kind = op.dtype(q)
    grouped = op.constant(np.array([0, 0, kv_heads, count // kv_heads, -1]))
    queries = op("Transpose", op("Reshape", q, grouped), perm=[0, 2, 3, 1, 4])
    single = op.constant(np.array([0, 0, kv_heads, 1, -1]))
    keys = op("Transpose", op("Reshape", k, single), perm=[0, 2, 3, 4, 1])
    values = op("Transpose", op("Reshape", v, single), perm=[0, 2, 3, 1, 4])
    scale = node.attributes.get_float("scale", 0.0)
    if scale:
        factor = op.number(scale, q)
    else:
        size = op("Shape", queries, start=4, end=5)
        root = op("Sqrt", op("Cast", size, to=int(ir.DataType.FLOAT)))
        factor = op("Cast", op("Reciprocal", root), to=int(kind))
    scores = op("MatMul", op("Mul", queries, factor), keys)  # [B, kv_heads, group, S, C]
    if softcap := _softcap(node):
        bound = op.number(softcap, q)
        scores = op("Mul", op("Tanh", op("Div", scores, bound)), bound)
    if mask is not None:
        if op.rank(mask) == 4:
            mask = _grouped_mask(op, mask, heads)
        scores = op("Add", scores, mask)
    if kind != ir.DataType.FLOAT:
        scores = op("Cast", scores, to=int(ir.DataType.FLOAT))
    weights = op("Softmax", scores, axis=-1)
    if kind != ir.DataType.FLOAT:
        weights = op("Cast", weights, to=int(kind))
    return op("Transpose", op("MatMul", weights, values), perm=[0, 3, 1, 2, 4])


def _grouped_mask(op: _Editor, mask: ir.Value, heads: tuple[int, int]) -> ir.Value:
    """Return [B, heads, S, C] as [B, kv_heads, group, S, C]; [B, 1, S, C] as [B, 1, 1, S, C]."""
    group = op.constant(np.array([2]))
    if op.shape(mask)[1] == 1:
        return op("Unsqueeze", mask, group)
    count, kv_heads = heads  # with sinks, whose scores differ by head
    every = op("Expand", mask, op.constant(np.array([1, count, 1, 1])))
    shape = np.array([0, kv_heads, count // kv_heads, 0, -1])
    return op("Reshape", op("Unsqueeze", every, group), op.constant(shape))


Form = Callable[[_Editor, ir.Node, Known], ir.Value | None]
_REWRITES: dict[str, Form] = {
    "Swish": _swish,
    "Clip": _clip,
    "RMSNormalization": _rms_norm,
    "RotaryEmbedding": _rotary,
    "TensorScatter": _scatter,
    "Attention": _attention,
}
