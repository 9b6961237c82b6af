"""Sizes that are no multiple of what kernels compute in: heads, experts, layers, vocabularies.

The oracle is the model of transformers with the same weights: prompts in chunks, single tokens and
a tree.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

PARENTS = (-1, 0, 0, 1, 2)
MASK = np.eye(5, dtype=np.bool_)
for node, parent in enumerate(PARENTS[1:], 1):
    MASK[node] |= MASK[parent]
EXACT, HALVES = 1e-4, 1e-2  # of the largest logit
RANGE = 4.0  # of an int8 cache: of these tiny models, keys after the rope


def _export(folder, kind: str, **changes):
    checkpoint = make_checkpoint(folder / "checkpoint", **{**models.find(kind).TINY, **changes})
    return _bundle(checkpoint)


def _bundle(checkpoint):
    bundle = checkpoint.parent / "bundle"
    export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype="fp32"))
    return bundle


def _engine_logits(bundle, engine, ids, tree, **changes) -> np.ndarray:
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, max_verify_tree_size=12, **changes)
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    session = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    rows, begin = [], 0
    for count in (7, 1, 4, 1, len(ids) - 13):
        part = ids[begin : begin + count]
        rows.append(session.run(part, begin, np.arange(count)).logits.copy())
        begin += count
    places = begin + MASK.sum(1) - 1
    rows.append(
        session.run(tree, begin, np.arange(5), position_ids=places, tree_mask=MASK).logits.copy()
    )
    return np.concatenate(rows)


def _reference(checkpoint, ids, tree, attention="eager") -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention
    )

    def logits(text) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(text)[None]).logits[0].numpy()

    paths = [np.concatenate([ids, tree[np.flatnonzero(row)]]) for row in MASK]
    return np.concatenate([logits(ids), [logits(path)[-1] for path in paths]])


def _text() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.integers(9, 90, 24), random.integers(9, 90, 5)


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    assert np.abs(expected).max() > 1
    return float(np.abs(found - expected).max() / np.abs(expected).max())


_PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
HEADS = {
    "8": ("llama", {"head_dim": 8}),
    "12 queries share a key": ("llama", {"head_dim": 12, "num_key_value_heads": 1}),
    "20 with norms": ("qwen3", {"head_dim": 20}),
    "24 with windows": ("gemma2", {"head_dim": 24}),
    "40 turned in part": ("glm4", {"head_dim": 40, "rope_parameters": _PARTLY}),
    "56 between neighbours": ("ernie4_5", {"head_dim": 56}),
    "keys and values of two sizes": (
        "minicpm3",
        {
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "kv_lora_rank": 12,
            "rope_parameters": None,
        },
    ),
    "24, and 512 of global layers": ("gemma4_text", {"head_dim": 24, "global_head_dim": 512}),
    "120 of a hybrid": ("falcon_h1", {"head_dim": 120}),
    "keys, values and states of three sizes": (
        "kimi_linear",
        {
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "linear_head_dim": 20,
            "mlp_layer_types": ["dense"] * 3,  # rounding takes other experts
        },
    ),
}


_OF_NIGHTS = {
    "keys, values and states of three sizes",
    "12 queries share a key",
    "20 with norms",
    "24 with windows",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in _OF_NIGHTS)) for name in HEADS],
)
def test_attention_heads_of_any_size_equal_the_portable_graph(tmp_path, name):
    kind, changes = HEADS[name]
    bundle, (ids, tree) = _export(tmp_path, kind, **changes), _text()
    expected = _reference(tmp_path / "checkpoint", ids, tree)
    for cache, allowed in (("float", EXACT), ("float16", HALVES)):
        found = _engine_logits(bundle, tmp_path / cache, ids, tree, kv_cache=cache)
        assert _off(found, expected) < allowed
    quantize = ("int8", "int4")[[*HEADS].index(name) % 2]  # the build compares every layer
    _engine_logits(bundle, tmp_path / quantize, ids, tree, quantize=quantize)


@pytest.mark.parametrize("head_dim", [12, 20, 40])
def test_an_int8_cache_supports_any_head_size(tmp_path, monkeypatch, head_dim):
    checkpoint = make_checkpoint(
        tmp_path / "checkpoint", **{**models.find("qwen3").TINY, "head_dim": head_dim}
    )
    step, path = RANGE / 127, checkpoint / "model.safetensors"
    tensors = load_file(path)
    for layer in {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}:
        for part in "kv":
            name = f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
            tensors[name] = torch.tensor(step)
    save_file(tensors, path)
    described = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "INT8"}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(described))
    bundle, (ids, tree) = _bundle(checkpoint), _text()
    (checkpoint / "hf_quant_config.json").unlink()  # not for transformers
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def rounded(module, query, *rows, **given):
        key, value = ((each / step).round().clamp(-128, 127) * step for each in rows[:2])
        return plain(module, query, key, value, *rows[2:], **given)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", rounded)
    expected = _reference(checkpoint, ids, tree, "sdpa")
    found = _engine_logits(bundle, tmp_path / "engine", ids, tree)
    assert load_engine(tmp_path / "engine", LLM_ENGINE).decoder.kv.dtype == "int8"
    errors = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(errors) < EXACT  # a code may fall the other way
    assert errors.max() < HALVES


EXPERTS = {
    "24 with gates": ("qwen3_moe", {"moe_intermediate_size": 24}),
    "40 with biases": ("gpt_oss", {"intermediate_size": 40}),
    "72 without gates": ("nemotron_h", {"moe_intermediate_size": 72}),
    "100 of an odd width": ("qwen3_moe", {"moe_intermediate_size": 100, "hidden_size": 72}),
}


@pytest.mark.each_change("24 with gates", "40 with biases")
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_any_width_equal_the_portable_graph(tmp_path, name):
    """The build compares each expert alone, for all kinds of rounding."""
    kind, changes = EXPERTS[name]
    bundle, (ids, tree) = _export(tmp_path, kind, **changes), _text()
    expected = _reference(tmp_path / "checkpoint", ids, tree)
    assert _off(_engine_logits(bundle, tmp_path / "floats", ids, tree), expected) < EXACT
    for quantize in ("int8", "int4"):
        _engine_logits(bundle, tmp_path / quantize, ids, tree, quantize=quantize)


@pytest.mark.parametrize("kernels", ["edgellm", "onnxruntime"])
def test_layers_and_vocabularies_of_any_size_equal_the_portable_graph(tmp_path, kernels):
    changes = {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 101, "head_dim": 24}
    bundle, (ids, tree) = _export(tmp_path, "llama", **changes), _text()
    expected, options = _reference(tmp_path / "checkpoint", ids, tree), CpuOptions(kernels)
    found = _engine_logits(bundle, tmp_path / "floats", ids, tree, options=options)
    assert _off(found, expected) < EXACT
    for quantize in ("int8", "int4"):
        _engine_logits(bundle, tmp_path / quantize, ids, tree, quantize=quantize, options=options)


@pytest.mark.parametrize(
    ("kernels", "head_dim", "said", "instead"),
    [
        ("onnxruntime", 20, "head_dim 20: with --kernels onnxruntime", "leave out --kernels"),
        ("edgellm", 520, "head_dim 520: edgellm's kernels", "give --kernels onnxruntime"),
    ],
)
def test_head_sizes_without_a_kernel_are_rejected_before_the_work(
    tmp_path, kernels, head_dim, said, instead
):
    """The error names config keys, before any computation."""
    bundle = _export(tmp_path, "llama", head_dim=head_dim)
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, options=CpuOptions(kernels))
    steps = []
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        build_engine("llm", bundle, tmp_path / "engine", plan, "onnxruntime", steps.append)
    assert instead in str(caught.value.hint)
    assert "Attention" not in str(caught.value)
    assert not steps
    assert not (tmp_path / "engine").exists()
