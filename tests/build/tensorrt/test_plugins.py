"""Edgellm's kernels in TensorRT: nodes, plugins, and rejected graphs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from fake_gpu import FakeDevice, FakeEngine
from node_stand_ins import stand_ins, vocabulary_stand_ins
from plugin_stub import Node, bindings, plugin_package, sizes
from portable import open_portable
from tensorrt_bundles import TOWER, Bundles

from edgellm.build import tensorrt as backend
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Plan
from edgellm.build.tensorrt import builder
from edgellm.build.tensorrt.compiler import compile_bundle
from edgellm.build.tensorrt.lowering import cache_plan
from edgellm.build.tensorrt.lowering.cache_plan import CachePlan, plan_cache
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.lowering.op_support import check_graph
from edgellm.build.tensorrt.lowering.op_table import CHECKED
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.plugins import register
from edgellm.build.tensorrt.profiles import base_passes
from edgellm.build.tensorrt.target import Target
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_io import (
    CACHE_TABLE,
    SEQUENCES,
    TREE_MASK,
    WRITE_INDEX,
)
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.core.model_spec import CacheRanges
from edgellm.device_runtime.kernels.triton import catalog, prebuilt
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN, NAMESPACE
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library
from edgellm.device_runtime.runners.tensorrt.runner import TensorRtRunner
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITY, ROWS = 128, 24
HALF = ir.DataType.FLOAT16


def make_bundle(folder: Path, model_type: str = "llama", dtype: str = "fp16", **config) -> Path:
    sizes = {**models.find(model_type).TINY, "head_dim": 128, **config}
    make_checkpoint(folder / "checkpoint", **sizes)
    source = open_checkpoint(str(folder / "checkpoint"))
    export_llm(source, folder / "bundle", ExportOptions(dtype=dtype, num_layers=2))
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("llama"))


def lowered(bundle: Path, folder: Path, codes: str = "fp16", answers: int = 1) -> ir.Model:
    model, weights = ir.load(bundle / "model.onnx"), WeightFile(folder / "lowered.data")
    kernels, addressed = (
        Kernels(sm=110, codes=codes, sequences=answers),
        folder / f"lowered{ADDRESSED_SUFFIX}",
    )
    lower(model, weights, HALF, CAPACITY, kernels=kernels, addressed=addressed)
    weights.close()
    return model


# -------------------------------------------------------------- numbers, versions
@pytest.mark.parametrize(
    ("model_type", "size"),
    [("glm4", 96), ("gemma3_text", 48), ("gemma2", 256), ("smollm3", 128), ("granite_swa", 80)],
)
def test_architectures_equal_the_portable_graph(tmp_path, model_type, size):
    """Partial and interleaved RoPE, windows, caps, scales, sinks, layers without RoPE."""
    bundle = make_bundle(tmp_path, model_type, head_dim=size)
    model, spec = lowered(bundle, tmp_path), load_bundle(bundle, LLM_BUNDLE).decoder
    for version in CHECKED[1:]:
        adapt(model.clone(), version)  # which holds it against the table
    adapt(model, CHECKED[0])
    ir.save(model, tmp_path / "lowered.onnx")
    device, plan = (
        FakeDevice(),
        Plan(max_input_len=ROWS, kv_capacity=CAPACITY, max_verify_tree_size=8),
    )
    engine = FakeEngine(tmp_path / "lowered.onnx", base_passes(plan), device)
    runner = TensorRtRunner(
        engine=engine, device=device, max_rows=ROWS, tree_rows=8, spec=spec, capacity=CAPACITY
    )
    sessions = (
        DecoderNetwork(runner=runner, spec=spec, capacity=CAPACITY),
        open_portable(bundle, CAPACITY),
    )
    random, write = np.random.default_rng(0), 0
    mask = np.tril(np.ones((5, 5), np.bool_))
    mask[3, 2] = mask[4, 3] = False
    places = np.array([0, 1, 2, 2, 3])
    for rows in (20, 1, 5):
        ids = random.integers(9, 90, rows)
        outputs = np.arange(rows) if rows == 5 else np.array([rows - 1])
        tree = {"position_ids": write + places, "tree_mask": mask} if rows == 5 else {}
        found, expected = (each.run(ids, write, outputs, **tree).logits for each in sessions)
        assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
        write += rows


def test_every_version_with_plugins_takes_the_graph(bundle, tmp_path):
    model = lowered(bundle, tmp_path)
    for version in CHECKED:
        adapted = model.clone()
        adapt(adapted, version)  # which holds it against the table
        names = {
            value.name
            for values in (adapted.graph.inputs, adapted.graph.outputs)
            for value in values
        }
        assert CACHE_TABLE in names
        assert not any("past" in name or "present" in name for name in names)
        assert not {n.op_type for n in adapted.graph} & {"Attention", "TensorScatter", "Where"}
        own = [node.op_type for node in adapted.graph if node.domain == NAMESPACE]
        assert own == ["look_up_rows", *["store_rows", "attend", "finish"] * 2, "head_rows"]
    assert any("edgellm::attend" in fault for fault in check_graph(model, (10, 14)))


def test_every_version_with_plugins_supports_batches(bundle, tmp_path):
    alone, model = (lowered(bundle, tmp_path, answers=answers) for answers in (1, 4))
    for version in CHECKED[:2]:
        adapt(model.clone(), version)  # which holds it against the table
    inputs = {value.name: [*(value.shape or ())] for value in model.graph.inputs}
    own = {value.name for value in alone.graph.inputs}
    assert inputs.keys() ^ own == {WRITE_INDEX, SEQUENCES}
    assert inputs[SEQUENCES] == [32, 5]
    assert [str(dim) for dim in inputs[TREE_MASK]] == ["rows", "mask_columns"]
    texts = [node.attributes[GIVEN].as_string() for node in alone.graph if node.domain == NAMESPACE]
    assert not any("sequences" in text for text in texts)  # plans of one are what they were


# ------------------------------------------------------ what NVIDIA's own package says
@pytest.mark.skipif(
    not bindings(), reason="no tensorrt.plugin here: pip install tensorrt-cu13-bindings"
)
@pytest.mark.parametrize("folder", bindings(), ids=str)
@pytest.mark.parametrize(("rows", "shares"), [(1, 16), (8, 16), (60, 2), (1024, 1)])
def test_plugins_implement_tensorrts_interface(folder, rows, shares):
    """Shapes, grids, int32 arguments and PTX of Llama-3.1-8B's attention."""
    with plugin_package(folder) as (trt, op):
        register(trt, op)
        register(trt, op)  # a second build in the process
        half, wide, whole = trt.float16, trt.float32, trt.int64
        layer = {"layer": 7, "heads": 32, "kv_heads": 8, "head_dim": 128}
        layer |= {"codes": "fp8", "capability": 110}
        node = lambda name, **given: Node(  # noqa: E731
            trt, op, f"{NAMESPACE}::{name}", {GIVEN: json.dumps(given)}
        )
        store = node("store_rows", **layer, own_tables=0)
        attend = node("attend", **layer, window=0, cap_bits=0)
        finish = node("finish", **layer, window=0, cap_bits=0, sunk=0)
        q, k = ((sizes(1, "S", width), half) for width in (4096, 1024))
        turn, places = (sizes(4096, 64), half), (sizes(1, "S"), whole)
        at, table = (sizes(1), whole), (sizes(130), whole)
        (turned,) = store.outputs([q, k, k, turn, turn, places, at, table])
        tree = sizes("S", "M"), trt.bool
        parts, stats = attend.outputs([turned, tree, places, at, table])
        (y,) = finish.outputs([turned, tree, places, at, table, parts, stats, stats])
        known = {"S": rows, "M": rows}
        numbers = lambda tensor: ([each.of(known) for each in tensor[0]], tensor[1])  # noqa: E731
        assert numbers(turned) == numbers(y) == ([1, rows, 4096], half)
        assert numbers(parts) == ([128, 32, 128], wide)
        assert numbers(stats) == ([128, 32, 2], wide)
        launch = store.launch(known)
        assert (launch.grid, launch.sizes) == ((rows, 40, 1), [7, 32, 8, 0, 128])
        launch = attend.launch(known)
        tiles = min(-(-rows * 4 // 16), 32)  # those of a prompt return at once
        assert launch.grid == (8, tiles, shares)
        assert launch.sizes == [7, rows, rows, 4, 0, 0, 0, 128]
        attend_of_8_bits = prebuilt.find(catalog.attend(128, "fp8"), 110)
        assert launch.ptx.decode() == attend_of_8_bits.ptx
        assert launch.threads == attend_of_8_bits.threads
        assert launch.shared_bytes == attend_of_8_bits.shared_bytes
        many = node("attend", **layer, window=0, cap_bits=0, sequences=6)
        many.outputs([turned, (sizes("S", "M"), trt.bool), places, (sizes(32, 5), whole), table])
        launch = many.launch(known)
        assert launch.grid == (8, tiles + 6, shares)  # a block more for each
        assert launch.sizes == [7, rows, rows, 4, 0, 0, 6, 128]
        launch = finish.launch(known)
        assert launch.grid == (8, -(-rows * 4 // (64 if rows >= 128 else 16)), 1)
        assert launch.sizes == [7, rows, rows, 4, 0, 0, 0, 128, shares, 0]
        assert launch.ptx.decode() == prebuilt.find(catalog.finish(128, "fp8"), 110).ptx
        assert rows * shares <= 128 or rows >= 128  # what a partial sum has room for


# ------------------------------------------------------------- who gets them
def library(version: str, name: str = "tensorrt") -> Library:
    return Library(SimpleNamespace(__name__=name, __version__=version), name != "tensorrt")


def planned(
    bundle: Path,
    version: str,
    sm: int = 110,
    kernels: str = "auto",
    kv_cache: str = "auto",
    calibrated: str = "",
    is_here: bool = False,
    answers: int = 1,
) -> CachePlan:
    manifest = load_bundle(bundle, LLM_BUNDLE)
    if calibrated:
        ranges = CacheRanges(calibrated, (1.0, 1.0), (1.0, 1.0))
        kv = dataclasses.replace(manifest.decoder.kv, ranges=ranges)
        spec = dataclasses.replace(manifest.decoder, kv=kv)
        manifest = dataclasses.replace(manifest, spec=spec)
    models_of = {"decoder": ir.load(bundle / "model.onnx")}
    options = TensorRtOptions(target_sm="" if is_here else str(sm), kernels=kernels)
    plan = Plan(
        max_input_len=ROWS,
        kv_capacity=CAPACITY,
        kv_cache=kv_cache,
        options=options,
        max_batch_size=answers,
    )
    return plan_cache(models_of, manifest, plan, Target(library(version), sm))


def test_the_cache_plan_depends_on_version_and_flags(bundle):
    for version in ("10.3.0", "10.13.3.9", "10.16.2", "11.4.1"):
        found = planned(bundle, version)
        assert (found.way, found.dtype, found.why_not) == ("edgellm", "float16", "")
        native = planned(bundle, version, kernels="tensorrt")
        assert (native.way, native.dtype, native.why_not) == ("tensorrt", "float16", "")
    assert planned(bundle, "10.16.2", kv_cache="fp8").dtype == "fp8_rows"
    assert planned(bundle, "10.16.2", sm=87, kv_cache="int8").dtype == "int8_rows"
    assert planned(bundle, "10.16.2", calibrated="fp8").dtype == "fp8_rows"
    assert planned(bundle, "10.16.2", sm=87, calibrated="fp8").dtype == "float16"
    assert planned(bundle, "10.16.2", calibrated="int8").dtype == "int8_rows"
    assert planned(bundle, "10.16.2", calibrated="int8", kv_cache="float").dtype == "float16"


def test_versions_without_plugins_use_tensorrts_attention(bundle):
    said = r"plugins do not work in TensorRT 10\.14\.1; they do in 10\.13 and 10\.16"
    found = planned(bundle, "10.14.1")
    assert found.way == "tensorrt"
    with pytest.raises(EdgeLLMError, match=said):
        planned(bundle, "10.14.1", kernels="edgellm")
    with pytest.raises(EdgeLLMError, match=f"--kvCache fp8 needs edgellm's.*{said}"):
        planned(bundle, "10.14.1", kv_cache="fp8")


def test_networks_and_gpus_without_kernels_use_tensorrts_attention(bundle, tmp_path, monkeypatch):
    odd = make_bundle(tmp_path / "odd", head_dim=24)
    floats = make_bundle(tmp_path / "floats", dtype="fp32")
    sizes = "there are kernels for heads of a multiple of 16 up to 256 numbers, not of"
    for path, sm, said in (
        (odd, 110, f"{sizes} 24"),
        (floats, 110, "the kernels compute in float16, the bundle in float32"),
        (bundle, 75, r"no kernels were compiled for compute capability 7\.5"),
    ):
        assert planned(path, "10.16.2", sm).way == "tensorrt"
        with pytest.raises(EdgeLLMError, match=f"--kernels edgellm: {said}") as caught:
            planned(path, "10.16.2", sm, kernels="edgellm")
        assert "--kernels tensorrt" in caught.value.hint
    monkeypatch.setattr(cache_plan, "driver_cuda", lambda: (12, 6))
    old = "11.0 are PTX 9.0, the NVIDIA driver takes 8.5 at most (install a newer NVIDIA driver"
    assert old in planned(bundle, "10.16.2", is_here=True).why_not
    with pytest.raises(EdgeLLMError, match=r"--kvCache fp8 needs a GPU of .* 8\.9 or newer, not 8"):
        planned(bundle, "10.16.2", 87, kv_cache="fp8")
    with pytest.raises(EdgeLLMError, match="TensorRT updates caches of floats only"):
        planned(bundle, "10.16.2", kernels="tensorrt", kv_cache="int8")


def test_batches_need_edgellms_kernels(bundle):
    for version in ("10.3.0", "11.4.1"):
        assert planned(bundle, version, answers=4).kernels == Kernels(
            sm=110, codes="fp16", sequences=4
        )
    said = "--maxBatchSize 4 needs edgellm's kernels: "
    for kernels in ("auto", "edgellm"):
        with pytest.raises(EdgeLLMError, match=f"{said}plugins do not work in Ten") as caught:
            planned(bundle, "10.14.1", kernels=kernels, answers=4)
        assert "leave --maxBatchSize out" in caught.value.hint
    with pytest.raises(EdgeLLMError, match=r"33 exceeds the 32 sequences .* take") as caught:
        planned(bundle, "10.16.2", answers=33)
    assert "--maxBatchSize 32 or less" in caught.value.hint
    assert not backend.takes_batches(Plan(options=TensorRtOptions(kernels="tensorrt")))


# ------------------------------------------------ a build, with functions in the kernels' place
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_the_graph_around_the_kernels_compiles(bundle, tmp_path, monkeypatch, family):
    """Values around the plugin nodes have matching types and shapes, in all profiles.

    Image rows, those of DeepStack, and M-RoPE's tables have one row for each token of a pass.
    """
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    registered, build, size = [], builder.build, 128
    if family != "llama":
        size, bundle = 16, Bundles(tmp_path).make(f"{family}{TOWER}", "fp16")
    manifest = load_bundle(bundle, LLM_BUNDLE)
    spec = manifest.decoder
    functions = stand_ins(6, size) + vocabulary_stand_ins(spec.hidden_size, spec.vocab_size)
    monkeypatch.setattr(cache_plan, "library_fault", lambda _: "")
    monkeypatch.setattr(builder, "register_plugins", lambda of: registered.append(of.label))

    def with_stand_ins(graph, *arguments, **options):
        model = ir.load(graph)
        for function in functions:
            model.functions[function.identifier()] = function
        model.opset_imports[NAMESPACE] = 1
        ir.save(model, graph)
        return build(graph, *arguments, **options)

    monkeypatch.setattr("edgellm.build.tensorrt.compiler.build", with_stand_ins)
    plan = Plan(
        max_input_len=ROWS,
        kv_capacity=CAPACITY,
        threads=1,
        kv_cache="fp8",
        max_verify_tree_size=8,
        options=TensorRtOptions(target_sm="120"),
        max_batch_size=4,
    )
    (tmp_path / "engine").mkdir()
    built = compile_bundle(bundle, manifest, plan, tmp_path / "engine", lambda _: None)
    assert [each.split()[0] for each in registered] == ["TensorRT-RTX"]
    assert (built.kv_dtype, built.options) == ("fp8_rows", {"kernels": "edgellm"})
    assert (tmp_path / "engine" / "llm.engine").stat().st_size > 100_000
    layers = manifest.decoder.kv.num_layers
    said = f"0 of {layers} attentions are edgellm's kernels"  # functions, they are no plugins
    assert [each.partition(": ")[2] for each in built.notes] == [said] * 4
