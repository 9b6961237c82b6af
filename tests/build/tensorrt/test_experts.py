"""Mixtures of experts in TensorRT: nodes, plugins, engines, and what is rejected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import onnx_ir as ir
import pytest
from lowered_engines import lower_for_gpu
from node_stand_ins import expert_stand_ins, stand_ins, vocabulary_stand_ins
from plugin_stub import Node, bindings, plugin_package, sizes
from tensorrt_bundles import two_layer_bundle

from edgellm.build.engine import build_engine
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict
from edgellm.build.tensorrt import builder
from edgellm.build.tensorrt.lowering import cache_plan, kernel_experts
from edgellm.build.tensorrt.lowering.cache_plan import plan_cache
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.kernel_experts import form_of
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

_COUNTS = "num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"  # in configs
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
    return two_layer_bundle(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


@pytest.mark.skipif(
    not bindings(), reason="no tensorrt.plugin here: pip install tensorrt-cu13-bindings"
)
@pytest.mark.parametrize("folder", bindings(), ids=str)
@pytest.mark.parametrize("rows", [1, 60])
def test_plugins_implement_tensorrts_interface(folder, rows):
    """Shapes, grids, int32 arguments and PTX of Qwen3-30B-A3B's layers."""
    with plugin_package(folder) as (trt, op):
        register(trt, op)
        half, wide, whole, number = trt.float16, trt.float32, trt.int64, trt.int32
        facts = {"experts": 128, "top_k": 8, "hidden": 2048, "inner": 768, "capability": 110}
        node = lambda name, **given: Node(  # noqa: E731
            trt, op, f"{NAMESPACE}::{name}", {GIVEN: json.dumps({**facts, **given})}
        )
        known = {"S": rows}
        numbers = lambda tensor: ([each.of(known) for each in tensor[0]], tensor[1])  # noqa: E731
        table = sizes(2 + 12 * 48), whole
        route = node("route_rows", steps=[0, 0, 0, 0, 1, 0], number_bits=[1, 2, 3, 4])
        ids, shares = route.outputs([(sizes(1, "S", 128), wide)] * 4)
        assert (numbers(ids), numbers(shares)) == (([1, rows, 8], whole), ([1, rows, 8], half))
        launch = route.launch(known)
        expected = [128, 8, 0, 0, 0, 0, 1, 0, 1, 2, 3, 4]
        assert (launch.grid, launch.sizes) == ((rows, 1, 1), expected)
        group = node("group_rows")
        order, begins = group.outputs([ids])
        assert numbers(order) == ([1, rows, 8], number)
        assert numbers(begins) == ([1, 129], number)
        launch = group.launch(known)
        assert (launch.grid, launch.sizes) == ((129, 1, 1), [8 * rows])
        form = {"codes": "int4", "block": 128}
        gates = node("expert_gates", matrix=21, **form, gating_bits=[1, 2, 3, 4])
        (gated,) = gates.outputs([(sizes(1, "S", 2048), half), order, begins, table])
        assert numbers(gated) == ([1, rows, 8 * 768], half)
        launch = gates.launch(known)
        expected = [21, 2048, 768, 128, 8, 1, 2, 3, 4]
        assert (launch.grid, launch.sizes) == ((128, 24, 1), expected)
        compiled = prebuilt.find(catalog.expert_gates("int4"), 110)
        assert launch.ptx.decode() == compiled.ptx
        assert (launch.threads, launch.shared_bytes) == (compiled.threads, compiled.shared_bytes)
        downs = node("expert_downs", matrix=23, **form)
        (parts,) = downs.outputs([gated, shares, order, begins, table])
        assert numbers(parts) == ([1, rows, 8 * 2048], half)
        launch = downs.launch(known)
        assert (launch.grid, launch.sizes) == ((128, 64, 1), [23, 2048, 768, 128])
        summed = node("sum_experts")
        (y,) = summed.outputs([parts])
        assert numbers(y) == ([1, rows, 2048], half)
        launch = summed.launch(known)
        assert (launch.grid, launch.sizes) == ((rows, 4, 1), [2048, 8])


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
    only = "on TensorRT only edgellm's kernels compute mixtures of experts: "
    said = rejection(bundle, "10.14.1")
    assert said.startswith(f"{only}plugins do not work in TensorRT 10.14.1")
    assert said.endswith("give --backend onnxruntime --device cpu")
    assert rejection(bundle, "11.4", 75) == (
        f"{only}no kernels were compiled for compute capability 7.5 (there are some for 8.7, 8.9, "
        "9.0, 11.0, 12.0); give --backend onnxruntime --device cpu"
    )
    native = TensorRtOptions(target_sm="110", kernels="tensorrt")
    assert f"{only}--kernels tensorrt" in rejection(bundle, "11.4", options=native)
    odd = two_layer_bundle(tmp_path / "odd", "qwen3_moe", moe_intermediate_size=40)
    assert "experts with widths and groups of a multiple of 16, not of 40" in rejection(odd, "11.4")
    both = two_layer_bundle(tmp_path / "both", "qwen3_next", moe_intermediate_size=40)
    assert "compute recurrent layers and mixtures of experts: " in rejection(both, "11.4")


def test_forms_without_kernels_are_rejected(bundle, monkeypatch):
    floats, codes = form_of, {"gate_proj": "fp8", "up_proj": "fp8", "down_proj": "fp16"}
    monkeypatch.setattr(
        kernel_experts,
        "form_of",
        lambda stack: dataclasses.replace(floats(stack), codes=codes[stack.name]),
    )
    said = rejection(bundle, "11.4", 87)
    assert "experts in FP8 from compute capability 8.9 on, not for 8.7; give --backend" in said
    codes["up_proj"] = "int4"
    said = rejection(bundle, "11.4")
    assert "gates and ups that are stored alike, not for layers.0.model.layers.0.mlp" in said


@pytest.mark.each_change("qwen3_moe")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "ernie4_5_moe", "laguna"])
def test_tensorrt_rtx_compiles_it(bundle, tmp_path, model_type):
    """Experts are in the plan; a pass of one token writes no weights of all experts."""
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    if model_type != "qwen3_moe":
        bundle = two_layer_bundle(tmp_path, model_type)
    plan = dataclasses.replace(PLAN, options=TensorRtOptions(target_sm="89", layer_report=True))
    built = build_engine("llm", bundle, tmp_path / "engine", plan, "tensorrt", lambda _: None)
    assert [*(tmp_path / "engine").glob(f"*{ADDRESSED_SUFFIX}")] == []
    config = models.find(model_type).TINY
    count = next(config[name] for name in _COUNTS if name in config)
    shown = f"passes of several tokens compute all {count} experts of a layer: TensorRT-RTX"
    assert any(note.startswith(shown) for note in built.options["notes"])
    report = json.loads((tmp_path / "engine" / "llm.layers.json").read_text())
    layers = [ExpertLayer.all_of(ir.load(bundle / "model.onnx").graph)[0].up.shape]
    for each in report["kernels"]:
        dims = [tuple(tensor["dims"]) for tensor in each["outputs"]]
        assert each["pass_index"] or layers[0] not in dims


def test_the_graph_around_the_kernels_compiles(bundle, tmp_path, monkeypatch):
    """Values around the plugin nodes have matching types and shapes, in all profiles.

    The engine has a file of experts, which the estimate counts.
    """
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    config, build = models.find("qwen3_moe").TINY, builder.build
    monkeypatch.setattr(cache_plan, "library_fault", lambda _: "")
    monkeypatch.setattr(builder, "register_plugins", lambda _: None)
    attention = stand_ins(config["num_attention_heads"], config["head_dim"])
    names = "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "num_experts"
    functions = *attention, *expert_stand_ins(*(config[name] for name in names))
    functions += (*vocabulary_stand_ins(config["hidden_size"], config["vocab_size"]),)

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
    assert [each.max_rows for each in engine.main_graphs] == [1, 8, 24]
    assert engine.options["kernels"] == "edgellm"
    stored = engine.files[f"llm{ADDRESSED_SUFFIX}"].num_bytes
    predicted = predict(bundle, load_bundle(bundle, LLM_BUNDLE), PLAN, "tensorrt", tmp_path)
    vocabulary = 2 * config["vocab_size"] * config["hidden_size"] * 2  # embedding and head
    assert stored == pytest.approx(2 * 6 * 3 * 96 * 48 * 2 + vocabulary, rel=0.02)
    assert predicted.estimate.engine_bytes > stored
    read = (stored - vocabulary) / 3 + vocabulary / 2  # 2 of 6 experts, and the head
    assert 0 < predicted.estimate.decode_bytes - read < stored


@pytest.mark.each_change("qwen3_moe")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "ernie4_5_moe", "laguna"])
def test_every_version_with_plugins_takes_the_graph(tmp_path, model_type):
    """Also the operators of its router."""
    bundle, target = two_layer_bundle(tmp_path, model_type), tmp_path / "lowered.onnx"
    for version in CHECKED:  # which holds it against the table
        kernels = Kernels(sm=110, codes="fp16")
        lower_for_gpu(bundle / "model.onnx", target, version=version, kernels=kernels)
    faults = check_graph(ir.load(target), (10, 14))
    assert any("edgellm::expert_gates" in fault for fault in faults)
