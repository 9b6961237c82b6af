"""Stored GGUF blocks: dequantized values are bit-identical to those of the package gguf."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from mixed_gguf import dequantized, random_blocks

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.quantized.gguf import FORMS, read
from edgellm.export.checkpoints.weights import Weights, write_weights
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import block_operands
from edgellm.export.onnx.builder import OPSET, Op
from edgellm.export.onnx.functions import blocks
from edgellm.export.onnx.functions.attention import call

_ROWS = 5


class Held:
    """One tensor, some rows at a time."""

    def __init__(self, name: str, kind: str, shape: tuple[int, int], rows: np.ndarray) -> None:
        self._infos, self._rows = {name: TensorInfo(kind, shape)}, rows

    def infos(self):
        return self._infos

    def stream(self, name):
        assert name in self._infos
        yield memoryview(self._rows[:2].tobytes())
        yield memoryview(self._rows[2:].tobytes())


def computed(op: Op, output: ir.Value, folder) -> np.ndarray:
    """Output of a graph without inputs."""
    graph = ir.Graph([], [output], nodes=op.nodes, opset_imports={"": OPSET, "edgellm": 1})
    write_weights(folder / "weights", op.parameters.values(), lambda _: None)
    for value in (*op.constants, *(value for value, _ in op.parameters.values())):
        graph.register_initializer(value)
    model = ir.Model(graph, ir_version=11, functions=list(op.functions.values()))
    ir.save(model, folder / "graph.onnx")
    session = ort.InferenceSession(folder / "graph.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {})[0]


@pytest.mark.parametrize("kind", FORMS)
def test_decoded_values_equal_package_gguf(kind, tmp_path):
    width = 2 * FORMS[kind].values
    rows = random_blocks(kind, 2 * _ROWS).reshape(_ROWS, -1)
    expected = dequantized(kind, rows)
    source = Held("proj.weight", kind, (_ROWS, width), rows)
    op = Op(ir.DataType.FLOAT)
    weight = read(Weights(source=source, prefix="proj."), (_ROWS, width), op.dtype)
    assert weight is not None
    function = blocks.block_linear(has_minima=weight.minima is not None)
    x = op.constant(np.eye(width, dtype=np.float32))
    y = call(op, function, x, *block_operands(op, weight), block_size=weight.block_size)
    found = computed(op, y, tmp_path)
    np.testing.assert_array_equal(found.T, expected)


@pytest.mark.parametrize("kind", FORMS)
def test_looked_up_rows_equal_package_gguf(kind, tmp_path):
    width = FORMS[kind].values
    rows = random_blocks(kind, _ROWS)
    expected = dequantized(kind, rows)
    source = Held("embed_tokens.weight", kind, (_ROWS, width), rows)
    op = Op(ir.DataType.FLOAT)
    table = Embedding(
        weights=Weights(source=source, prefix="embed_tokens."), vocab_size=_ROWS, size=width
    )
    found = computed(op, table(op, op.constant(np.array([[3, 0]]))), tmp_path)
    np.testing.assert_array_equal(found[0], expected[[3, 0]])


def test_a_scale_that_is_no_number_stops_the_export():
    rows = random_blocks("Q4_0", 2 * _ROWS).reshape(_ROWS, -1)
    rows[1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    source = Held("proj.weight", "Q4_0", (_ROWS, 64), rows)
    weight = read(Weights(source=source, prefix="proj."), (_ROWS, 64), ir.DataType.FLOAT16)
    with pytest.raises(BrokenArtifactError, match=r"proj\.weight has a scale that is not a number"):
        list(weight.scales.values.stream())
