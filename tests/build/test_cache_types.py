"""Types of KV caches; int8 against transformers with an equally rounded cache."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from conftest import assert_one_line_error, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.compiler import estimate
from edgellm.build.plan import Plan
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, Bundle, load_bundle, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

KEY, VALUE = 0.03, 0.02  # scales of an int8 cache


def _checkpoint(folder, kind, *, algorithm="INT8", drop=None, value=None):
    make_checkpoint(folder, **models.find(kind).TINY)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    factor = 127 / 448 if algorithm == "FP8" else 1
    for layer in layers:
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}k_proj.k_scale"] = torch.tensor(KEY * factor)
        tensors[f"{prefix}v_proj.v_scale"] = torch.tensor(VALUE * factor)
    if drop is not None:
        del tensors[drop]
    if value is not None:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(value)
    save_file(tensors, path)
    described = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))
    return folder


def _export(checkpoint, bundle) -> Bundle:
    return export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype="fp32"))


def _reference(checkpoint, ids, monkeypatch) -> np.ndarray:
    """Logits of transformers whose attention sees int8 keys and values, these after the rope."""
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def rounded(module, query, key, value, *args, **kwargs):
        key = (key / KEY).round().clamp(-128, 127) * KEY
        value = (value / VALUE).round().clamp(-128, 127) * VALUE
        return plain(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", rounded)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_int8_cache_keeps_logits_through_compaction(kind, tmp_path, monkeypatch):
    """Prefill, single tokens, and a tree whose second branch is accepted."""
    checkpoint = _checkpoint(tmp_path / "checkpoint", kind)
    manifest = _export(checkpoint, tmp_path / "bundle")
    ranges = manifest.decoder.kv.ranges
    assert ranges.calibrated_for == "int8"
    assert ranges.keys == pytest.approx([KEY * 127] * manifest.decoder.kv.num_layers)
    plan = Plan(max_input_len=32, kv_capacity=48, threads=1, prefill="same", quantize="none")
    build_engine(
        "llm", tmp_path / "bundle", tmp_path / "engine", plan, "onnxruntime", lambda _: None
    )
    engine = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert engine.decoder.kv.dtype == "int8"
    session = open_decoder(tmp_path / "engine", engine)
    ids = np.random.default_rng(0).integers(0, 90, 16)
    (tmp_path / "checkpoint" / "hf_quant_config.json").unlink()  # not for transformers
    expected = _reference(checkpoint, ids, monkeypatch)
    first = session.run(ids[:9], 0, np.arange(9)).logits.copy()
    next_rows = [
        session.run(ids[at : at + 1], at, np.array([0])).logits[0].copy() for at in range(9, 12)
    ]
    # Row 0 continues the text wrongly; rows 1 to 4 continue it as it is.
    mask = np.tri(5, dtype=np.bool_)
    mask[1:, 0] = False
    places = np.array([12, 12, 13, 14, 15])
    tree = session.run(
        np.array([5, *ids[12:]]), 12, np.arange(5), position_ids=places, tree_mask=mask
    ).logits.copy()
    found = np.concatenate([first, next_rows, tree[1:]])
    np.testing.assert_allclose(found, expected, atol=2e-2)  # a code may fall the other way
    assert np.median(np.abs(found - expected)) < 1e-4
    session.kv.compact(12, np.array([1, 2, 3]))
    again = session.run(ids[15:], 15, np.array([0])).logits[0].copy()
    np.testing.assert_allclose(again, tree[4], atol=1e-4)
    saved = session.kv.read(15)
    assert saved.dtype == np.int8
    session.run(ids[::-1], 0, np.array([0]))
    session.kv.write(saved)
    np.testing.assert_array_equal(session.run(ids[15:], 15, np.array([0])).logits[0], again)


def test_kv_cache_flag_overrides_the_automatic_type(tmp_path):
    """FP8 scales make an int8 cache only if asked, rounded weights one of halves by themselves."""
    _export(_checkpoint(tmp_path / "checkpoint", "llama", algorithm="FP8"), tmp_path / "bundle")
    sizes = {}
    for wanted in ("auto", "float", "float16", "int8"):
        plan = Plan(
            max_input_len=32,
            kv_capacity=48,
            threads=1,
            prefill="same",
            quantize="none",
            kv_cache=wanted,
        )
        engine = tmp_path / wanted
        build_engine("llm", tmp_path / "bundle", engine, plan, "onnxruntime", lambda _: None)
        sizes[wanted] = load_engine(engine, LLM_ENGINE).decoder.kv.bytes_per_token
    assert sizes["auto"] == sizes["float"] == 2 * sizes["float16"] == 4 * sizes["int8"]
    for wanted in ("float16", "int8"):
        model = onnx.load(tmp_path / wanted / "decode.onnx", load_external_data=False)
        past = [value for value in model.graph.input if value.name.startswith("past_key_values.")]
        (held,) = {value.type.tensor_type.elem_type for value in past}
        assert held == getattr(onnx.TensorProto, wanted.upper())
    bundle = load_bundle(tmp_path / "bundle", LLM_BUNDLE)
    halves, floats = (
        estimate(
            tmp_path / "bundle",
            bundle,
            Plan(
                max_input_len=32,
                kv_capacity=48,
                threads=1,
                prefill="same",
                quantize="int8",
                kv_cache=wanted,
            ),
        ).kv_bytes
        for wanted in ("auto", "float")
    )
    assert 2 * halves == floats


def test_int8_needs_calibrated_ranges(command_here, tiny_bundle, tmp_path):
    result = command_here(
        "llm_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine",
        "--maxInputLen", 32, "--maxKVCacheCapacity", 48, "--kvCache", "int8",
    )  # fmt: skip
    assert_one_line_error(result, "--kvCache int8", "--kv_cache_quantization int8")
    result = command_here(
        "llm_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine",
        "--kvCache", "int4",
    )  # fmt: skip
    assert_one_line_error(result, "--kvCache int4: give auto, float, float16, int8 or fp8")
    result = command_here(
        "llm_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine",
        "--maxInputLen", 32, "--maxKVCacheCapacity", 48, "--kvCache", "float16",
        "--kernels", "onnxruntime",
    )  # fmt: skip
    assert_one_line_error(result, "--kvCache float16: ONNX Runtime's operators keep float32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": "model.layers.1.self_attn.v_proj.v_scale"}, "1.self_attn.v_proj.v_scale is miss"),
        ({"value": 0.0}, "k_scale is not a positive number"),
        ({"value": float("nan")}, "k_scale is not a positive number"),
        ({"value": [0.1, 0.2]}, "k_scale is not a positive number"),
    ],
)
def test_invalid_cache_scales_are_rejected(tmp_path, change, words):
    checkpoint = _checkpoint(tmp_path / "checkpoint", "llama", **change)
    with pytest.raises(BrokenArtifactError, match=words):
        _export(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
