"""Experts on GPUs: packed weights and kernels against the bodies of ONNX functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from expert_cases import CASES, K, expert_call, inputs
from interpreted import by_reference, launch

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.tensorrt.lowering.addressed_weights import AddressedWeights
from edgellm.build.tensorrt.lowering.kernel_experts import lower_experts
from edgellm.core.graph_io import WEIGHT_TABLE
from edgellm.device_runtime.kernels.triton import experts
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS

PLUGIN = {plugin.name: plugin for plugin in PLUGINS}
NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))


class Mixture:
    """A layer as its ONNX function computes it in float32, and as nodes of a lowered graph."""

    def __init__(self, folder: Path, case: str) -> None:
        model = expert_call(case)
        graph = model.graph
        ir.save(model, folder / "body.onnx")
        self._body = onnxruntime.InferenceSession(folder / "body.onnx")
        editor = GraphEditor(graph)
        weights = AddressedWeights(editor)
        lower_experts(editor, 110, weights)
        weights.write(folder / "llm.weights")
        self._nodes = [node for node in graph if node.op_type in PLUGIN]
        stored = np.fromfile(folder / "llm.weights", np.uint8)
        aligned = np.zeros(len(stored) + 256, np.uint8)
        first = -aligned.ctypes.data % 256
        self._memory = aligned[first : first + len(stored)]
        self._memory[:] = stored
        (entries,) = next(v for v in graph.inputs if v.name == WEIGHT_TABLE).shape.numpy()
        self.table = self._memory.view(np.uint8)[: 8 * entries].view(np.int64)
        offsets = self.table[2:]
        offsets[offsets > 0] += self._memory.ctypes.data

    def expected(self, x: np.ndarray, ids: np.ndarray, shares: np.ndarray) -> np.ndarray:
        given = {"x": x.astype(np.float32), "ids": ids, "shares": shares.astype(np.float32)}
        return self._body.run(["y"], given)[0]

    def run(
        self, how: Callable[..., None], x: np.ndarray, ids: np.ndarray, shares: np.ndarray
    ) -> np.ndarray:
        """Launch the kernels of all nodes as their plugins do."""
        known = {"x": x, "ids": ids, "shares": shares, WEIGHT_TABLE: self.table}
        found = np.zeros(0)
        for node in self._nodes:
            plugin, facts = PLUGIN[node.op_type], json.loads(node.attributes[GIVEN].as_string())
            arrays = [known[str(value.name)] for value in node.inputs if value is not None]
            shapes = {key: a.shape for key, a in zip(plugin.inputs, arrays, strict=True)}
            outputs = [
                np.full(shape, 7, dtype) for dtype, shape in plugin.outputs(NUMBERS, shapes, facts)
            ]
            launched = plugin.launch(NUMBERS, shapes, facts)
            kernel = getattr(experts, node.op_type)
            constants = launched.variant.constants
            how(kernel, launched.grid, *arrays, *launched.sizes, *outputs, **constants)
            known |= {str(v.name): a for v, a in zip(node.outputs, outputs, strict=True)}
            found = outputs[0]
        return found


@pytest.mark.each_change("fp16", "int4", "uint4", "mxfp4")
@pytest.mark.parametrize("case", CASES)
def test_experts_equal_the_body_of_their_function(case, tmp_path):
    mixture = Mixture(tmp_path, case)
    given = inputs(9, 3)
    expected = mixture.expected(*given)
    for how in (launch, by_reference):
        found = mixture.run(how, *given)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 3e-3, how.__name__


def test_a_row_does_not_depend_on_the_others(tmp_path):
    mixture = Mixture(tmp_path, "fp16")
    x, ids, shares = inputs(40, 2)  # 40 pairs of each expert
    together = mixture.run(launch, x, ids, shares)
    assert np.linalg.norm(together - mixture.expected(x, ids, shares)) < 3e-3 * np.linalg.norm(
        together
    )
    for row in (0, 17, 39):
        at = slice(row, row + 1)
        alone = mixture.run(launch, x[:, at], ids[:, at], shares[:, at])
        assert alone.tobytes() == together[:, at].tobytes()


@pytest.mark.parametrize("how", [launch, by_reference], ids=["kernel", "reference"])
def test_other_tables_change_nothing(how, tmp_path):
    """TensorRT times plugins on random inputs."""
    mixture = Mixture(tmp_path, "fp16")
    mixture.table[1] ^= 1
    found = mixture.run(how, *inputs(2))
    np.testing.assert_array_equal(found, np.full_like(found, 7 * K))


@pytest.mark.parametrize("how", [launch, by_reference], ids=["kernel", "reference"])
def test_pairs_are_sorted_by_experts(how):
    ids = np.random.default_rng(1).integers(0, 7, 1100)
    order, begins = np.zeros(1100, np.int32), np.zeros(10, np.int32)
    how(experts.group_rows, (10,), ids, 1100, order, begins, BLOCK=512)
    sorted_ids = ids[order]
    assert (np.diff(sorted_ids) >= 0).all()
    assert (np.diff(order)[np.diff(sorted_ids) == 0] > 0).all()
    assert begins.tolist() == [int((ids < expert).sum()) for expert in range(10)]
