"""What portable graphs do to the inputs of quantized linear layers, and the CPU need not.

The kernels here round activations themselves, with a scale for every row or block: finer than the
calibrated scale of a whole tensor that the graph asks for, so its rounding is left out.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import unused_removal

from edgellm.build.lowering.weights import constant_array, parameter_name

_SMOOTHING = ".pre_quant_scale"


def lower_inputs(model: ir.Model) -> None:
    """Rewrite `model` in place: no rounding of inputs, and equal smoothing only once."""
    for node in model.graph:
        if node.op_type == "MatMul" and node.inputs[0] is not None:
            node.replace_input_with(0, _before_rounding(node.inputs[0]))
    unused_removal.RemoveUnusedNodesPass()(model)
    model.functions.clear()
    _share_smoothing(model.graph)


def _before_rounding(x: ir.Value) -> ir.Value:
    """What a QuantizeLinear or FP4 pair (and a Cast) rounds; `x` where there is none."""
    node = x.producer()
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        behind = _before_rounding(node.inputs[0])
        return x if behind is node.inputs[0] else behind
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return x
    rounding = node.inputs[0].producer()
    if rounding is None or rounding.op_type not in ("QuantizeLinear", "TRT_FP4DynamicQuantize"):
        return x
    source = rounding.inputs[0]
    assert source is not None
    before = source.producer()
    if before is None or before.op_type != "Cast" or before.inputs[0] is None:
        return source
    return before.inputs[0]  # it casts activations to their own type


def _share_smoothing(graph: ir.Graph) -> None:
    """One Mul for layers that read one input with one smoothing, so that they can be merged."""
    first: dict[tuple[ir.Value, bytes], ir.Value] = {}
    for node in tuple(graph):
        factor = node.inputs[1] if node.op_type == "Mul" else None
        array = constant_array(factor) if factor is not None else None
        if factor is None or array is None or not parameter_name(factor).endswith(_SMOOTHING):
            continue
        assert node.inputs[0] is not None
        kept = first.setdefault((node.inputs[0], array.tobytes()), node.outputs[0])
        if kept is not node.outputs[0]:
            for user, index in tuple(node.outputs[0].uses()):
                user.replace_input_with(index, kept)
