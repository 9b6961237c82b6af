"""Graphs for batches of sequences with equal numbers of tokens."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.contrib_ops import CACHE_NAMES
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.plan import Plan
from edgellm.core import graph_io
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import ROW_NUMBERS
from edgellm.device_runtime.runners.onnxruntime_cuda.padded_batch import MAX_JOINED

BATCH = "batch"  # symbol of the number of sequences
_BY_SEQUENCE = (graph_io.INPUT_IDS, graph_io.DRAFT_HIDDEN)


def spare_rows(plan: Plan) -> int:
    """After the capacity of a sequence's cache, where sequences share passes: for padding."""
    return MAX_JOINED if plan.max_batch_size > 1 else 0


def lower_batches(graph: GraphEditor) -> ir.Value:
    """Add a batch axis to the inputs, and index the tokens of all sequences.

    `logits_index` counts the rows of all sequences, one after the other, so that each has as
    many wanted rows as it likes.

    Returns:
        The numbers of all rows, counted so, int64 [B, S].
    """
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        name = str(value.name)
        if name in (*_BY_SEQUENCE, graph_io.HIDDEN_TAPS) or name.startswith(CACHE_NAMES):
            assert value.shape is not None
            value.shape = ir.Shape([BATCH, *value.shape[1:]])
        elif name == graph_io.POSITION_IDS:
            assert value.shape is not None
            is_plain = value.shape[0] == 1
            value.shape = ir.Shape([BATCH, "rows"] if is_plain else [value.shape[0], "all_rows"])
    flat = graph.constant("all_rows", np.array([1, -1, 0], np.int64))
    for node in graph.find("Gather"):
        index = node.inputs[1]
        if index is not None and index.name == graph_io.LOGITS_INDEX:
            graph.cursor = node
            node.replace_input_with(0, graph.node("Reshape", [node.inputs[0], flat]))
    return graph.input(ROW_NUMBERS, ir.DataType.INT64, [BATCH, "rows"])
