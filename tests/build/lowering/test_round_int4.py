"""`llm_build --quantize int4|int8`: float weights rounded on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from conftest import make_checkpoint

from edgellm.build.engine import build_engine
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.round_int4 import nearest_int4
from edgellm.build.lowering.linears.weights import LinearWeight
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu import linears
from edgellm.build.onnxruntime_cpu.linears import ALL_INPUTS, COARSE_INPUTS, RowInt8Kernel
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.core.onnx_functions import (
    FUNCTIONS,
    LINEAR,
)
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

_FLOAT = ir.DataType.FLOAT
IDS = np.random.default_rng(4).integers(9, 96, 20)


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    """A checkpoint and its bundle; 96 is no multiple of 64."""
    folder = tmp_path_factory.mktemp("float")
    tiny = {**models.find("llama").TINY, "intermediate_size": 96, "tie_word_embeddings": False}
    source = make_checkpoint(folder / "checkpoint", **tiny)
    export_llm(open_checkpoint(str(source)), folder / "bundle", ExportOptions(dtype="fp32"))
    return source, folder / "bundle"


def _engine_logits(bundle: Path, engine: Path, quantize: str) -> np.ndarray:
    plan = Plan(
        max_input_len=48,
        kv_capacity=64,
        threads=1,
        prefill="same",
        quantize=quantize,
        options=CpuOptions("onnxruntime"),
    )
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    manifest = load_engine(engine, LLM_ENGINE)
    assert [graph.precision for graph in manifest.main_graphs] == [quantize]
    session = open_decoder(engine, manifest)
    return session.run(IDS, 0, np.arange(20)).logits


def _reference(source: Path, weights: Callable, inputs: Callable | None = None) -> np.ndarray:
    """Logits of transformers, with these functions applied to weights and inputs of layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.copy_(torch.from_numpy(weights(module.weight.data.numpy())))
            if inputs is not None:
                module.register_forward_pre_hook(
                    lambda _, args, name=name: torch.from_numpy(inputs(name, args[0].numpy()))
                )
    with torch.no_grad():
        return model(torch.from_numpy(IDS)[None]).logits[0].numpy()


def _distances(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative error of each token [S]; later tokens attend to the earlier ones."""
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def test_int4_engines_compute_with_rounded_weights(float_model, tmp_path):
    """The engine of a model with rounded weights; its kernel rounds inputs, too."""
    source, bundle = float_model
    found = _engine_logits(bundle, tmp_path / "engine", "int4")
    assert not list((tmp_path / "engine").glob("*rounded*"))
    assert np.all(_distances(found, _reference(source, _rounded)) < 0.2)


def test_int8_engines_round_weights_per_channel_and_inputs_in_two_terms(float_model, tmp_path):
    """Weights have a scale for each column; inputs as two int8 terms are nearly exact."""
    source, bundle = float_model
    found = _engine_logits(bundle, tmp_path / "engine", "int8")
    assert _distances(found, _reference(source, _int8_rows)).max() < 1e-3
    one_term = _reference(source, _int8_rows, lambda _, x: _int8_rows(x))
    assert np.median(_distances(found, one_term)) > 1e-3


@pytest.mark.parametrize("name", ["mlp.gate_proj+mlp.up_proj", "self_attn.q_proj", "lm_head"])
def test_coarse_inputs_cost_precision_in_named_layers_only(name, tmp_path):
    """Inputs of named layers keep 8 bits; a suffix may match all names."""
    import onnxruntime

    x = np.random.default_rng(1).normal(size=(2, 5, 96)).astype(np.float32)
    x[..., 7] *= 40  # an outlier, which costs the other channels their precision
    weight = np.random.default_rng(2).normal(size=(96, 32)).astype(np.float32)
    errors = {}
    for kind, one_term in (("fine", ()), ("coarse", COARSE_INPUTS), ("all", ALL_INPUTS)):
        path = tmp_path / f"{kind}.onnx"
        _save_layer(path, RowInt8Kernel(one_term), name, weight)
        y = onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
        exact = x @ (_int8_rows(np.ascontiguousarray(weight.T)).T)
        errors[kind] = np.abs(y - exact).max()
    assert 50 * errors["fine"] < errors["all"]
    assert errors["coarse"] == errors["all" if name.endswith("up_proj") else "fine"]


@pytest.mark.parametrize("has_dot_products", [False, True])
def test_large_int8_products_do_not_saturate(has_dot_products, tmp_path, monkeypatch):
    """AVX2 would saturate the sums of pairs: there weights are unsigned."""
    import onnxruntime

    monkeypatch.setattr(linears, "has_fast_int8", lambda: has_dot_products)
    x = np.random.default_rng(1).uniform(0.9, 1, (2, 5, 96)).astype(np.float32)
    weight = np.random.default_rng(2).uniform(0.9, 1, (96, 32)).astype(np.float32)
    _save_layer(tmp_path / "layer.onnx", RowInt8Kernel(), "layer", weight)
    stored = ir.load(tmp_path / "layer.onnx").graph.initializers
    assert ("layer.int8" in stored) == has_dot_products
    assert ("layer.uint8" in stored) != has_dot_products
    if has_fast_int8() or not has_dot_products:
        y = onnxruntime.InferenceSession(tmp_path / "layer.onnx").run(None, {"x": x})[0]
        np.testing.assert_allclose(y, x @ weight, rtol=2e-3)


def _save_layer(path: Path, kernel: RowInt8Kernel, name: str, weight: np.ndarray) -> None:
    """A graph of one linear layer x [2, 5, in] -> y."""
    x = ir.Value(name="x", shape=ir.Shape(["b", "s", len(weight)]), type=ir.TensorType(_FLOAT))
    table = ir.Value(name="w", const_value=ir.tensor(np.ascontiguousarray(weight.T)))
    table.shape, table.type = ir.Shape(weight.T.shape), ir.TensorType(_FLOAT)
    call = ir.Node(FUNCTIONS, LINEAR, [x, table], name="layer.Linear")
    graph = ir.Graph(
        [x],
        [call.outputs[0]],
        nodes=[call],
        initializers=[table],
        opset_imports={"": 21, "com.microsoft": 1},
    )
    layer = LinearWeight.of(call)
    assert layer is not None
    weights = WeightFile(path.with_suffix(".data"))
    editor = GraphEditor(graph, weights)
    editor.cursor = call
    y = kernel.emit(editor, x, layer, name)
    y.type = ir.TensorType(_FLOAT)
    graph.outputs[:] = [y]
    graph.remove(call)
    weights.close()
    ir.save(ir.Model(graph, ir_version=10), path)


def _int8_rows(array: np.ndarray) -> np.ndarray:
    scale = np.abs(array).max(-1, keepdims=True) / np.float32(127)
    return np.rint(array / scale) * scale


def _rounded(weight: np.ndarray, *, has_signs: bool = True) -> np.ndarray:
    packed, scales = nearest_int4(np.ascontiguousarray(weight.T), 32, has_signs=has_signs)
    assert (scales < 0).any() == has_signs
    codes = np.stack([packed & 15, packed >> 4], 1).astype(np.int32).reshape(weight.T.shape)
    return ((codes ^ 8) - 8).T * np.repeat(scales, 32, 0).T


def test_clipping_and_signed_scales_reduce_the_rounding_error():
    weight = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    blocks = weight.reshape(64, -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 7
    plain = np.clip(np.rint(blocks / scale), -8, 7) * scale
    for has_signs, share in ((False, 0.85), (True, 0.75)):
        found = _rounded(weight, has_signs=has_signs).reshape(blocks.shape)
        errors = np.sum((found - blocks) ** 2, -1)
        assert np.all(errors <= np.sum((plain - blocks) ** 2, -1) + 1e-6)
        assert errors.sum() < share * np.sum((plain - blocks) ** 2)
