"""Linear layers by edgellm's kernels: packed weights, fused with biases, gates and norms."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import PARTS
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.groups import Rounding, lower_linears
from edgellm.build.lowering.linears.round_int4 import expert_block
from edgellm.build.lowering.linears.weights import LinearWeight, layer_name, linear_layers
from edgellm.build.lowering.lora import Marks
from edgellm.build.onnxruntime_cpu.edgellm_kernels.pack_weights import (
    form_of,
    keeps_codes,
    packed_bytes,
    storage,
)
from edgellm.build.onnxruntime_cpu.linears import ALL_INPUTS, DenseKernel
from edgellm.build.onnxruntime_cpu.lora import attach
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.kernels.packed_layout import STRIP, PackedForm, gated_order

_OPERATOR = "QuantLinear"
_GAMMA, _BIAS, _RESIDUAL, _INPUTS = 2, 4, 5, 6  # places of its inputs, and their number; after
# them stand those of adapters


class OwnLinears:
    """A RoundingKernel that emits QuantLinear; float32 weights stay with ONNX Runtime."""

    def __init__(self, *, rounds: str = "", one_term: tuple[str, ...] = ALL_INPUTS) -> None:
        """Args as follows.

        Args:
            rounds: floats to "int8" or "int4", FP8 to "int8", in blocks of 32.
            one_term: suffixes of names of layers whose inputs keep 8 bits; see `linears`.
        """
        self._rounds, self._one_term = rounds, one_term

    @property
    def rounds_floats(self) -> bool:
        """Whether float weights are quantized."""
        return self._rounds in ("int4", "int8")

    def emit(self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str) -> ir.Value:
        """See `LinearKernel`."""
        form = self.form(weight, name)
        if form is None:
            return DenseKernel().emit(graph, x, weight, name)
        return _product(graph, x, form, packed_weight(graph, form, name, weight))

    def emit_gated(
        self, graph: GraphEditor, x: ir.Value, weight: LinearWeight, name: str
    ) -> ir.Value:
        """Swish(gate) * up of a weight that is both, concatenated."""
        form, width = self.form(weight, name, is_gated=True), weight.widths[0]
        assert form is not None
        return _product(
            graph, x, form, packed_weight(graph, form, name, weight, gated_order(width))
        )

    def rounding(self, weight: LinearWeight, name: str) -> Rounding:
        """Inputs in the blocks of the packed weight; two terms of them are nearly exact."""
        kernel = self
        if name in PARTS:  # of experts, whose other width is the outputs'
            kernel = self.of_widths(weight.in_features, weight.widths[0])
        form = kernel.form(weight, name)
        if form is None or not form.takes_codes:
            return Rounding()
        block = form.block if form.input_terms == 1 else 0
        return Rounding(block, not keeps_codes(weight, kernel._rounds))

    def form(self, weight: LinearWeight, name: str, *, is_gated: bool = False) -> PackedForm | None:
        """Packed form of a layer's weight; None: not packed."""
        return form_of(
            weight,
            rounds=self._rounds,
            is_gated=is_gated,
            input_terms=1 if name.endswith(self._one_term) else 2,
        )

    def of_widths(self, hidden: int, width: int) -> OwnLinears:
        """The kernel for experts of these widths: int8 if blocks of INT4 do not divide both."""
        if self._rounds == "int4" and not (expert_block(hidden) and expert_block(width)):
            return OwnLinears(rounds="int8", one_term=self._one_term)
        return self

    def expert_form(self, weight: LinearWeight, name: str, *, is_gated: bool = False) -> PackedForm:
        """Packed form of an expert: always packed, so that only chosen experts are read."""
        form = form_of(
            weight,
            rounds=self._rounds,
            is_gated=is_gated,
            of_expert=True,
            input_terms=1 if name.endswith(self._one_term) else 2,
        )
        assert form is not None
        return form


def packed_weight(
    graph: GraphEditor,
    form: PackedForm,
    name: str,
    weight: LinearWeight,
    order: np.ndarray | None = None,
) -> ir.Value:
    """The weight in the engine's file, stored once by name; see `packed_bytes`."""
    return graph.streamed_weight(
        f"{name}.{form.kind}_packed", form.num_bytes, lambda: packed_bytes(form, weight, order)
    )


def _product(graph: GraphEditor, x: ir.Value, form: PackedForm, packed: ir.Value) -> ir.Value:
    return graph.node(
        _OPERATOR,
        [x, packed],
        domain=DOMAIN,
        K=form.in_features,
        N=form.out_features,
        block=form.block,
    )


def lower_own_linears(graph: GraphEditor, kernel: OwnLinears, marks: Marks | None = None) -> None:
    """Rewrite all linear layers, fused with biases, gates, residuals and norms.

    `marks`: of layers that adapters change.
    """
    for node in graph.find("Mul"):
        _lower_gate(graph, kernel, node)
    gates = graph.find(_OPERATOR)
    lower_linears(graph, kernel, key=_stored_alike)
    _drop_lowered(graph)
    if marks is not None:
        attach(graph, marks, graph.find(_OPERATOR, "MatMul"), gates)
    for node in graph.find(_OPERATOR):
        node.resize_inputs(max(_INPUTS, len(node.inputs)))
        if node in gates:
            continue
        _take_sum(graph, node, _BIAS, _is_bias)
        _take_sum(graph, node, _RESIDUAL, _is_residual)
    for node in graph.find("RMSNormalization"):
        _take_norm(node)


def _drop_lowered(graph: GraphEditor) -> None:
    """Remove replaced layers, which would still use their norms."""
    for node, _ in list(linear_layers(graph.graph)):
        biases = [use.node for use in node.outputs[0].uses()]
        graph.graph.remove([*biases, node], safe=True)


def _stored_alike(weight: LinearWeight) -> Hashable:
    part = weight.parts[0]
    return weight.key, part.stored[0].dtype, storage(part)


# ------------------------------------------------------------------------------------ gates
def _lower_gate(graph: GraphEditor, kernel: OwnLinears, mul: ir.Node) -> None:
    """Fuse `Mul(Swish(gate), up)` of two linear layers with the same input."""
    for value, other in (mul.inputs, mul.inputs[::-1]):
        swish, up = _only_producer(value), _only_producer(other)
        if swish is None or up is None or swish.op_type != "Swish" or swish.attributes:
            continue
        gate = _only_producer(swish.inputs[0])
        weight = None if gate is None else LinearWeight.of(gate, up)
        if gate is None or gate.inputs[0] is not up.inputs[0]:
            continue
        if weight is None or not _can_be_gated(kernel, weight):
            continue
        graph.cursor = gate
        assert gate.inputs[0] is not None
        name = f"{layer_name(gate)}+{layer_name(up)}"
        graph.replace(mul.outputs[0], kernel.emit_gated(graph, gate.inputs[0], weight, name))
        for node in (mul, swish, gate, up):
            graph.graph.remove(node, safe=True)
        return


def _can_be_gated(kernel: OwnLinears, weight: LinearWeight) -> bool:
    gate, up = (LinearWeight((part,)) for part in weight.parts)
    return (
        _stored_alike(gate) == _stored_alike(up)
        and gate.widths == up.widths
        and gate.widths[0] % STRIP == 0
        and kernel.form(weight, "") is not None
    )


def _only_producer(value: ir.Value | None) -> ir.Node | None:
    """The producer of a value with a single use within the graph."""
    if value is None or value.is_graph_output() or len(tuple(value.uses())) != 1:
        return None
    return value.producer()


# -------------------------------------------------------------------------- fused operations
def _take_sum(
    graph: GraphEditor, node: ir.Node, place: int, suits: Callable[[ir.Node, ir.Value], bool]
) -> None:
    """Fuse an addition into a product that has no other use."""
    y = node.outputs[0]
    uses = tuple(y.uses())
    if y.is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return
    add = uses[0].node
    other = add.inputs[1 - uses[0].idx]
    if other is None or other is y or not suits(node, other):
        return
    graph.graph.remove(node)
    graph.graph.insert_before(add, node)  # where the other operand is computed
    node.replace_input_with(place, other)
    graph.replace(add.outputs[0], y)
    graph.graph.remove(add, safe=True)


def _is_bias(node: ir.Node, other: ir.Value) -> bool:
    tensor, count = other.const_value, node.attributes["N"].as_int()
    return tensor is not None and tuple(tensor.shape.numpy()) == (count,)


def _is_residual(node: ir.Node, other: ir.Value) -> bool:
    """Whether the operand is computed; residuals are as wide as the product."""
    del node
    return other.const_value is None


def _take_norm(norm: ir.Node) -> None:
    """Fuse a norm into its products, if it has no other uses."""
    x, gamma = norm.inputs
    uses = tuple(norm.outputs[0].uses())
    is_last = "axis" not in norm.attributes or norm.attributes["axis"].as_int() == -1
    if not uses or not is_last or norm.outputs[0].is_graph_output():
        return
    if any(use.node.op_type != _OPERATOR or use.idx != 0 for use in uses):
        return
    epsilon = norm.attributes["epsilon"].as_float()
    for use in uses:
        use.node.replace_input_with(0, x)
        use.node.replace_input_with(_GAMMA, gamma)
        use.node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
