"""Graphs for TensorRT equal the bundle's; needs no TensorRT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from conftest import make_checkpoint
from model_configs import attending
from onnx.reference import ReferenceEvaluator
from quantized_layouts import LAYOUTS, write_checkpoint

from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Plan, image_plan
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.profiles import base_passes, draft_passes, image_pass
from edgellm.core import graph_io
from edgellm.core.model_spec import VisionSpec
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.multimodal.patch_grid import grid_inputs

CAPACITY, ROWS, WRITTEN = 32, 5, 3


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory) -> Path:
    """Untied, so that all linear layers are separate."""
    config = {**models.find("llama").TINY, "num_hidden_layers": 1, "tie_word_embeddings": False}
    return make_checkpoint(tmp_path_factory.mktemp("untied") / "checkpoint", **config)


def _bundle(source: Path, folder: Path, dtype: str = "fp32") -> Path:
    export_llm(open_checkpoint(str(source)), folder / "bundle", ExportOptions(dtype=dtype))
    return folder / "bundle" / "model.onnx"


def _lowered(portable: Path, folder: Path, candidates: int = 0) -> Path:
    model, weights = ir.load(portable), WeightFile(folder / "lowered.data")
    halves = {value.dtype for value in model.graph.inputs} & {ir.DataType.FLOAT16}
    dtype = ir.DataType.FLOAT16 if halves else ir.DataType.FLOAT
    lower(model, weights, dtype, CAPACITY, candidates)
    weights.close()
    ir.save(model, folder / "lowered.onnx")
    return folder / "lowered.onnx"


def _run(path: Path) -> dict[str, np.ndarray]:
    """Outputs of a pass of `ROWS` rows after `WRITTEN` random ones; the graph is not optimized."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    positions = np.arange(WRITTEN, WRITTEN + ROWS)
    feeds = {
        graph_io.INPUT_IDS: random.integers(9, 96, (1, ROWS)),
        graph_io.POSITION_IDS: positions[None],
        graph_io.WRITE_INDEX: np.array([WRITTEN]),
        graph_io.TREE_MASK: np.tril(np.ones((ROWS, ROWS), np.bool_)),
        graph_io.LOGITS_INDEX: np.arange(ROWS),
    }
    for value in session.get_inputs():
        if value.name not in feeds:
            shape = [dim if isinstance(dim, int) else CAPACITY for dim in value.shape]
            dtype = np.float16 if "float16" in value.type else np.float32
            feeds[value.name] = random.normal(size=shape).astype(dtype)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        "ct-int4",
        "awq",
        "gptq-order",
        "gptq-8",
        "int8_sq",
        "w8a16",
        "fp8",
        "ct-fp8",
        "fp8-blocks",
        "auto-round",
    ],
)
def test_lowered_quantized_graphs_equal_the_portable_graph(tiny_source, tmp_path, layout):
    write_checkpoint(tiny_source, tmp_path / "checkpoint", LAYOUTS[layout])
    portable = _bundle(tmp_path / "checkpoint", tmp_path)
    expected, found = _run(portable), _run(_lowered(portable, tmp_path))
    top = found.pop(graph_io.TOP_LOGITS)
    np.testing.assert_array_equal(top, found[graph_io.LOGITS].max(-1))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=2e-4, err_msg=name)
    assert np.abs(expected[graph_io.LOGITS]).max() > 1


@pytest.mark.parametrize("model_type", attending())
def test_lowered_float_graphs_equal_the_portable_graph(tmp_path, model_type):
    make_checkpoint(tmp_path / "checkpoint", dtype="bfloat16", **models.find(model_type).TINY)
    portable = _bundle(tmp_path / "checkpoint", tmp_path)
    expected, found = _run(portable), _run(_lowered(portable, tmp_path))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)


def test_nvfp4_weights_are_merged_with_their_scales(tiny_source, tmp_path):
    """Layers with one input are one product, though each has its own global scale.

    No CPU kernel reads FP4, so the weights are compared instead of the logits.
    """
    write_checkpoint(tiny_source, tmp_path / "checkpoint", LAYOUTS["nvfp4"])
    portable = _bundle(tmp_path / "checkpoint", tmp_path)
    layers = [weight for _, weight in linear_layers(ir.load(portable).graph)]
    found = [array.T for array in _weights(_lowered(portable, tmp_path))]
    quantized = [weight for weight in layers if weight.kind == "fp4"]
    assert len({float(weight.parts[0].global_scale) for weight in quantized}) == len(quantized)
    # Of each decoder layer: q, k and v; o; gate and up; down
    assert len(found) == len(layers) - 3 * len(quantized) // 7
    for width in {weight.in_features for weight in layers}:
        expected = [each.dense().T for each in layers if each.in_features == width]
        merged = np.concatenate([array for array in found if array.shape[1] == width])
        np.testing.assert_allclose(
            _sorted(merged), _sorted(np.concatenate(expected)), rtol=1e-6, atol=1e-9
        )


def _sorted(rows: np.ndarray) -> np.ndarray:
    """Rows in an order that small differences do not change."""
    return rows[np.argsort(rows.astype(np.float64).round(5) @ np.arange(1, 1 + rows.shape[1]))]


def _weights(path: Path) -> list[np.ndarray]:
    """The weight [in, out] of each product in the lowered graph, with factors of its outputs."""
    model = onnx.load(path)
    names = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type != "MatMul":
            continue
        nodes, pending = [], [node.input[1]]
        while pending:
            if (producer := names.get(pending.pop())) is not None:
                nodes.insert(0, producer)
                pending += producer.input
        used = {name for each in nodes for name in each.input if name in constants}
        part = onnx.helper.make_graph(
            nodes,
            "weight",
            [],
            [onnx.helper.make_empty_tensor_value_info(node.input[1])],
            [constants[name] for name in used],
        )
        part = onnx.helper.make_model(part, opset_imports=model.opset_import)
        (weight,) = ReferenceEvaluator(part).run(None, {})
        for user in model.graph.node:
            if user.op_type == "Mul" and user.input[0] == node.output[0]:
                weight = weight * onnx.numpy_helper.to_array(constants[user.input[1]])
        found.append(weight)
    return found


def test_layers_that_read_one_input_become_one(tiny_source, tmp_path):
    """q, k and v; gate and up; each with its bias if there is one."""
    config = {**models.find("qwen2").TINY, "num_hidden_layers": 1}
    biased = make_checkpoint(tmp_path / "checkpoint", **config)
    for name, source in (("plain", tiny_source), ("biased", biased)):
        (tmp_path / name).mkdir()
        graph = ir.load(_lowered(_bundle(source, tmp_path / name), tmp_path / name)).graph
        kinds = [node.op_type for node in graph]
        assert kinds.count("MatMul") == 5  # with o, down and the head
        assert kinds.count("Add") == 3 if name == "plain" else 4  # one in the mask's place


def test_a_tied_head_shares_the_table(tiny_bundle, tmp_path):
    graph = ir.load(_lowered(tiny_bundle / "model.onnx", tmp_path)).graph
    tables = [
        value
        for value in graph.initializers.values()
        if value.const_value is not None
        and tuple(value.const_value.shape.numpy()) == (96, 96)
        and "embed" in str(value.name)
    ]
    assert len(tables) == 1
    assert {user.op_type for user, _ in tables[0].uses()} == {"Gather", "Transpose"}


def test_equal_smoothing_and_rounding_happen_once(tiny_source, tmp_path):
    """ModelOpt writes one input scale for q, k and v, and so does the layout of these tests."""
    write_checkpoint(tiny_source, tmp_path / "checkpoint", LAYOUTS["fp8"])
    portable = _bundle(tmp_path / "checkpoint", tmp_path)
    before = [node.op_type for node in ir.load(portable).graph].count("RoundInput")
    graph = ir.load(_lowered(portable, tmp_path)).graph
    assert (before, [node.op_type for node in graph].count("QuantizeLinear")) == (7, 4)


# ------------------------------------------------------------------------------------ passes
def _rows(passes) -> dict[str, tuple[int, dict]]:
    return {each.name: (each.max_rows, dict(each.ranges)) for each in passes}


def test_a_base_has_profiles_for_decoding_verification_and_prompts():
    plain = _rows(
        base_passes(Plan(max_input_len=1024, kv_capacity=4096, threads=0, prefill="auto"))
    )
    assert {name: rows for name, (rows, _) in plain.items()} == {"decode": 1, "prefill": 1024}
    eagle = _rows(
        base_passes(
            Plan(
                max_input_len=1024,
                kv_capacity=4096,
                threads=0,
                prefill="auto",
                max_verify_tree_size=60,
            )
        )
    )
    assert list(eagle) == ["decode", "verify", "prefill"]
    assert eagle["verify"][1]["head_rows"] == (1, 60)
    assert eagle["prefill"][1]["head_rows"] == (1, 1)
    small = base_passes(
        Plan(max_input_len=32, kv_capacity=4096, threads=0, prefill="auto", max_verify_tree_size=60)
    )
    assert [each.name for each in small] == ["decode", "verify"]  # which takes prompts, too


def test_a_draft_has_profiles_for_steps_and_prompts():
    passes = _rows(
        draft_passes(
            Plan(
                max_input_len=1024,
                kv_capacity=4096,
                threads=0,
                prefill="auto",
                max_draft_tree_size=60,
            )
        )
    )
    assert {name: rows for name, (rows, _) in passes.items()} == {"step": 60, "prefill": 1024}
    assert passes["step"][1]["mask_columns"] == (1, 60)


def _spec(**changes: int) -> VisionSpec:
    grid = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "window_size": 8}
    none = {"position_grid": 0, "num_deepstack": 0, "image_size": 0, "tokens_per_tile": 0}
    sizes = {**grid, **none}
    return VisionSpec(model_type="any", hidden_size=64, num_parameters=1, **{**sizes, **changes})


def test_every_image_fits_into_its_pass():
    spec, plan = _spec(), image_plan(4, 128, 64, 0)
    ranges = image_pass(plan, spec).ranges
    assert ranges["patches"] == (16, 256)
    for rows in range(1, 65):
        for columns in range(1, 64 // rows + 1):
            mask = grid_inputs(2 * rows, 2 * columns, spec)[graph_io.WINDOW_MASK]
            assert ranges["windows"][0] <= len(mask) <= ranges["windows"][1]
    assert ranges["window_slots"] == (64, 64 * ranges["windows"][1])


def test_tiles_are_counted_whole():
    spec = _spec(image_size=448, tokens_per_tile=256, window_size=0)
    assert image_pass(image_plan(4, 2048, 1000, 0), spec).ranges == {"tiles": (1, 3)}
