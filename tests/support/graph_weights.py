"""Weights of a bundle as its graph computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx.reference import ReferenceEvaluator


def graph_weights(bundle: Path) -> dict[str, np.ndarray]:
    """Weights [out, in] of all layers as the graph's functions compute them, with smoothing."""
    model = onnx.load(bundle / "model.onnx")
    producers = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    past = next(each for each in model.graph.input if each.name.startswith("past"))
    activations = onnx.helper.tensor_dtype_to_np_dtype(past.type.tensor_type.elem_type)
    found = {}
    for node in model.graph.node:
        if not node.op_type.endswith("Linear") or "_proj" not in node.name:
            continue
        alone = onnx.NodeProto.FromString(node.SerializeToString())
        alone.input[0] = "x"
        part = onnx.helper.make_graph(
            [alone],
            "layer",
            [onnx.helper.make_empty_tensor_value_info("x")],
            [onnx.helper.make_empty_tensor_value_info(node.output[0])],
            [constants[name] for name in node.input[1:]],
        )
        part = onnx.helper.make_model(
            part, opset_imports=model.opset_import, functions=model.functions
        )
        by_input = node.op_type in ("QuantizedLinear", "ShiftedLinear")
        in_features = constants[node.input[1]].dims[0 if by_input else 1]
        one_hot = np.eye(in_features, dtype=activations)
        alone = onnx.inliner.inline_local_functions(part)
        (array,) = ReferenceEvaluator(alone).run(None, {"x": one_hot})
        layer = "model." + node.name.split("model.", 1)[1].removesuffix(node.op_type)
        smoothing = constants.get(f"{layer}pre_quant_scale")
        if smoothing is not None:
            array = array * onnx.numpy_helper.to_array(smoothing)[:, None]
        gather = producers.get(node.input[0])
        order = slice(None)  # of activation-ordered checkpoints: the graph gathers the inputs
        if gather is not None and gather.op_type == "Gather":
            order = onnx.numpy_helper.to_array(constants[gather.input[1]])
        weight = np.empty_like(array.T)
        weight[:, order] = array.T
        found[f"{layer}weight"] = weight
    return found
