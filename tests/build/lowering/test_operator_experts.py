"""Experts in TensorRT-RTX's operators against the bodies of their ONNX functions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from expert_cases import CASES, HIDDEN, K, expert_call, inputs

from edgellm.build.lowering.weights import WeightFile
from edgellm.build.tensorrt.builder import build
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.profiles import Pass
from edgellm.build.tensorrt.target import find_target
from edgellm.device_runtime.runners.tensorrt.library.trt_import import RTX_TAKES


def lowered(model: ir.Model, folder, dtype: ir.DataType) -> onnxruntime.InferenceSession:
    """A session of the graph that the parser gets."""
    weights = WeightFile(folder / "lowered.data")
    lower(model, weights, dtype)
    weights.close()
    adapt(model, RTX_TAKES, ahead_of_time=True)
    ir.save(model, folder / "lowered.onnx")
    return onnxruntime.InferenceSession(folder / "lowered.onnx")


@pytest.mark.nightly
@pytest.mark.parametrize("sm", [89, 120])
@pytest.mark.parametrize("case", CASES)
def test_tensorrt_rtx_compiles_each_form(case, sm, tmp_path):
    """A pass of one token writes no decoded weights."""
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    model = expert_call(case)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name != "ids":
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    lowered(model, tmp_path, ir.DataType.FLOAT16)
    passes = [Pass(name, rows, {"rows": (1, rows)}) for name, rows in (("one", 1), ("all", 64))]
    target, options = find_target(str(sm)), TensorRtOptions(target_sm=str(sm))
    engine = tmp_path / "engine"
    built = build(tmp_path / "lowered.onnx", passes, engine, target, options, lambda _: None)
    of_one = [kernel for kernel in built.kernels if kernel.pass_index == 0]
    largest = max(each.count for kernel in of_one for each in kernel.outputs)
    assert 0 < largest < K * HIDDEN * 2


@pytest.mark.each_change("fp16", "int4", "mxfp4")
@pytest.mark.parametrize("case", CASES)
def test_experts_equal_the_body_of_their_function(case, tmp_path):
    """In a pass of one token, which gathers its experts, and in passes of several tokens.

    Bodies round weights to float16 where scales are float16.
    """
    model = expert_call(case)
    ir.save(model, tmp_path / "body.onnx")
    body = onnxruntime.InferenceSession(tmp_path / "body.onnx")
    session = lowered(model, tmp_path, ir.DataType.FLOAT)
    for rows in (1, 7):
        x, ids, shares = inputs(rows)
        given = {"x": x.astype(np.float32), "ids": ids, "shares": shares.astype(np.float32)}
        expected = body.run(["y"], given)[0]
        found = session.run(["y"], given)[0]
        assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)
