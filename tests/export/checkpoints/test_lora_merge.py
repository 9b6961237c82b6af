"""`edgellm-export llm --lora_dir`: adapters of PEFT merged into the weights, or rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_one_line_error, make_checkpoint
from lora_adapters import edit_config, logits_of, reference, write_adapter
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable, verify_bundle

TOKENS = np.arange(12) * 7 % 90


@pytest.fixture
def adapter(tiny_checkpoint, tmp_path):
    return write_adapter(tmp_path / "adapter", tiny_checkpoint)


def _merge(checkpoint, adapter, dtype="fp32"):
    options = ExportOptions(dtype=dtype, lora_dir=str(adapter))
    bundle = adapter.parent / "bundle"
    return bundle, export_llm(open_checkpoint(str(checkpoint)), bundle, options)


def test_export_merges_a_lora_adapter(command_here, tiny_checkpoint, adapter, tmp_path):
    result = command_here(
        "edgellm-export",
        "llm",
        "--model_dir",
        tiny_checkpoint,
        "--lora_dir",
        adapter,
        "--output_dir",
        tmp_path / "bundle",
        "--dtype",
        "fp32",
        "--verify",
    )
    assert result.returncode == 0, result.stderr
    assert "top-1 agreement 100.0%" in result.stdout
    manifest = load_bundle(tmp_path / "bundle", LLM_BUNDLE)
    assert manifest.options["lora_dir"] == str(adapter)
    found = run_portable(tmp_path / "bundle", manifest, TOKENS, 8)
    expected = logits_of(reference(tiny_checkpoint, adapter, {"": 2.0}), TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_ranks_and_scales_may_differ_by_layer(tiny_checkpoint, tmp_path):
    adapter = write_adapter(
        tmp_path / "adapter",
        tiny_checkpoint,
        ranks={"o_proj": 9},
        use_rslora=True,
        alpha_pattern={r"layers\.\d+\.mlp\.up_proj": 4, "k_proj": 2.0},
    )
    scales = {"o_proj": 8 / 3, "up_proj": 2.0, "k_proj": 1.0, "": 4.0}
    bundle, manifest = _merge(tiny_checkpoint, adapter)
    expected = logits_of(reference(tiny_checkpoint, adapter, scales), TOKENS)
    np.testing.assert_allclose(run_portable(bundle, manifest, TOKENS, 8), expected, atol=2e-4)


@pytest.mark.nightly
def test_layers_of_latent_and_delta_attention_may_change(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "c", **models.find("kimi_linear").TINY)
    parts = *"qkvbo", "g_a", "g_b", "kv_b"
    targets = (*(f"self_attn.{part}_proj" for part in parts), "kv_a_proj_with_mqa")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, targets=targets)
    bundle, manifest = _merge(checkpoint, adapter)
    expected, before = (
        logits_of(reference(checkpoint, adapter, {"": scale}), TOKENS) for scale in (2.0, 0.0)
    )
    assert np.abs(expected - before).max() > 1
    np.testing.assert_allclose(run_portable(bundle, manifest, TOKENS, 8), expected, atol=2e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_may_change(tmp_path, is_tied):
    """As PEFT computes it; of a tied head the embedding stays."""
    tiny = {**models.find("llama").TINY, "tie_word_embeddings": is_tied}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **tiny)
    adapter = write_adapter(tmp_path / "adapter", checkpoint, targets=("embed_tokens", "q_proj"))
    path = adapter / "adapter_model.safetensors"
    save_file(_renamed(load_file(path), "model.embed_tokens", "lm_head"), path)
    bundle, manifest = _merge(checkpoint, adapter)
    expected = _with_head(checkpoint, adapter)
    np.testing.assert_allclose(run_portable(bundle, manifest, TOKENS, 8), expected, atol=2e-4)
    merged = open_checkpoint(str(checkpoint))
    assert "top-1 agreement 100.0%" in verify_bundle(merged, bundle, manifest)


def _with_head(checkpoint, adapter):
    """Logits with PEFT's sum at every layer: `y + scale * x A^T B^T`."""
    model = reference(checkpoint, adapter, {"q_proj": 2.0, "lm_head": 0.0})
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (torch.from_numpy(tensors[f"base_model.model.lm_head.lora_{x}.weight"]) for x in "AB")
    model.lm_head.register_forward_hook(lambda _, x, y: y + 2.0 * (x[0] @ a.T @ b.T))
    return logits_of(model, TOKENS)


def test_bfloat16_keeps_its_type(tmp_path):
    """Pieces of the file end within rows: 96 inputs do not divide the size of a piece."""
    checkpoint = make_checkpoint(tmp_path / "c", dtype="bfloat16", **models.find("llama").TINY)
    wide = write_adapter(tmp_path / "wide" / "adapter", checkpoint, targets=("q_proj",))
    manifest = _merge(checkpoint, wide, "fp16")[1]
    plain = export_llm(open_checkpoint(str(checkpoint)), tmp_path / "plain", ExportOptions())
    sizes = [each.files["model.weights"].num_bytes for each in (manifest, plain)]
    assert sizes[0] == sizes[1]
    hashes = [each.files["model.weights"].sha256 for each in (manifest, plain)]
    assert hashes[0] != hashes[1]


def test_weights_are_merged_in_several_pieces(tiny_checkpoint, adapter, monkeypatch):
    whole = _merge(tiny_checkpoint, adapter)[1].files["model.weights"]
    monkeypatch.setattr("edgellm.core.safetensors_io.CHUNK_BYTES", 1000)
    assert _merge(tiny_checkpoint, adapter)[1].files["model.weights"] == whole


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora: True"),
        ({"bias": "all"}, "bias: 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"of_a_newer_peft": 3}, "of_a_newer_peft: 3"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base"),
        ({"peft_type": "IA3"}, "kind 'IA3'"),
        ({"r": 5}, "rank 4 in lora_A and 4 in lora_B, adapter_config.json says 5"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern is damaged"),
    ],
)
def test_unsupported_adapter_configs_are_rejected(tiny_checkpoint, adapter, config, words):
    edit_config(adapter, **config)
    with pytest.raises(EdgeLLMError, match=words):
        _merge(tiny_checkpoint, adapter)
    assert not (adapter.parent / "bundle").exists()


def _renamed(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: _renamed(t, "q_proj.lora_A.weight", "q_proj.lora_magnitude"), "lora_magnitude"),
        (lambda t: _renamed(t, "q_proj", "w_proj"), "w_proj.weight, which the language model"),
        (lambda t: {n: v for n, v in t.items() if "0.self_attn.q_proj.lora_B" not in n}, "lacks"),
        (lambda t: {n: v[:, :-1] if "lora_A" in n else v for n, v in t.items()}, "another model"),
        (lambda t: {n: v.astype(np.int32) for n, v in t.items()}, "not a matrix of floats"),
        (lambda _: {}, "has no tensors"),
    ],
)
def test_unsupported_adapter_tensors_are_rejected(tiny_checkpoint, adapter, change, words):
    path = adapter / "adapter_model.safetensors"
    changed = change(load_file(path))
    save_file({name: np.ascontiguousarray(value) for name, value in changed.items()}, path)
    with pytest.raises(EdgeLLMError, match=words):
        _merge(tiny_checkpoint, adapter)


def test_missing_adapter_files_are_rejected(command_here, tiny_checkpoint, adapter, tmp_path):
    def faults(folder, words):
        result = command_here(
            "edgellm-export",
            "llm",
            "--model_dir",
            tiny_checkpoint,
            "--lora_dir",
            folder,
            "--output_dir",
            tmp_path / "out",
        )
        assert_one_line_error(result, words)
        assert not (tmp_path / "out").exists()

    faults(tmp_path / "nowhere", "no such folder")
    faults(tiny_checkpoint, "holds no adapter_config.json")
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    faults(adapter, "truncated")
    path.unlink()
    faults(adapter, "has no adapter_model.safetensors")


def test_a_quantized_base_is_rejected(tiny_checkpoint, adapter, tmp_path):
    write_checkpoint(tiny_checkpoint, tmp_path / "int4", LAYOUTS["int4"])
    with pytest.raises(EdgeLLMError, match="are quantized") as caught:
        _merge(tmp_path / "int4", adapter)
    assert "--maxLoraRank" in caught.value.hint


def test_verify_finds_a_missing_adapter(tiny_checkpoint, adapter):
    bundle, manifest = _merge(tiny_checkpoint, adapter)
    edit_config(adapter, lora_alpha=80)
    with pytest.raises(EdgeLLMError, match="computes something else"):
        verify_bundle(open_checkpoint(str(tiny_checkpoint)), bundle, manifest)
