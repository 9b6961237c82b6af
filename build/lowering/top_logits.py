"""Adds the logits of the argmax tokens to the outputs, with their ids."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.core import graph_io


def add_top_logits(graph: GraphEditor) -> None:
    """Add the top logits, a few bytes, from which the host detects NaN."""
    for node in graph.find("ArgMax"):
        graph.cursor = node
        axes = graph.constant("last_axis", np.array([-1], np.int64))
        top = graph.node("ReduceMax", [node.inputs[0], axes], keepdims=0)
        top.name, top.type = graph_io.TOP_LOGITS, ir.TensorType(ir.DataType.FLOAT)
        top.shape = node.outputs[0].shape
        graph.graph.outputs.append(top)
