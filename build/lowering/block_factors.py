"""Operands of a linear layer or an embedding: stored, or factors that are codes of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.calls import is_call, require_known
from edgellm.contract import BLOCK_FACTORS, BrokenArtifactError

Take = Callable[[ir.TensorProtocol], ir.TensorProtocol]


def _whole(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return tensor


def stored_tensor(value: ir.Value, call: ir.Node, take: Take = _whole) -> ir.TensorProtocol:
    """An operand of `call`; factors that are codes are decoded when they are read.

    `take`: what is wanted of what is stored.

    Raises:
        BrokenArtifactError: it is computed.
    """
    if value.const_value is not None:
        return take(value.const_value)
    factors = value.producer()
    if factors is None or not is_call(factors, BLOCK_FACTORS):
        raise BrokenArtifactError(
            f"{call.name}: {value.name} is not a stored weight", hint="export the bundle again"
        )
    require_known(factors, "block_size")
    codes, scales = (
        stored_tensor(each, call, take) for each in factors.inputs if each is not None
    )  # fmt: skip
    shared = factors.attributes["block_size"].as_int()

    def decoded() -> ir.TensorProtocol:
        repeated = np.repeat(scales.numpy().astype(np.float32), shared, -1)
        return ir.tensor(codes.numpy().astype(np.float32) * repeated)

    return ir.LazyTensor(
        decoded, ir.DataType.FLOAT, ir.Shape(tuple(codes.shape.numpy())), name=str(value.name)
    )
