"""Quantized checkpoints of every layout: weights exactly, logits within float error."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch
from conftest import make_checkpoint
from graph_weights import graph_weights
from onnx.reference import ReferenceEvaluator
from quantized_layouts import LAYOUTS, Layout, gptq, rounded_input, write_checkpoint
from safetensors.torch import load_file, save_file

from edgellm.build.engine import build_engine
from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable

IDS = np.random.default_rng(4).integers(9, 96, 24)


@pytest.fixture(scope="session")
def quantized(tiny_checkpoint, tmp_path_factory):
    """Checkpoint folder, bundle and dequantized weights of a layout, made once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            meant = write_checkpoint(tiny_checkpoint, folder / "checkpoint", LAYOUTS[name])
            checkpoint = open_checkpoint(str(folder / "checkpoint"))
            export_llm(checkpoint, folder / "bundle", ExportOptions(dtype="fp32"))
            made[name] = folder, meant
        return made[name]

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_exactly_those_of_the_checkpoint(quantized, name):
    folder, meant = quantized(name)
    found = graph_weights(folder / "bundle")
    assert found.keys() == meant.keys()
    for key, expected in meant.items():
        np.testing.assert_allclose(found[key], expected, rtol=3e-7, atol=0)


@pytest.fixture(scope="session")
def expected_logits(tiny_checkpoint):
    """Logits of transformers with dequantized weights, with or without rounding of inputs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def compute(meant, rounds: str = "", smoothing: dict | None = None) -> np.ndarray:
        state = load_file(tiny_checkpoint / "model.safetensors")
        state |= {key: torch.from_numpy(value) for key, value in meant.items()}
        config = AutoConfig.from_pretrained(tiny_checkpoint)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(state, strict=False)
        for key in meant if rounds else ():
            factor = smoothing.get(key) if smoothing else None
            module = model.get_submodule(key.removesuffix(".weight"))
            module.register_forward_pre_hook(_rounding(rounds, factor))
        with torch.no_grad():
            return model(torch.from_numpy(IDS)[None]).logits[0].numpy()

    return compute


def _rounding(kind, factor):
    def hook(_, inputs):
        x = inputs[0] if factor is None else inputs[0] * factor
        x = rounded_input(kind, x)
        return (x if factor is None else x / factor,)

    return hook


def _smoothing(folder) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "checkpoint/model.safetensors")
    end = "pre_quant_scale"
    return {k.removesuffix(end) + "weight": v for k, v in tensors.items() if k.endswith(end)}


# Layouts with the graph of another: with equal weights, they compute the same.
SAME_GRAPHS = {
    "gptq": ("ct-int4", "auto-round", "auto-round-ct"),
    "gptq-asym": ("ct-int4-asym", "awq", "gptq-v2"),
    "ct-int8": ("gptq-8", "auto-round-8", "ct-int8-groups"),
    "w8a16": ("ct-w8a8", "auto-round-w8a8"),
    "fp8-blocks": ("fp8-powers", "ct-fp8-blocks", "fp8-pb-wo"),
    "fp8": ("fp8-whole",),
}
GRAPHS = [name for name in LAYOUTS if name not in sum(SAME_GRAPHS.values(), ())]


@pytest.mark.parametrize("name", SAME_GRAPHS)
def test_layouts_have_the_graph_of_another(quantized, name):
    """But for the names of scales: nodes, attributes, constants, types and shapes of weights."""

    def form(layout: str) -> list[object]:
        model = onnx.load(quantized(layout)[0] / "bundle/model.onnx", load_external_data=False)
        shapes = [(one.data_type, *one.dims, one.raw_data) for one in model.graph.initializer]
        nodes = [
            (node.op_type, [str(each) for each in node.attribute]) for node in model.graph.node
        ]
        return [shapes, nodes, [str(function) for function in model.functions]]

    for other in SAME_GRAPHS[name]:
        assert form(other) == form(name)


RUNS_ON_ORT = [name for name in GRAPHS if "nvfp4" not in name]


@pytest.mark.parametrize("name", RUNS_ON_ORT)
def test_portable_graphs_equal_the_dequantized_checkpoint(
    quantized, expected_logits, monkeypatch, name
):
    """Without optimizations ONNX Runtime runs the graph's nodes, input rounding included."""
    import onnxruntime as ort

    folder, meant = quantized(name)
    literal = ort.SessionOptions()
    literal.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    monkeypatch.setattr(ort, "SessionOptions", lambda: literal)
    manifest = load_bundle(folder / "bundle", LLM_BUNDLE)
    found = run_portable(folder / "bundle", manifest, IDS, 20)
    expected = expected_logits(meant, LAYOUTS[name].rounds, _smoothing(folder))
    if LAYOUTS[name].rounds:  # a last bit decides where a value between two codes goes
        assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 0.02
        assert np.median(np.abs(found - expected)) < 2e-3
    else:
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.each_change(
    "int8-int4", "int8-fp8", "int8-nvfp4", "int8-int8_sq", "int8-gptq-order", "int8-ct-int4-order"
)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("prefill", ["same", "int8"])
def test_engines_are_close_to_the_dequantized_checkpoint(
    quantized, expected_logits, tmp_path, name, prefill
):
    """Kernels round activations to int8, finer than any layout: close, not equal."""
    folder, meant = quantized(name)
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill=prefill)
    build_engine("llm", folder / "bundle", tmp_path / "engine", plan, "onnxruntime", lambda _: None)
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    precisions = [graph.precision for graph in manifest.main_graphs]
    assert precisions == (
        ["int8"] if name == "int8_sq" else [LAYOUTS[name].kind, "int8"][: len(precisions)]
    )
    error = relative_error(tmp_path / "engine", expected_logits(meant))
    if LAYOUTS[name].kind == "fp8" and manifest.options["kernels"] == "edgellm":
        assert error < 1e-5  # codes as stored, times floats
    else:
        assert 1e-4 < error < 0.15  # below: something was silently computed in float


def relative_error(engine, expected):
    session = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    logits = [session.run(IDS[:20], 0, np.arange(20)).logits.copy()]
    for position in range(20, 24):
        result = session.run(IDS[position : position + 1], position, np.array([0]))
        logits.append(result.logits.copy())
    found = np.concatenate(logits)
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))


def test_fp8_becomes_int8_on_request(quantized, expected_logits, tmp_path):
    folder, meant = quantized("ct-fp8")
    plan = Plan(
        max_input_len=48, kv_capacity=64, threads=1, quantize="int8", options=CpuOptions("edgellm")
    )
    bundle, engine = folder / "bundle", tmp_path / "engine"
    made = build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    assert [graph.precision for graph in made.main_graphs] == ["int8"]
    assert 1e-4 < relative_error(engine, expected_logits(meant)) < 0.15
    theirs = Plan(
        max_input_len=48,
        kv_capacity=64,
        threads=1,
        quantize="int8",
        options=CpuOptions("onnxruntime"),
    )
    with pytest.raises(EdgeLLMError, match="--quantize int8 is for bundles with float weights"):
        build_engine("llm", bundle, engine, theirs, "onnxruntime", lambda _: None)


def test_nvfp4_rounds_its_inputs_in_the_graph(quantized):
    """ONNX Runtime has no FP4 on the CPU; onnx's reference runs the operator's body."""
    folder, _ = quantized("nvfp4")
    model = onnx.load(folder / "bundle/model.onnx")
    assert ("trt", "TRT_FP4DynamicQuantize") in {(f.domain, f.name) for f in model.functions}
    x = np.random.default_rng(0).normal(size=(1, 3, 96)).astype(np.float32)
    x[0, 0, :16] = 0
    x[0, 1, 3] = 40
    nodes = [node for node in model.graph.node if node.name.startswith("layers.0.")]
    rounding = next(node for node in nodes if node.op_type == "RoundInputFp4")
    constants = [c for c in model.graph.initializer if c.name in rounding.input[1:]]
    rounding.input[0] = "x"
    graph = onnx.helper.make_graph(
        [rounding],
        "rounding",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [onnx.helper.make_empty_tensor_value_info(rounding.output[0])],
        constants,
    )
    part = onnx.helper.make_model(
        graph, opset_imports=model.opset_import, functions=model.functions
    )
    (found,) = ReferenceEvaluator(part).run(None, {"x": x})
    np.testing.assert_array_equal(found, rounded_input("fp4", torch.from_numpy(x)).numpy())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_equal_the_dequantized_checkpoint(tmp_path, monkeypatch, family):
    """Biases stay with quantized weights; norms of queries and keys after them."""
    import onnxruntime as ort
    from transformers import AutoConfig, AutoModelForCausalLM

    source = make_checkpoint(tmp_path / "float", **models.find(family).TINY)
    meant = write_checkpoint(source, tmp_path / "checkpoint", LAYOUTS["awq"])
    bundle = tmp_path / "bundle"
    manifest = export_llm(
        open_checkpoint(str(tmp_path / "checkpoint")), bundle, ExportOptions(dtype="fp32")
    )
    assert manifest.quantization == "awq"
    state = load_file(source / "model.safetensors")
    state |= {key: torch.from_numpy(value) for key, value in meant.items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(IDS)[None]).logits[0].numpy()
    literal = ort.SessionOptions()
    literal.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    monkeypatch.setattr(ort, "SessionOptions", lambda: literal)
    np.testing.assert_allclose(run_portable(bundle, manifest, IDS, 20), expected, atol=2e-4)


def _drop(last: str):
    def change(tensors, config):
        del config
        return {name: value for name, value in tensors.items() if not name.endswith(last)}

    return change


def _set(last: str, value: float, dtype: torch.dtype | None = None):
    def change(tensors, config):
        del config
        name = f"model.layers.1.mlp.up_proj.{last}"
        array = tensors[name].clone()
        flat = array.view(torch.uint8 if array.dtype.itemsize == 1 else array.dtype).reshape(-1)
        flat[0] = value
        tensors[name] = array.to(dtype) if dtype is not None else array
        return tensors

    return change


def _fewer_bits(tensors, config):
    del config
    name = "model.layers.1.mlp.up_proj.qweight"
    tensors[name] = tensors[name][:9]
    return tensors


def _gemv(tensors, config):
    config["quantization_config"]["version"] = "gemv"
    return tensors


def _uneven_groups(tensors, config):
    del config
    name = "model.layers.1.mlp.up_proj.weight_g_idx"
    tensors[name] = torch.arange(96, dtype=torch.int32).flip(0) // 17
    return tensors


def _with_zero_point(tensors, config):
    del config
    tensors["model.layers.1.mlp.up_proj.weight_zero_point"] = torch.ones(80, 1)
    return tensors


def _as(last: str, to):
    """A tensor of a layer, changed by `to`."""

    def change(tensors, config):
        del config
        name = f"model.layers.1.mlp.up_proj.{last}"
        tensors[name] = to(tensors[name]).contiguous()
        return tensors

    return change


def _says(key: str, value: object):
    def change(tensors, config):
        config["quantization_config"][key] = value
        return tensors

    return change


_ONLINE = {"config_groups": {"u": {"type": "hadamard", "apply": [{"location": "input"}]}}}


@pytest.mark.parametrize(
    ("layout", "change", "error", "message"),
    [
        ("gptq", _as("g_idx", lambda t: t - 1), BrokenArtifactError, "groups are of different"),
        ("gptq", _as("g_idx", lambda t: t + 2**30), BrokenArtifactError, "groups are of different"),
        ("gptq", _as("g_idx", lambda t: t.short()), UnsupportedModelError, "has type I16"),
        ("gptq", _as("scales", lambda t: t[:0]), BrokenArtifactError, "no matrix of groups"),
        ("awq", _as("scales", lambda t: t[0, 0]), BrokenArtifactError, "no matrix of groups"),
        ("awq", _as("scales", lambda t: t.double()), UnsupportedModelError, "has type F64"),
        ("ct-int4", _as("weight_scale", lambda t: t[:, :0]), BrokenArtifactError, "no matrix of"),
        (
            "ct-fp8",
            _says("quantized_layers", ["up_proj"]),
            BrokenArtifactError,
            "quantized_layers of the quantization",
        ),
        (
            "ct-fp8",
            _says("quantized_layers", {"model.layers.0.self_attn.q_proj": "FP8"}),
            BrokenArtifactError,
            "q_proj: quantized_layers",
        ),
        ("ct-int4", _says("transform_config", _ONLINE), UnsupportedModelError, "transform_config"),
        ("gptq", _as("scales", lambda t: t.int() + 1), UnsupportedModelError, "stored as int32"),
        (
            "fp8-blocks",
            _as("weight_scale_inv", lambda t: (t * 0 + 127).to(torch.uint8)),
            UnsupportedModelError,
            "is stored as uint8",
        ),
        ("fp8-blocks", _says("weight_block_size", [16]), BrokenArtifactError, "not two positive"),
        ("fp8-blocks", _says("weight_block_size", "128"), BrokenArtifactError, "not two positive"),
        ("fp8-blocks", _says("weight_block_size", [-1, 0]), BrokenArtifactError, "not two positiv"),
        ("fp8", _drop("input_scale"), BrokenArtifactError, "quantized without calibration data"),
        ("nvfp4", _drop("input_scale"), BrokenArtifactError, "input_scale is missing"),
        ("fp8", _set("weight", 0x7F), BrokenArtifactError, "up_proj.weight holds values that"),
        ("nvfp4", _set("weight_scale", 0xFF), BrokenArtifactError, "holds values that are not"),
        ("fp8", _set("weight_scale", 0.0), BrokenArtifactError, "not a positive number"),
        ("fp8", _set("input_scale", float("nan")), BrokenArtifactError, "input_scale is nan"),
        ("w8a16", _with_zero_point, UnsupportedModelError, "8-bit weights with zero points"),
        ("int4", _set("weight_scale", float("inf")), BrokenArtifactError, "other than zero"),
        ("gptq", _fewer_bits, UnsupportedModelError, "holds 3-bit weights"),
        ("gptq", _set("qzeros", -1), UnsupportedModelError, "a zero point of 16"),
        ("awq", _gemv, UnsupportedModelError, "AWQ version 'gemv'"),
        (
            "ct-int4",
            _uneven_groups,
            BrokenArtifactError,
            "weight_g_idx: the groups are of different",
        ),
        ("ct-int4", _set("weight_shape", 81), BrokenArtifactError, "weight_shape is"),
    ],
)
def test_damaged_and_unknown_layouts_are_rejected(
    quantized, tmp_path, layout, change, error, message
):
    source = quantized(layout)[0] / "checkpoint"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    tensors = change(load_file(source / "model.safetensors"), config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message.replace("(", r"\(")):
        export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("groups", [np.full(96, -1), np.arange(96) // 16])
def test_groups_in_order_need_no_gather(quantized, tmp_path, groups):
    """compressed-tensors fills `weight_g_idx` with -1 before it is known."""
    source = tmp_path / "checkpoint"
    shutil.copytree(quantized("ct-int4")[0] / "checkpoint", source)
    tensors = load_file(source / "model.safetensors")
    up = "model.layers.1.mlp.up_proj.weight"
    width = 8 * tensors[f"{up}_packed"].shape[1]
    tensors[f"{up}_g_idx"] = torch.from_numpy(groups[:width].astype(np.int32))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    export_llm(open_checkpoint(str(source)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
    graph = (quantized("ct-int4")[0] / "bundle/model.onnx").read_bytes()
    assert (tmp_path / "bundle/model.onnx").read_bytes() == graph


@pytest.mark.parametrize("size", [[16], {"all": 16}])
def test_invalid_group_sizes_are_derived_from_the_tensors(quantized, tmp_path, size):
    source = tmp_path / "checkpoint"
    shutil.copytree(quantized("gptq")[0] / "checkpoint", source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["group_size"] = size
    (source / "config.json").write_text(json.dumps(config))
    export_llm(open_checkpoint(str(source)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
    expected = graph_weights(quantized("gptq")[0] / "bundle")
    for name, weight in graph_weights(tmp_path / "bundle").items():
        np.testing.assert_array_equal(weight, expected[name])


def test_zero_points_follow_the_checkpoint_format(tiny_checkpoint, tmp_path):
    """As AutoGPTQ and GPTQModel write it; config.json alone names no quantization here."""
    layout = Layout(gptq(4, symmetric=False, version=2))
    meant = write_checkpoint(tiny_checkpoint, tmp_path / "checkpoint", layout)
    said = {"bits": 4, "group_size": 16, "sym": False, "checkpoint_format": "gptq_v2"}
    (tmp_path / "checkpoint/quantize_config.json").write_text(json.dumps(said))
    checkpoint = open_checkpoint(str(tmp_path / "checkpoint"))
    manifest = export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert manifest.quantization == "gptq"
    found = graph_weights(tmp_path / "bundle")
    for name, expected in meant.items():
        np.testing.assert_allclose(found[name], expected, rtol=3e-7, atol=0)


def test_scales_that_float16_cannot_hold_are_rejected(quantized, tmp_path):
    folder, _ = quantized("fp8")
    source = tmp_path / "checkpoint"
    source.mkdir()
    for path in (folder / "checkpoint").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"] *= 1e-9
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(BrokenArtifactError, match="leaves the range of float16") as found:
        export_llm(open_checkpoint(str(source)), tmp_path / "bundle", ExportOptions(dtype="fp16"))
    assert found.value.hint == "export with --dtype fp32"


@pytest.mark.each_change(
    "int4",
    "fp8",
    "nvfp4",
    "int8_sq",
    "w8a16",
    "ct-int4-order",
    "gptq-asym",
    "auto-round",
    "fp8-blocks",
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_float16_bundles_are_close_to_float32(quantized, tmp_path, name):
    """Graphs for GPUs: the same weights, with scales and products in float16."""
    folder, meant = quantized(name)
    bundle = tmp_path / "bundle"
    export_llm(open_checkpoint(str(folder / "checkpoint")), bundle, ExportOptions(dtype="fp16"))
    onnx.checker.check_model(str(bundle / "model.onnx"))
    found = graph_weights(bundle)
    for key, expected in meant.items():
        np.testing.assert_allclose(found[key], expected, rtol=2e-3, atol=1e-6)
    if name not in GRAPHS:
        return
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="same")
    build_engine("llm", bundle, tmp_path / "engine", plan, "onnxruntime", lambda _: None)


@pytest.mark.parametrize("group", [24, 96])
def test_groups_without_a_kernel_become_int8_or_blocks_of_32(tmp_path, group):
    """Zero points and blocks of 24 become int8 in blocks of 32; 96 is three blocks of 32."""
    layout = Layout(gptq(4, symmetric=False, group=group), {"quant_method": "gptq"})
    tiny = {**models.find("llama").TINY, "intermediate_size": 96}
    source = make_checkpoint(tmp_path / "float", **tiny)
    write_checkpoint(source, tmp_path / "checkpoint", layout)
    export_llm(
        open_checkpoint(str(tmp_path / "checkpoint")),
        tmp_path / "bundle",
        ExportOptions(dtype="fp32"),
    )
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="same")
    build_engine(
        "llm", tmp_path / "bundle", tmp_path / "engine", plan, "onnxruntime", lambda _: None
    )
    model = ir.load(tmp_path / "bundle/model.onnx")
    part = next(weight for _, weight in linear_layers(model.graph) if weight.kind == "int4")
    assert part.packing == ((8, 32) if group == 24 else (4, 32))
    assert part.has_zero_points == (group == 96)
    blocks, dense = part.blocks(), part.dense()
    zeros = 128 if blocks.zero_points is None else _low_first(blocks.zero_points, 3)[..., None]
    codes = blocks.codes if blocks.bits == 8 else _low_first(blocks.codes, 32)
    found = (codes.astype(np.float32) - zeros) * blocks.scales[..., None]
    limit = np.abs(dense).max() / 200 if group == 24 else 1e-6
    np.testing.assert_allclose(found.reshape(dense.T.shape), dense.T, atol=limit)


def _low_first(pairs: np.ndarray, count: int) -> np.ndarray:
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1)[..., :count]
