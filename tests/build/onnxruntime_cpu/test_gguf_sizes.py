"""Bundles and engines of GGUF files are about as large as the files."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from harness.models.random_gguf import write_dense
from harness.models.random_weights import SHAPES
from mixed_gguf import dequantized, random_blocks

from edgellm.build.engine import build_engine
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.build.plan import Plan
from edgellm.core.manifest import Engine
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.quantized.gguf import FORMS
from edgellm.export.checkpoints.weights import Weights, write_weights
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.onnx.builder import OPSET, Op
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

# Most relative to the file, if not 1.05: scales of 4 bits take 8; codes of fewer bits take 2.
BUNDLE = {"Q2_K": 1.2, "TQ1_0": 1.25, "Q1_0": 1.9}
WRITTEN = [kind for kind in FORMS if kind != "Q2_0"]  # by the package gguf
# The same of engines, whose kernels multiply these formats. With minima a lookup has own factors.
ENGINE = {"Q4_1": 1.1, "Q5_1": 1.1, "TQ1_0": 1.3, "Q1_0": 1.9}
WIDENED = "IQ4_NL", "IQ4_XS"
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 4000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
IDS = [3, 0, 6]
INT8_INPUTS = 0.012  # see `test_products`


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """A function that writes a file in one format, with a tied head or not."""

    def write(kind: str, tied: bool):
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        write_dense({**SHAPES["tiny"], **SIZES, **HEADS, "tie_word_embeddings": tied}, kind, path)
        return path

    return write


def exported(path):
    bundle = path.parent / "bundle"
    export_llm(open_checkpoint(str(path)), bundle, ExportOptions(dtype="fp16"))
    return bundle


def built(bundle) -> Engine:
    plan = Plan(max_input_len=8, kv_capacity=16, threads=1, quantize="auto", checks=False)
    return build_engine(
        "llm", bundle, bundle.parent / "engine", plan, "onnxruntime", lambda _: None
    )


def size(folder) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.each_change(
    "Q4_0-True", "Q6_K-*", "Q4_K-True", "Q5_0-False", "IQ4_NL-True", "Q8_0-True", "TQ1_0-True"
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_bundle_has_the_size_of_the_file(kind, tied, file_of):
    path = file_of(kind, tied)
    assert size(exported(path)) < BUNDLE.get(kind, 1.05) * path.stat().st_size


@pytest.mark.each_change("Q4_0-False", "Q4_K-*", "Q6_K-*", "Q5_1-True", "TQ2_0-True")
@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *((kind, True) for kind in WRITTEN if kind not in WIDENED),
        *((kind, False) for kind in ("Q4_0", "Q4_K", "Q6_K")),
    ],
)
def test_an_engine_has_the_size_of_the_file(kind, tied, file_of):
    path = file_of(kind, tied)
    engine = built(exported(path))
    assert engine.options["notes"] == []
    assert size(path.parent / "engine") < ENGINE.get(kind, 1.05) * path.stat().st_size


@pytest.mark.parametrize("kind", WIDENED)
def test_an_engine_reports_wider_codes_and_has_one_table(kind, file_of):
    """A second copy of the tied embedding would be 40 % of the engine."""
    path = file_of(kind, True)
    (note,) = built(exported(path)).options["notes"]
    assert note.startswith("8 weights of 4 bits take 8 bits in the engine, ")
    weights = 4000 * 512 + 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024
    own = 0.2 * 4000 * 512  # scales of the embedding as in the file
    assert size(path.parent / "engine") < weights * (1 + 4 / 32) + own + 5e5


class Table:
    """One table of blocks."""

    def __init__(self, kind: str, rows: np.ndarray) -> None:
        self.width = FORMS[kind].values
        self._info, self._rows = TensorInfo(kind, (len(rows), self.width)), rows

    def infos(self):
        return {"embed_tokens.weight": self._info}

    def stream(self, name):
        assert name in self.infos()
        yield memoryview(self._rows.tobytes())


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("kind", FORMS)
def test_looked_up_rows_of_an_engine_equal_package_gguf(kind, has_head, tmp_path):
    """Bit by bit, also where the packed scales are rounded; a head rounds only its inputs."""
    blocks = random_blocks(kind, 7)
    table, op = Table(kind, blocks), Op(ir.DataType.FLOAT)
    weights = Weights(source=table) / "embed_tokens"
    rows = Embedding(weights=weights, vocab_size=7, size=table.width)(op, op.constant([IDS]))
    outputs = [rows]
    if has_head:
        outputs.append(Linear(weights, table.width, 7, bias=False)(op, rows))
    graph = ir.Graph([], outputs, nodes=op.nodes, opset_imports={"": OPSET, "edgellm": 1})
    write_weights(tmp_path / "weights", op.parameters.values(), lambda _: None)
    for value in (*op.constants, *(value for value, _ in op.parameters.values())):
        graph.register_initializer(value)
    model = ir.Model(graph, ir_version=11, functions=list(op.functions.values()))
    file = WeightFile(tmp_path / "engine.data")
    lower(model, OwnLinears(), file)
    file.close()
    packed = [name for name in model.graph.initializers if name.endswith("_packed")]
    assert len(packed) == 1  # the head's too
    ir.save(model, tmp_path / "engine.onnx")
    options = GraphOptions(optimize=False, own_kernels=True)
    session = load_graph(tmp_path / "engine.onnx", options)
    found, *heads = session.run(None, {})
    weight = dequantized(kind, blocks)
    np.testing.assert_array_equal(found[0], weight[IDS])
    for logits in heads:
        exact = weight[IDS].astype(np.float64) @ weight.T
        assert np.linalg.norm(logits[0] - exact) < INT8_INPUTS * np.linalg.norm(exact)
