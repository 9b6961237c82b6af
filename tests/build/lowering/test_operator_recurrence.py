"""Linear attention in TensorRT-RTX's operators against the recurrence in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from delta_cases import HEADS, VALUES, DeltaCase

from edgellm.build.lowering.weights import WeightFile
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.core.onnx_functions import DECAYING_RULE, DELTA_RULE, FUNCTIONS
from edgellm.device_runtime.runners.tensorrt.library.trt_import import RTX_TAKES
from edgellm.device_runtime.runners.tensorrt.state_memory import CHUNK_ROWS

_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


def session(folder: Path, case: DeltaCase, *, takes: bool) -> onnxruntime.InferenceSession:
    """A session of the lowered graph of one call."""
    keys, whole = case.key_heads * case.keys, HEADS * VALUES
    shapes = {"q": keys, "k": keys, "v": whole, "g": HEADS, **({"b": HEADS} if takes else {})}
    inputs = [ir.val(name, _FLOAT, [1, "rows", width]) for name, width in shapes.items()]
    inputs += [
        ir.val("state", _FLOAT, [1, HEADS, case.keys, VALUES]),
        ir.val("tree_mask", _BOOL, ["rows", "rows"]),
        ir.val("parents", _INT64, ["rows"]),
    ]
    name, outputs = (DELTA_RULE, ["y", "d"]) if takes else (DECAYING_RULE, ["y"])
    node = ir.Node(FUNCTIONS, name, inputs, num_outputs=len(outputs), name="rule")
    for value, called in zip(node.outputs, outputs, strict=True):
        value.name, value.type = called, ir.TensorType(_FLOAT)
        value.shape = ir.Shape([1, "rows", whole])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24, FUNCTIONS: 1})
    model, weights = ir.Model(graph, ir_version=11), WeightFile(folder / "lowered.data")
    lower(model, weights, _FLOAT)
    weights.close()
    adapt(model, RTX_TAKES, ahead_of_time=True)
    ir.save(model, folder / "lowered.onnx")
    return onnxruntime.InferenceSession(folder / "lowered.onnx")


def ancestors(parents: list[int]) -> np.ndarray:
    """The mask of a tree."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


PARENTS = {
    "token": [-1],
    "tree": [-1, 0, 0, 1, 1, 3, 2, 5],
    "roots": [-1, -1, 0, -1, 2],
    "chunk": [row - 1 for row in range(CHUNK_ROWS)],
}


@pytest.mark.parametrize("takes", [True, False], ids=["delta", "decaying"])
@pytest.mark.parametrize("shape", PARENTS)
def test_outputs_equal_the_recurrence(tmp_path, shape, takes):
    case = DeltaCase("one", PARENTS[shape])
    if shape == "chunk":  # decays that keep old rows, and keys that are alike
        case.g, case.k = case.g / 1000, case.k + case.k[:1]
        case.k /= case.k.norm(dim=-1, keepdim=True)
    found = session(tmp_path, case, takes=takes)
    names = [each.name for each in found.get_inputs()]
    mask = ancestors(case.parents)
    given = case.feeds(*(name for name in names if name != "tree_mask")) | {"tree_mask": mask}
    for mine, expected in zip(
        found.run(None, given), case.expected(with_delta=takes), strict=False
    ):
        assert np.linalg.norm(mine - expected) < 2e-6 * np.linalg.norm(expected)
