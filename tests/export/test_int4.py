"""INT4 checkpoints: the portable graph and the CPU engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import make_checkpoint
from harness.models.checkpoints import round_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.checkpoints.checkpoint import Safetensors
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.quantize.formats.modelopt import pack_int4


def _dequantize(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """ModelOpt's definition, element by element of its documentation."""
    out, width = packed.shape[0] * 2, packed.shape[1]
    codes = np.empty((out, width), np.int32)
    codes[0::2], codes[1::2] = packed & 15, packed >> 4
    codes[codes > 7] -= 16
    return codes * np.repeat(scale, width // scale.shape[1], axis=1)


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([16, 32]), st.integers(0, 99))
def test_packing_rounds_to_the_nearest_code(half_rows, blocks, block_size, seed):
    weight = np.random.default_rng(seed).normal(size=(2 * half_rows, blocks * block_size))
    weight = weight.astype(np.float32)
    weight[0, :block_size] = 0  # an empty block
    packed, scale = pack_int4(weight, block_size)
    error = np.abs(_dequantize(packed, scale) - weight)
    assert packed.shape == (half_rows, blocks * block_size)
    assert np.all(error <= np.repeat(scale, block_size, axis=1) / 2 + 1e-6)


@pytest.fixture(scope="module")
def reference(tiny_int4_bundle):
    """Logits of transformers with dequantized weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tiny_int4_bundle.parent / "checkpoint"
    tensors = Safetensors([folder / "model.safetensors"])
    state = {}
    for name, info in tensors.infos().items():
        kind = {"F32": np.float32, "F16": np.float16, "U8": np.uint8}[info.dtype]
        data = b"".join(bytes(piece) for piece in tensors.stream(name))
        state[name] = np.frombuffer(data, kind).reshape(info.shape)
    weights = {
        name: _dequantize(array, state[f"{name}_scale"]) if array.dtype == np.uint8 else array
        for name, array in state.items()
        if not name.endswith("_scale")
    }
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict({n: torch.tensor(np.float32(a)) for n, a in weights.items()})
    ids = np.random.default_rng(4).integers(9, 96, 30)
    with torch.no_grad():
        return ids, model(torch.from_numpy(ids)[None]).logits[0].numpy()


def test_the_portable_int4_graph_equals_the_dequantized_weights(
    tiny_int4_bundle, reference, monkeypatch
):
    """Without optimizations ONNX Runtime runs the graph's nodes: dequantize, then multiply."""
    import onnxruntime as ort

    ids, expected = reference
    manifest = load_bundle(tiny_int4_bundle, LLM_BUNDLE)
    literal = ort.SessionOptions()
    literal.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    monkeypatch.setattr(ort, "SessionOptions", lambda: literal)
    found = run_portable(tiny_int4_bundle, manifest, ids, 20)
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("prefill", ["same", "int8"])
def test_the_int4_engine_is_close_to_the_dequantized_weights(
    tiny_int4_bundle, reference, tmp_path, prefill
):
    """Both kernels round activations to int8: close to the exact logits, not equal."""
    ids, expected = reference
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill=prefill)
    build_engine("llm", tiny_int4_bundle, tmp_path / "engine", plan, "onnxruntime", lambda _: None)
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    session = open_decoder(tmp_path / "engine", manifest)
    logits = [session.run(ids[:20], 0, np.arange(20)).logits.copy()]
    for position in range(20, 30):
        result = session.run(ids[position : position + 1], position, np.array([0]))
        logits.append(result.logits.copy())
        assert result.token_ids[0] == result.logits[0].argmax()
    found = np.concatenate(logits)
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 0.15  # below: something was silently computed in float


def test_sliding_windows_hold_in_both_graphs(tmp_path):
    """The one-token graph of an INT4 engine needs no mask, except for a window."""
    checkpoint = make_checkpoint(tmp_path / "float", **models.find("mistral").TINY)
    round_checkpoint(str(checkpoint), tmp_path / "int4", 16)
    bundle = tmp_path / "bundle"
    export_llm(open_checkpoint(str(tmp_path / "int4")), bundle, ExportOptions(dtype="fp32"))
    logits = {}
    for prefill in ("same", "int8"):
        plan = Plan(
            max_input_len=48,
            kv_capacity=64,
            threads=1,
            prefill=prefill,
            options=CpuOptions("onnxruntime"),
        )
        build_engine("llm", bundle, tmp_path / prefill, plan, "onnxruntime", lambda _: None)
        manifest = load_engine(tmp_path / prefill, LLM_ENGINE)
        session = open_decoder(tmp_path / prefill, manifest)
        ids = np.random.default_rng(6).integers(9, 96, 40)
        session.run(ids[:1], 0, np.array([0]))  # rows one by one: the decode graph alone
        for position in range(1, 40):
            result = session.run(ids[position : position + 1], position, np.array([0]))
        logits[prefill] = result.logits[0].copy()
    np.testing.assert_allclose(logits["int8"], logits["same"], atol=1e-4)


def test_an_unknown_quantization_is_rejected(tiny_int4_bundle, tmp_path):
    from safetensors.numpy import load_file, save_file

    source = tiny_int4_bundle.parent / "checkpoint"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_2"] = np.ones((), np.float32)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight is INT4 with 8-bit inputs"):
        export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", ExportOptions())
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
