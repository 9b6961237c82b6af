"""Recurrent layers in TensorRT: nodes, plugins, engines, and what is rejected."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import onnx_ir as ir
import pytest
from lowered_engines import lower_for_gpu
from node_stand_ins import (
    expert_stand_ins,
    recurrent_stand_ins,
    stand_ins,
    vocabulary_stand_ins,
)
from plugin_stub import Node, bindings, plugin_package, sizes
from tensorrt_bundles import two_layer_bundle

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict
from edgellm.build.tensorrt import builder
from edgellm.build.tensorrt.lowering import cache_plan
from edgellm.build.tensorrt.lowering.cache_plan import plan_cache
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.op_support import check_graph
from edgellm.build.tensorrt.lowering.op_table import CHECKED
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.plugins import register
from edgellm.build.tensorrt.target import Target
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import DECODER
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime.kernels.triton import catalog, prebuilt
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN, NAMESPACE
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library
from edgellm.export import models

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(
    max_input_len=24,
    kv_capacity=64,
    threads=1,
    max_verify_tree_size=8,
    options=TensorRtOptions(target_sm="120"),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Of a model with convolutions, linear attention and attention."""
    return two_layer_bundle(tmp_path_factory.mktemp("qwen"), "qwen3_5_text")


@pytest.mark.skipif(
    not bindings(), reason="no tensorrt.plugin here: pip install tensorrt-cu13-bindings"
)
@pytest.mark.parametrize("folder", bindings(), ids=str)
@pytest.mark.parametrize("rows", [1, 60, 256])
def test_plugins_implement_tensorrts_interface(folder, rows):
    """Shapes, grids, int32 arguments and PTX of Qwen3.5-9B's layers."""
    with plugin_package(folder) as (trt, op):
        register(trt, op)
        half, wide, whole = trt.float16, trt.float32, trt.int64
        node = lambda name, **given: Node(  # noqa: E731
            trt, op, f"{NAMESPACE}::{name}", {GIVEN: json.dumps({**given, "capability": 110})}
        )
        table = sizes(194), whole
        convolve = node("convolve_rows", entry=7, width=8192, size=4)
        x, taps = (sizes(1, "S", 8192), half), (sizes(4, 1, 8192), half)
        (y,) = convolve.outputs([x, taps, (sizes("S"), whole), table])
        delta = node(
            "delta_rows", entry=8, key_heads=16, heads=32, key_dim=128, value_dim=128, takes=1
        )
        q, v, g = ((sizes(1, "S", width), wide) for width in (2048, 4096, 32))
        (read,) = delta.outputs([q, q, v, g, g, (sizes("S", "M"), trt.bool), table])
        known = {"S": rows, "M": rows + 4}
        numbers = lambda tensor: ([each.of(known) for each in tensor[0]], tensor[1])  # noqa: E731
        assert numbers(y) == ([1, rows, 8192], half)
        assert numbers(read) == ([1, rows, 4096], wide)
        launch = convolve.launch(known)
        assert (launch.grid, launch.sizes) == ((rows, 32, 1), [7, 8192, 4])
        launch = delta.launch(known)
        expected = [8, rows, rows + 4, 16, 32, 128, 128]
        assert (launch.grid, launch.sizes) == ((32, 4, 1), expected)
        of_delta = prebuilt.find(catalog.delta_rows(takes=True), 110)
        assert launch.ptx.decode() == of_delta.ptx
        assert (launch.threads, launch.shared_bytes) == (of_delta.threads, of_delta.shared_bytes)


def rejection(bundle: Path, version: str, sm: int = 110, name: str = "tensorrt", **plan) -> str:
    """The error of a plan, with its hint."""
    module = SimpleNamespace(__name__=name, __version__=version)
    library = Library(module, name != "tensorrt")
    graphs = {DECODER: ir.load(bundle / "model.onnx")}
    planned = dataclasses.replace(PLAN, options=TensorRtOptions(target_sm=str(sm)))
    planned = dataclasses.replace(planned, **plan)
    with pytest.raises(EdgeLLMError) as caught:
        plan_cache(graphs, load_bundle(bundle, LLM_BUNDLE), planned, Target(library, sm))
    return f"{caught.value}; {caught.value.hint}"


def test_libraries_and_gpus_without_the_kernels_reject_it(bundle, tmp_path):
    only = "on TensorRT only edgellm's kernels compute recurrent layers: "
    way = "give --backend onnxruntime --device cpu"
    said = rejection(bundle, "10.14.1")
    assert said.startswith(f"{only}plugins do not work in TensorRT 10.14.1")
    assert said.endswith(way)
    assert "no kernels were compiled for compute capability 7.5" in rejection(bundle, "11.4", 75)
    native = TensorRtOptions(target_sm="110", kernels="tensorrt")
    assert f"{only}--kernels tensorrt" in rejection(bundle, "11.4", options=native)
    batches = rejection(bundle, "11.4", max_batch_size=2)
    assert "--maxBatchSize 2: on TensorRT a model with recurrent layers computes one" in batches
    floats = two_layer_bundle(tmp_path / "floats", "lfm2", dtype="fp32")
    assert "the kernels compute in float16, the bundle in float32" in rejection(floats, "11.4")
    odd = two_layer_bundle(tmp_path / "odd", "qwen3_5_text", linear_key_head_dim=20)
    assert "keys and values of a multiple of 8, not of 20" in rejection(odd, "11.4")


def test_tensorrt_rtx_needs_kernels_that_commit(bundle, tmp_path):
    rejected = functools.partial(rejection, version="1.7", name="tensorrt_rtx")
    only = "on TensorRT-RTX 1.7 edgellm's kernels advance the states of recurrent layers: "
    assert rejected(bundle, sm=75).startswith(f"{only}no kernels were compiled for")
    assert rejected(bundle, sm=75).endswith("give --backend onnxruntime --device cpu")
    assert f"{only}--maxVerifyTreeSize 300 exceeds 256" in rejected(
        bundle, max_verify_tree_size=300
    )
    floats = two_layer_bundle(tmp_path / "floats", "lfm2", dtype="fp32")
    assert f"{only}the kernels compute in float16, the bundle in" in rejected(floats)
    odd = two_layer_bundle(tmp_path / "odd", "qwen3_5_text", linear_key_head_dim=20)
    assert "keys and values of a multiple of 8, not of 20" in rejected(odd)
    kimi = two_layer_bundle(tmp_path / "kimi", "kimi_linear")
    assert "there are no kernels for decays of each channel" in rejected(kimi)


@pytest.mark.each_change("qwen3_5_text")
@pytest.mark.parametrize(
    "model_type", ["qwen3_5_text", "lfm2", "bamba", "qwen3_next", "nemotron_h"]
)
def test_tensorrt_rtx_compiles_it(bundle, tmp_path, model_type):
    """States are inputs of the plan; a pass of one token solves no system of equations."""
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    if model_type != "qwen3_5_text":
        sizes = {"mamba_head_dim": 16} if model_type == "nemotron_h" else {}
        bundle = two_layer_bundle(tmp_path, model_type, **sizes)
    plan = dataclasses.replace(PLAN, options=TensorRtOptions(target_sm="89", layer_report=True))
    built = build_engine("llm", bundle, tmp_path / "engine", plan, "tensorrt", lambda _: None)
    engine = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert [*engine.graphs] == [DECODER]
    assert [each.max_rows for each in engine.main_graphs] == [1, 8, 24]
    assert engine.options["kernels"] == "tensorrt"
    assert [*(tmp_path / "engine").glob(f"*{ADDRESSED_SUFFIX}")] == []
    report = json.loads((tmp_path / "engine" / "llm.layers.json").read_text())
    products = [
        sum("MatMul" in each["name"] for each in report["kernels"] if each["pass_index"] == index)
        for index in range(3)
    ]
    if model_type == "qwen3_5_text":
        assert products[0] < products[1] - 10
    noted = any("compute all" in note for note in built.options["notes"])
    assert noted == ("num_experts" in models.find(model_type).TINY)


@pytest.mark.each_change("qwen3_5_text")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba", "qwen3_next"])
def test_the_graph_around_the_kernels_compiles(bundle, tmp_path, monkeypatch, model_type):
    """Values around the plugin nodes have matching types and shapes, in all profiles.

    The engine has one graph: the kernels commit.
    """
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    config, build = models.find(model_type).TINY, builder.build
    if model_type != "qwen3_5_text":
        bundle = two_layer_bundle(tmp_path, model_type)
    functions = stand_ins(config["num_attention_heads"], config.get("head_dim", 16))
    functions += recurrent_stand_ins()
    functions += vocabulary_stand_ins(config["hidden_size"], config["vocab_size"])
    if "num_experts" in config:
        names = "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "num_experts"
        functions += expert_stand_ins(*(config[name] for name in names))
    monkeypatch.setattr(cache_plan, "library_fault", lambda _: "")
    monkeypatch.setattr(builder, "register_plugins", lambda _: None)

    def with_stand_ins(graph, *arguments, **options):
        model = ir.load(graph)
        for function in functions:
            model.functions[function.identifier()] = function
        model.opset_imports[NAMESPACE] = 1
        ir.save(model, graph)
        return build(graph, *arguments, **options)

    monkeypatch.setattr("edgellm.build.tensorrt.compiler.build", with_stand_ins)
    build_engine("llm", bundle, tmp_path / "engine", PLAN, "tensorrt", lambda _: None)
    engine = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert [*engine.graphs] == [DECODER]
    assert [each.max_rows for each in engine.main_graphs] == [1, 8, 24]
    assert engine.decoder.recurrent == load_bundle(bundle, LLM_BUNDLE).decoder.recurrent
    assert engine.prefill_rows == 24
    assert engine.options["kernels"] == "edgellm"


def test_estimates_count_states(bundle, monkeypatch, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="estimated for it: pip install '.[tensorrt-rtx]'")
    monkeypatch.setattr(cache_plan, "library_fault", lambda _: "")
    manifest, found = load_bundle(bundle, LLM_BUNDLE), []
    for rows in (24, 48):
        plan = dataclasses.replace(PLAN, max_input_len=rows)
        predicted = predict(bundle, manifest, plan, "tensorrt", tmp_path / "engine")
        found.append(predicted.estimate.kv_bytes)
    row = 24 * (2 * (2 * 32 + 96) + 2 * 2 * 16 + 4 * 4 * 24 + 2 * 4 * 4)
    assert abs(found[1] - found[0] - row) < 4096


def test_every_version_with_plugins_takes_the_graph(bundle, tmp_path):
    target = tmp_path / "lowered.onnx"
    for version in CHECKED:  # which holds it against the table
        kernels = Kernels(sm=110, codes="fp16")
        lower_for_gpu(bundle / "model.onnx", target, version=version, kernels=kernels)
    faults = check_graph(ir.load(target), (10, 14))
    assert any("edgellm::delta_rows" in fault for fault in faults)
