"""Calls of recurrent layers that backends with own kernels replace."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array, parameter_name
from edgellm.core.errors import BrokenArtifactError


def store_taps(graph: GraphEditor, call: ir.Node, dtype: ir.DataType) -> ir.Value:
    """The weight [W, 1, K] of a convolution as [K, 1, W].

    Raises:
        BrokenArtifactError: it is computed.
    """
    value = call.inputs[2]
    stored = constant_array(value) if value is not None else None
    if value is None or stored is None:
        raise BrokenArtifactError(
            f"{call.name}: the convolution has no stored weight", hint="export the bundle again"
        )
    taps = np.ascontiguousarray(stored.astype(dtype.numpy()).transpose(2, 1, 0))
    return graph.weight(f"{parameter_name(value)}.taps", lambda: taps)
