"""Recurrent layers as plugin nodes with edgellm's kernels in TensorRT.

`convolve_rows` and `delta_rows` (`kernels/triton/recurrent.py`) read the states, and store what
later commits need, by a table of addresses (`graph_io.STATE_TABLE`). So a graph has neither states
nor their rows among its inputs and outputs, and the graph of commits is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.recurrent import store_taps
from edgellm.build.tensorrt.lowering.kernel_attention import emit_node, missing
from edgellm.core import graph_io
from edgellm.core.onnx_functions import (
    CHANNEL_DELTA_RULE,
    CONVOLUTION,
    DECAYING_RULE,
    DELTA_RULE,
    FUNCTIONS,
)
from edgellm.device_runtime.kernels.triton.catalog import (
    ADVANCE_STATE,
    ADVANCE_WINDOW,
    CONVOLVE_ROWS,
    STATE_STEP,
    Variant,
    delta_rows,
)
from edgellm.device_runtime.runners.tensorrt.library import recurrent_nodes
from edgellm.device_runtime.runners.tensorrt.state_memory import table_entries

_F16, _F32 = ir.DataType.FLOAT16, ir.DataType.FLOAT
_RULES = DELTA_RULE, DECAYING_RULE


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A convolution or linear attention, and its state."""

    call: ir.Node
    state: ir.Value

    @classmethod
    def all_of(cls, graph: ir.Graph) -> Iterator[Recurrence]:
        """In the graph's order."""
        for node in graph:
            is_rule = node.op_type in _RULES
            if node.domain == FUNCTIONS and (is_rule or node.op_type.startswith(CONVOLUTION)):
                state = node.inputs[-3] if is_rule else node.inputs[1]
                assert state is not None
                yield cls(node, state)

    @property
    def takes(self) -> bool:
        """Whether it has the delta term."""
        return self.call.op_type == DELTA_RULE

    @property
    def is_convolution(self) -> bool:
        """Whether it is no linear attention."""
        return self.call.op_type not in _RULES

    @property
    def dims(self) -> tuple[int, ...]:
        """Of the state: size - 1 and width, or heads, key_dim and value_dim."""
        assert self.state.shape is not None
        return self.state.shape.numpy()[1:]

    @property
    def key_heads(self) -> int:
        """Of linear attention."""
        keys = self.call.inputs[1]
        assert keys is not None
        assert keys.shape is not None
        width = keys.shape[2]
        assert isinstance(width, int)  # rows alone vary
        return width // self.dims[1]

    def fault(self) -> str:
        """Why its sizes are not supported; "" if they are."""
        if self.is_convolution:
            width = self.dims[1]
            is_odd = width % STATE_STEP
            return f"convolutions of a multiple of {STATE_STEP}, not of {width}" if is_odd else ""
        _, keys, values = self.dims
        if not (keys % STATE_STEP or values % STATE_STEP):
            return ""
        limit = f"keys and values of a multiple of {STATE_STEP}"
        return f"recurrent layers with {limit}, not of {keys} and {values}"

    def variants(self) -> tuple[Variant, ...]:
        """Kernels of passes and of commits."""
        if self.is_convolution:
            return CONVOLVE_ROWS, ADVANCE_WINDOW
        return delta_rows(takes=self.takes), ADVANCE_STATE


def why_not(graph: ir.Graph, sm: int, driver_ptx: int | None) -> str:
    """Why the kernels do not support the recurrent layers of a graph; see `kernel_attention`."""
    for layer in Recurrence.all_of(graph):
        if fault := layer.fault():
            return f"there are kernels for {fault}"
        if fault := missing(layer.variants(), sm, driver_ptx):
            return fault
    return ""


def why_no_commits(graph: ir.Graph, sm: int, driver_ptx: int | None) -> str:
    """As `why_not`, where TensorRT's operators compute passes and the kernels commit."""
    if find_calls(graph, CHANNEL_DELTA_RULE):
        return "there are no kernels for decays of each channel"
    for layer in Recurrence.all_of(graph):
        if fault := layer.fault():
            return f"there are kernels for {fault}"
        if fault := missing(layer.variants()[1:], sm, driver_ptx):
            return fault
    return ""


def lower_recurrences(graph: GraphEditor, sm: int) -> None:
    """Rewrite all recurrent layers of a graph that `why_not` accepts.

    Args:
        graph: before functions are inlined.
        sm: compute capability of the GPU.
    """
    layers = list(Recurrence.all_of(graph.graph))
    if not layers:
        return
    states = [str(each.name) for each in graph.graph.inputs if _is_state(each)]
    shape = [table_entries(len(states))]
    table = graph.input(graph_io.STATE_TABLE, ir.DataType.INT64, shape)
    rows = [each for each in graph.graph.outputs if str(each.name).startswith(graph_io.STATE_ROWS)]
    for value in rows:
        graph.graph.outputs.remove(value)
    for layer in layers:
        require_known(layer.call)
        graph.cursor = layer.call
        given = {"entry": states.index(str(layer.state.name)), "capability": sm}
        emit = _convolution if layer.is_convolution else _linear_attention
        graph.replace(layer.call.outputs[0], emit(graph, layer, table, given))
    for layer in layers:
        graph.graph.remove(layer.call, safe=True)
    for value in [each for each in graph.graph.inputs if _is_state(each)]:
        graph.graph.inputs.remove(value)


def _is_state(value: ir.Value) -> bool:
    return str(value.name).startswith(graph_io.STATE)


def _convolution(
    graph: GraphEditor, layer: Recurrence, table: ir.Value, given: dict[str, int]
) -> ir.Value:
    before, width = layer.dims
    x, _, _, parents = layer.call.inputs
    taps = store_taps(graph, layer.call, _F16)
    sizes = {"width": width, "size": before + 1}
    rows = [(_F16, [1, graph_io.ROWS, width])]
    name = recurrent_nodes.CONVOLVE_ROWS
    return emit_node(graph, name, [x, taps, parents, table], rows, **given, **sizes)[0]


def _linear_attention(
    graph: GraphEditor, layer: Recurrence, table: ir.Value, given: dict[str, int]
) -> ir.Value:
    heads, key_dim, value_dim = layer.dims
    *inputs, _, tree, _ = layer.call.inputs
    if not layer.takes:
        inputs.append(inputs[3])  # placeholder of the rates, not read
    sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "takes": int(layer.takes)}
    sizes["key_heads"] = layer.key_heads
    rows = [(_F32, [1, graph_io.ROWS, heads * value_dim])]
    name = recurrent_nodes.DELTA_ROWS
    return emit_node(graph, name, [*inputs, tree, table], rows, **given, **sizes)[0]
