"""Layers of multi-token prediction: hybrids against torch, and rejected layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_checkpoint
from draft_runs import DraftRun, drive
from eagle_reference import BASE_HIDDEN, VOCAB
from mtp_reference import HYBRIDS, ErnieReference, Reference, make_base, make_ernie
from safetensors.torch import load_file, save_file

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core import safetensors_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_BUNDLE, Bundle, load_bundle
from edgellm.export import models
from edgellm.export.cli import app
from edgellm.export.graph.architecture import (
    ExportOptions,
    read_architecture,
)
from edgellm.export.pipeline.draft import DraftOptions, HeadOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp_bases")
    return {name: make_base(folder / name, name) for name in HYBRIDS}


def exported(draft: Path, base: Path, bundle: Path, dtype: str = "fp32") -> Bundle:
    checkpoints = open_draft(str(draft)), open_checkpoint(str(base), tokenizer=False)
    export_draft(*checkpoints, bundle, DraftOptions(dtype))
    return load_bundle(bundle, DRAFT_BUNDLE)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [*((name, "fp32", 2e-4) for name in HYBRIDS), ("qwen3_5_text", "fp16", 0.05)],
)
def test_graphs_equal_torch(bases, tmp_path, name, dtype, tolerance):
    base = bases[name]
    manifest = exported(base, base, tmp_path / "bundle", dtype)
    spec = manifest.draft
    assert (spec.method, spec.hidden_taps, spec.base_num_layers) == ("mtp", (4,), 4)
    assert (spec.fuses, spec.num_heads, spec.draft_vocab_size) == (False, 0, VOCAB)
    assert (spec.decoder.kv.num_layers, spec.decoder.recurrent) == (1, None)
    assert set(manifest.files) == {"model.onnx", "model.weights"}
    own = load_file(base / "model.safetensors")
    counted = sum(tensor.numel() for key, tensor in own.items() if key.startswith("mtp."))
    assert spec.decoder.num_parameters == counted
    drive(DraftRun(tmp_path / "bundle", manifest), Reference(base), tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ernies_layer_continues_from_hidden_states_before_the_norm(tmp_path, dtype):
    base = make_ernie(tmp_path / "base", dtype=dtype)
    manifest = exported(base, base, tmp_path / "bundle")
    assert (manifest.draft.method, manifest.draft.hidden_taps) == ("mtp", (3,))
    assert manifest.provenance["exporter"] == "ERNIE"
    own = load_file(base / "model.safetensors")
    counted = sum(tensor.numel() for key, tensor in own.items() if "mtp_" in key)
    assert manifest.draft.decoder.num_parameters == counted
    reference = ErnieReference(base)
    reference.tensors = {name: tensor.float() for name, tensor in reference.tensors.items()}
    drive(DraftRun(tmp_path / "bundle", manifest), reference)
    stream, mask = torch.randn(5, BASE_HIDDEN) * 7, torch.ones(5, 5, dtype=torch.bool).tril()
    given = torch.arange(5), stream, torch.arange(5), mask
    reference.drop_to(0)
    expected, _ = reference.continued(*given)
    found = DraftRun(tmp_path / "bundle", manifest).forward(
        given[0], reference._norm("norm", stream), given[2], mask.numpy(), 0, range(5)
    )
    torch.testing.assert_close(
        torch.from_numpy(found[1]), expected.topk(6).values, atol=5e-4, rtol=0
    )


def test_unsupported_layers_of_ernie_are_rejected(tmp_path):
    base = make_ernie(tmp_path / "base")
    path = base / "config.json"
    config, tensors = json.loads(path.read_text()), load_file(base / "model.safetensors")
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    with pytest.raises(EdgeLLMError, match="num_nextn_predict_layers = 2 is not supported"):
        exported(base, base, tmp_path / "bundle")
    path.write_text(json.dumps(config))
    tensors["model.norm.weight"][3] = 0
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(EdgeLLMError, match=r"model.norm.weight has zeros"):
        exported(base, base, tmp_path / "bundle")


def test_a_float16_engine_keeps_the_stored_norms(tmp_path):
    """1 + weight is not exact in float16; the build compares itself with the portable graph."""
    base = make_base(tmp_path / "base", dtype="bfloat16")
    exported(base, base, tmp_path / "bundle", "fp16")
    plan = Plan(
        max_input_len=16,
        kv_capacity=24,
        threads=1,
        prefill="same",
        quantize="none",
        max_draft_tree_size=8,
    )
    said = build_engine("draft", tmp_path / "bundle", tmp_path / "e", plan, "onnxruntime", print)
    assert said.draft.method == "mtp"


def test_a_tied_head_is_stored_once(tmp_path):
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    manifest = exported(base, base, tmp_path / "bundle")
    import onnx_ir as ir

    names = ir.load(tmp_path / "bundle" / "model.onnx").graph.initializers
    assert "lm_head.weight" not in names
    drive(DraftRun(tmp_path / "bundle", manifest), Reference(base))


@pytest.mark.parametrize("is_tied", [True, False])
def test_draft_vocab_size_keeps_the_most_frequent_tokens(tmp_path, monkeypatch, is_tied):
    """Pruned heads in pieces of any size; end-of-sequence tokens are included."""
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", 1000)
    base = make_base(tmp_path / "base", tie_word_embeddings=is_tied, vocab_size=VOCAB)
    (base / "generation_config.json").write_text('{"eos_token_id": [60, 93]}')
    options = DraftOptions("fp32", head=HeadOptions(vocab_size=40))
    opened = open_draft(str(base)), open_checkpoint(str(base), tokenizer=False)
    manifest = export_draft(*opened, tmp_path / "bundle", options)
    assert manifest.draft.draft_vocab_size == 40
    reference = Reference(base)
    reference.targets = torch.tensor([*range(38), 60, 93])
    drive(DraftRun(tmp_path / "bundle", manifest), reference)
    for size in (2, VOCAB + 1):
        options = DraftOptions(head=HeadOptions(vocab_size=size))
        with pytest.raises(EdgeLLMError, match=f"--draft_vocab_size {size}: give 4 to {VOCAB}"):
            export_draft(*opened, tmp_path / "b", options)


class Retrieving(Reference):
    """With the best 20 tokens of the head's truncated SVD."""

    def forward(self, *given):
        log_probs, normed = super().forward(*given)
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        left, singular, right = torch.linalg.svd(head, full_matrices=False)
        retrieval = left[:, :24] * singular[:24] @ right[:24]
        kept = (normed @ retrieval.T).topk(20).indices
        found = torch.full_like(log_probs, -torch.inf)
        return found.scatter(-1, kept, log_probs.gather(-1, kept)).log_softmax(-1), normed


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_low_rank_head_retrieves_candidates(tmp_path, is_tied):
    base = make_base(tmp_path / "base", tie_word_embeddings=is_tied)
    opened = open_draft(str(base)), open_checkpoint(str(base), tokenizer=False)
    options = DraftOptions("fp32", head=HeadOptions(rank=24, num_candidates=20))
    manifest = export_draft(*opened, tmp_path / "bundle", options)
    assert (manifest.draft.num_candidates, manifest.draft.draft_vocab_size) == (20, VOCAB)
    drive(DraftRun(tmp_path / "bundle", manifest), Retrieving(base))


def test_an_mtp_layer_of_a_vision_language_model_is_exported(bases, tmp_path):
    """Qwen3.5's published layout: `mtp.*` with `model.language_model.*`."""
    from edgellm.export.checkpoints.vlm import text_tower

    plain, whole = bases["qwen3_5_text"], tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(plain / "model.safetensors")
    save_file(
        {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()},
        whole / "model.safetensors",
    )
    text = json.loads((plain / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    manifest = exported(whole, whole, tmp_path / "bundle")
    drive(DraftRun(tmp_path / "bundle", manifest), Reference(plain))
    tower = text_tower(open_checkpoint(str(whole), tokenizer=False)).checkpoint
    assert read_architecture(tower, ExportOptions())[2].hidden_size == BASE_HIDDEN


CONFIGS = {
    "two layers": ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2 is not supported"),
    "own table": ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True"),
    "unknown key": ({"mtp_window": 64}, "does not understand: mtp_window"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupported_configs_are_rejected(bases, tmp_path, name):
    config, message = CONFIGS[name]
    base = shutil.copytree(bases["qwen3_5_text"], tmp_path / "base")
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(EdgeLLMError, match=message):
        exported(base, base, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_missing_and_superfluous_tensors_are_rejected(bases, tmp_path):
    base = shutil.copytree(bases["qwen3_5_text"], tmp_path / "base")
    whole = load_file(base / "model.safetensors")
    for name, message in (
        ("mtp.pre_fc_norm_hidden.weight", "no tensor mtp.pre_fc_norm_hidden.weight"),
        ("mtp.layers.1.mlp.up_proj.weight", "does not use: mtp.layers.1.mlp.up_proj.weight"),
    ):
        tensors = {**whole, "mtp.layers.1.mlp.up_proj.weight": whole["mtp.fc.weight"].clone()}
        if name in whole:
            del tensors[name]
        save_file(tensors, base / "model.safetensors")
        with pytest.raises(EdgeLLMError, match=message):
            exported(base, base, tmp_path / "bundle")


def test_models_without_mtp_and_other_bases_are_rejected(bases, tmp_path, tiny_checkpoint):
    llama = shutil.copytree(tiny_checkpoint, tmp_path / "llama")
    whole = load_file(llama / "model.safetensors")
    layer = {"mtp.fc.weight": whole["model.norm.weight"].clone()}
    save_file({**whole, **layer}, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(EdgeLLMError, match="multi-token prediction of llama is not supported"):
        exported(llama, llama, tmp_path / "bundle")
    turned = shutil.copytree(bases["qwen3_5_text"], tmp_path / "turned")
    config = json.loads((turned / "config.json").read_text())
    config["edgellm_rotation"] = {"kind": "hadamard", "seed": 0}
    (turned / "config.json").write_text(json.dumps(config))
    with pytest.raises(EdgeLLMError, match=r"stream of .* was rotated"):
        exported(turned, turned, tmp_path / "bundle")
    tiny = models.find("qwen3_5_text").TINY
    with pytest.raises(EdgeLLMError, match=r"for a base of architecture .*qwen3_5_text"):
        exported(bases["qwen3_5_text"], llama, tmp_path / "bundle")
    for config, message in (
        ({"hidden_size": 48}, "hidden size 96"),
        ({"vocab_size": 90}, "vocabulary 96"),
        ({"num_hidden_layers": 2}, "layers 4"),
    ):
        other = make_checkpoint(tmp_path / message, **{**tiny, **config})
        with pytest.raises(EdgeLLMError, match=f"for a base of .*{message}"):
            exported(bases["qwen3_5_text"], other, tmp_path / "bundle")


def test_export_writes_a_base_and_its_mtp_draft(bases, tmp_path, capsys):
    base = ("--draft_model_dir", str(bases["qwen3_5_text"]))
    for product, source in (("llm", "--model_dir"), ("draft", "--base_model_dir")):
        given = (*base, source, base[1], "--output_dir", str(tmp_path / product))
        app([product, *given], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "hidden taps for a draft: 4" in printed
    assert "mtp draft (Qwen)" in printed
    assert "hidden taps 4 (multi-token prediction: output of the final norm)" in printed
