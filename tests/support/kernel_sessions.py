"""Sessions of ONNX Runtime with one operator of edgellm's."""

from __future__ import annotations

import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from edgellm.build.lowering.contrib_ops import LOWERED_OPSET
from edgellm.device_runtime.kernels.library import DOMAIN, register

F32, I64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def open_session(node, inputs, outputs, initializers=(), threads=2, path=None):
    graph = helper.make_graph(
        [node],
        "kernels",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
        [numpy_helper.from_array(a, n) for n, a in initializers],
    )
    opsets = [helper.make_opsetid("", LOWERED_OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    register(options)
    source = model.SerializeToString()
    if path is not None:
        onnx.save(
            model, path, save_as_external_data=True, location=f"{path.stem}.data", size_threshold=0
        )
        source = str(path)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
