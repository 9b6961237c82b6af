"""Embeddings and heads as plugin nodes with edgellm's kernels in TensorRT.

`look_up_rows` and `head_rows` (`kernels/triton/vocabulary.py`) read a matrix by its address
(`addressed_weights.py`), so neither is a constant of a plan. A head that is tied to an embedding
reads the same matrix. What follows (scales, biases, soft caps) are TensorRT's operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.build.lowering.embeddings import BlockTable
from edgellm.build.lowering.function_calls import is_call
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart, linear_layers
from edgellm.build.lowering.weights import parameter_name
from edgellm.build.tensorrt.lowering.addressed_weights import AddressedWeights, Matrix, StoredForm
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels, emit_node
from edgellm.core import graph_io
from edgellm.core.onnx_functions import BLOCK_LINEAR, LINEAR, OFFSET_LINEAR, ROUND_INPUT_FP4
from edgellm.device_runtime.runners.tensorrt.library.vocabulary_nodes import (
    HEAD_ROWS,
    LOOK_UP_ROWS,
)

MAX_HEAD_ROWS = 128  # tokens with logits in a pass; of more TensorRT's products are faster
_HEAD = "head."  # scope of nodes after the tokens that get logits are chosen
_ELEMENTWISE = ("Where", "Max", "Min", "Clip", "Sub", "Add", "Cast", "Identity")
_F16, _F32 = ir.DataType.FLOAT16, ir.DataType.FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """An embedding's lookup by a pass's tokens, or a head's product.

    Attributes:
        node: of a portable graph.
        read: token ids, or the head's input.
        part: the table [H, V], or the weight; V outputs.
        is_head: whether it is a head.
    """

    node: ir.Node
    read: ir.Value
    part: WeightPart
    is_head: bool

    @classmethod
    def all_of(cls, graph: ir.Graph) -> list[Vocabulary]:
        """Embeddings and heads of a portable graph."""
        lookups = (_lookup(node) for node in graph)
        found = [each for each in lookups if each is not None and _is_by_token(each.read)]
        for node, weight in linear_layers(graph):
            read = node.inputs[0]
            if str(node.name).startswith(_HEAD) and read is not None:
                found.append(cls(node=node, read=read, part=weight.parts[0], is_head=True))
        return found

    @property
    def form(self) -> StoredForm:
        """The stored form of its weights."""
        return StoredForm.of(self.part)

    def fault(self, kernels: Kernels) -> str:
        """Why there is no kernel for it; "" if there is."""
        if fault := self.form.fault("embeddings and heads", self.part.shape[:1], kernels.sm):
            return f"there are kernels for {fault}"
        if self.is_head and is_call(self.read.producer(), ROUND_INPUT_FP4):
            return "TensorRT multiplies inputs of FP4"
        if self.is_head and kernels.head_rows > MAX_HEAD_ROWS:
            return f"a pass computes logits of {kernels.head_rows} tokens, over {MAX_HEAD_ROWS}"
        return ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights by address."""
        return self.form.num_bytes(math.prod(self.part.shape))


def by_address(graph: ir.Graph, kernels: Kernels | None) -> list[Vocabulary]:
    """Embeddings and heads of a portable graph that kernels compute; none without kernels."""
    if kernels is None:
        return []
    return [each for each, fault in _faults(graph, kernels) if not fault]


def why_not(graph: ir.Graph, kernels: Kernels) -> Mapping[str, str]:
    """Why embeddings and heads stay constants of a plan, by the names of their weights."""
    return {each.part.parameter: fault for each, fault in _faults(graph, kernels) if fault}


def constant_linears(
    graph: ir.Graph, own: Sequence[Vocabulary]
) -> Iterator[tuple[ir.Node, LinearWeight]]:
    """Linear layers of a portable graph whose weights are constants of the plan: all but `own`."""
    nodes = {each.node for each in own}
    return ((node, weight) for node, weight in linear_layers(graph) if node not in nodes)


def _faults(graph: ir.Graph, kernels: Kernels) -> Iterator[tuple[Vocabulary, str]]:
    """Each with its fault. A tied head and its embedding have the same, else both are stored."""
    found = Vocabulary.all_of(graph)
    faults: dict[str, str] = {}
    for each in found:
        name = each.part.parameter
        faults[name] = faults.get(name, "") or each.fault(kernels)
    return ((each, faults[each.part.parameter]) for each in found)


def _lookup(node: ir.Node) -> Vocabulary | None:
    """The lookup of rows in a table; None for other nodes."""
    if (blocks := BlockTable.of(node)) is not None:
        part = WeightPart.of_outputs(
            (blocks.codes, *blocks.factors),
            parameter=parameter_name(blocks.value),
            operation=OFFSET_LINEAR if len(blocks.factors) > 1 else BLOCK_LINEAR,
            block_size=blocks.block_size,
        )
        return Vocabulary(node=node, read=blocks.ids, part=part, is_head=False)
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0):
        return None
    table, ids = node.inputs
    stored = table.const_value if table is not None else None
    if table is None or ids is None or stored is None or len(stored.shape) != 2:
        return None
    if not stored.dtype.is_floating_point():
        return None
    part = WeightPart.of_outputs((stored,), parameter=parameter_name(table), operation=LINEAR)
    return Vocabulary(node=node, read=ids, part=part, is_head=False)


def _is_by_token(ids: ir.Value | None) -> bool:
    """Whether values are by token of a pass, and made of its ids."""
    if ids is None or ids.name == graph_io.INPUT_IDS:
        return ids is not None
    node = ids.producer()
    return node is not None and node.op_type in _ELEMENTWISE and any(map(_is_by_token, node.inputs))


def lower_vocabulary(graph: GraphEditor, kernels: Kernels, weights: AddressedWeights) -> None:
    """Rewrite embeddings and heads that have kernels; see `Vocabulary.fault`.

    Args:
        graph: before functions are inlined.
        kernels: for them.
        weights: receives their weights.
    """
    for each in by_address(graph.graph, kernels):
        key = each.part.parameter, each.form
        matrix = weights.add_once(key, Matrix(parts=each.part.slices))
        hidden, vocab = each.part.shape
        given = {"matrix": matrix, "vocab": vocab, "hidden": hidden, "codes": each.form.codes}
        given |= {"block": each.form.block, "capability": kernels.sm}
        graph.cursor = each.node
        name, dtype, shape = LOOK_UP_ROWS, _F16, [1, graph_io.ROWS, hidden]
        if each.is_head:
            name, dtype, shape = HEAD_ROWS, _F32, [1, graph_io.HEAD_ROWS, vocab]
        (y,) = emit_node(graph, name, [each.read, weights.table], [(dtype, shape)], **given)
        _replace_cast(graph, each.node.outputs[0], y, dtype)
        if each.is_head:
            y = graph.node("Cast", [y], to=int(_F16))
        graph.replace(each.node.outputs[0], y)
        graph.graph.remove(each.node, safe=True)


def _replace_cast(graph: GraphEditor, old: ir.Value, new: ir.Value, dtype: ir.DataType) -> None:
    """Use `new` for casts of `old` to its type, which would round it."""
    for user, _ in tuple(old.uses()):
        if user.op_type == "Cast" and user.attributes["to"].as_int() == int(dtype):
            graph.replace(user.outputs[0], new)
