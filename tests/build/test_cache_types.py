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
from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
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


_PLAIN = ALL_ATTENTION_FUNCTIONS["sdpa"]


def _with_int8_rows(module, query, key, value, *args, **kwargs):
    key = (key / KEY).round().clamp(-128, 127) * KEY
    value = (value / VALUE).round().clamp(-128, 127) * VALUE
    return _PLAIN(module, query, key, value, *args, **kwargs)


def _with_bfloat16(_module, query, key, value, *_args, **_kwargs):
    """Causal attention of rounded rows, whose weights are rounded below the largest."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.bfloat16().float().repeat_interleave(groups, 1) for x in (key, value))
    scores = (query * query.shape[-1] ** -0.5).bfloat16().float() @ key.transpose(2, 3)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    mixed = weights.bfloat16().float() @ value / weights.sum(-1, keepdim=True)
    return mixed.transpose(1, 2), None


def _reference(checkpoint, ids, monkeypatch, attend) -> np.ndarray:
    """Logits of transformers with this attention; keys reach it after the rope."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    return _logits(checkpoint, ids)


def _logits(checkpoint, ids) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_int8_cache_keeps_logits_through_compaction(kind, tmp_path, monkeypatch):
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
    expected = _reference(checkpoint, ids, monkeypatch, _with_int8_rows)
    found = _through_compaction(session, ids)
    np.testing.assert_allclose(found, expected, atol=2e-2)  # a code may fall the other way
    assert np.median(np.abs(found - expected)) < 1e-4
    assert session.kv.read(15).dtype == np.int8


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_bfloat16_cache_keeps_logits_through_compaction(kind, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "checkpoint", **models.find(kind).TINY)
    _export(tmp_path / "checkpoint", tmp_path / "bundle")
    plan = Plan(max_input_len=32, kv_capacity=48, threads=1, quantize="none", kv_cache="bfloat16")
    build_engine(
        "llm", tmp_path / "bundle", tmp_path / "engine", plan, "onnxruntime", lambda _: None
    )
    session = open_decoder(tmp_path / "engine", load_engine(tmp_path / "engine", LLM_ENGINE))
    ids = np.random.default_rng(0).integers(0, 90, 16)
    expected = _reference(tmp_path / "checkpoint", ids, monkeypatch, _with_bfloat16)
    found = _through_compaction(session, ids)
    np.testing.assert_allclose(found, expected, atol=2e-2)  # a number may be rounded the other way
    assert np.median(np.abs(found - expected)) < 1e-4


def _through_compaction(session, ids) -> np.ndarray:
    """Logits of 16 tokens: a prefill, single tokens, and a tree whose second branch is accepted."""
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
    session.kv.compact(12, np.array([1, 2, 3]))
    again = session.run(ids[15:], 15, np.array([0])).logits[0].copy()
    np.testing.assert_allclose(again, tree[4], atol=1e-4)
    saved = session.kv.read(15)
    session.run(ids[::-1], 0, np.array([0]))
    session.kv.write(saved)
    np.testing.assert_array_equal(session.run(ids[15:], 15, np.array([0])).logits[0], again)
    return found


def test_kv_cache_flag_overrides_the_automatic_type(tmp_path):
    """FP8 scales make an int8 cache only if asked, rounded weights one of halves by themselves."""
    _export(_checkpoint(tmp_path / "checkpoint", "llama", algorithm="FP8"), tmp_path / "bundle")
    sizes = {}
    for wanted in ("auto", "float", "float16", "bfloat16", "int8"):
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
    assert sizes["bfloat16"] == sizes["float16"]
    for wanted, stored in (("float16", "FLOAT16"), ("bfloat16", "UINT16"), ("int8", "INT8")):
        model = onnx.load(tmp_path / wanted / "decode.onnx", load_external_data=False)
        past = [value for value in model.graph.input if value.name.startswith("past_key_values.")]
        (held,) = {value.type.tensor_type.elem_type for value in past}
        assert held == getattr(onnx.TensorProto, stored)
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
        "--kvCache", "int3",
    )  # fmt: skip
    assert_one_line_error(
        result, "--kvCache int3: give auto, float, float16, bfloat16, int8, int4 or fp8"
    )
    for wanted in ("float16", "bfloat16", "int4"):
        result = command_here(
            "llm_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine",
            "--maxInputLen", 32, "--maxKVCacheCapacity", 48, "--kvCache", wanted,
            "--kernels", "onnxruntime",
        )  # fmt: skip
        assert_one_line_error(
            result, f"--kvCache {wanted}: ONNX Runtime's operators keep float32", "--kernels"
        )
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


RECENT = 128  # positions that a token attends to in float16


def _hadamard(size: int) -> torch.Tensor:
    place = range(size)
    signs = [[(-1.0) ** bin(i & j).count("1") for j in place] for i in place]
    return torch.tensor(signs) / size**0.5


def _in_codes(x: torch.Tensor, ends: list[float], low: int, high: int) -> torch.Tensor:
    """Heads of at most 32 numbers, by the scale of least error that gives the largest an end."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scales = (largest / torch.tensor(ends))[..., None]
    scales = scales.half().float() if low == -8 else scales
    held = (x[..., None, :] / scales).round().clamp(low, high) * scales
    best = ((held - x[..., None, :]) ** 2).sum(-1).argmin(-1)
    index = best[..., None, None].expand(*best.shape, 1, x.shape[-1])
    return held.gather(-2, index).squeeze(-2)


def _in_4_bits_and_halves(_, query, key, value, __, scaling, **___):
    """Attention of transformers to rotated heads: the last positions in halves."""
    groups, count, size = query.shape[1] // key.shape[1], *query.shape[2:]
    query, key, value = (each @ _hadamard(size) for each in (query, key, value))
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    codes = _in_codes(query, [127.0], -127, 127)
    ends = [-8, -7.5, -7, -6.5, -8.5, -9]
    keys, values = (_in_codes(each, ends, -8, 7) for each in (key, value))
    distance = torch.arange(count)[:, None] - torch.arange(count)
    last = distance < RECENT
    scores = torch.where(last, query @ key.half().float().mT, codes @ keys.mT) * scaling
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    found = (weights * last) @ value.half().float() + (weights * ~last) @ values
    return (found @ _hadamard(size)).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_int4_cache_keeps_logits_through_compaction(kind, tmp_path, monkeypatch):
    """Prefill in chunks, a tree whose second branch is accepted, and a restored copy."""
    tiny = {**models.find(kind).TINY, "head_dim": 16, "max_position_embeddings": 1024}
    make_checkpoint(tmp_path / "checkpoint", **tiny)
    _export(tmp_path / "checkpoint", tmp_path / "bundle")
    plan = Plan(max_input_len=512, kv_capacity=1024, threads=1, quantize="none", kv_cache="int4")
    engine = tmp_path / "engine"
    build_engine("llm", tmp_path / "bundle", engine, plan, "onnxruntime", lambda _: None)
    manifest = load_engine(engine, LLM_ENGINE)
    kv = manifest.decoder.kv
    assert kv.bytes_per_token == 2 * kv.num_layers * kv.num_kv_heads * 18
    session = open_decoder(engine, manifest)
    ids = np.random.default_rng(0).integers(0, 90, 604)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", _in_4_bits_and_halves)
    expected = _logits(tmp_path / "checkpoint", ids)
    found = [
        session.run(ids[at : at + 200], at, np.arange(200)).logits.copy() for at in (0, 200, 400)
    ]
    # Row 0 continues the text wrongly; rows 1 to 4 continue it as it is.
    mask = np.tri(5, dtype=np.bool_)
    mask[1:, 0] = False
    places = np.array([600, 600, 601, 602, 603])
    tree = session.run(
        np.array([5, *ids[600:]]), 600, np.arange(5), position_ids=places, tree_mask=mask
    ).logits.copy()
    found = np.concatenate([*found, tree[1:]])
    error = np.abs(found - expected)
    # Codes and halves may round the other way: noise of 1e-6 in the queries, keys and values of the
    # reference changes its own logits by as much.
    assert np.median(error) < 1e-3
    assert np.quantile(error, 0.99) < 5e-2
    session.kv.compact(600, np.array([1, 2, 3]))
    again = session.run(ids[603:], 603, np.array([0])).logits[0].copy()
    np.testing.assert_array_equal(again, tree[4])
    saved, least = session.kv.read(603), session.kv.min_length
    assert saved.dtype == np.uint8
    session.run(ids[:200][::-1], 0, np.array([0]))
    session.kv.write(saved, ids[:603].tolist(), least)
    np.testing.assert_array_equal(session.run(ids[603:], 603, np.array([0])).logits[0], again)


def test_int4_rejects_short_windows(tmp_path):
    make_checkpoint(
        tmp_path / "checkpoint", **{**models.find("gemma3_text").TINY, "sliding_window": 128}
    )
    _export(tmp_path / "checkpoint", tmp_path / "bundle")
    plan = Plan(max_input_len=32, kv_capacity=256, threads=1, kv_cache="int4")
    with pytest.raises(UnsupportedModelError, match="layers of this model attend to 128") as raised:
        estimate(tmp_path / "bundle", load_bundle(tmp_path / "bundle", LLM_BUNDLE), plan)
    assert raised.value.hint == "give --kvCache float16"
