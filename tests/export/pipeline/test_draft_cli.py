"""Tests of the command `edgellm-export draft`: good and bad checkpoints of all kinds."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line_error, make_checkpoint
from eagle_reference import Layout, make_draft
from safetensors.torch import load_file, save_file

from edgellm.core.artifact import verify_files
from edgellm.core.manifest import DRAFT_BUNDLE, load_bundle
from edgellm.export import models

AUX = "eagle_aux_hidden_state_layer_ids"
SAFEAILAB = Layout({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40})
EAGLE1 = Layout(
    {"bias": False}, first="layers.0", eagle1=True, taps=(8,), own_head=False, draft_vocab=96,
    d2t=False, t2d=False,
)  # fmt: skip
BASE = {**models.find("llama").TINY, "num_hidden_layers": 8}


@pytest.fixture(scope="session")
def draft_base(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("draft_base"), **BASE)


@pytest.fixture
def draft(tmp_path) -> Path:
    return make_draft(tmp_path / "draft", SAFEAILAB)


@pytest.fixture
def export(command, command_here, draft_base, tmp_path):
    """Run the command on a draft; the base and more flags may be given.

    With an environment, or on request, it runs in a separate process.
    """

    def run(draft, *more, base=draft_base, alone=False, **options):
        arguments = ("--draft_model_dir", draft, "--base_model_dir", base)
        out = ("--output_dir", tmp_path / "out")
        call = command if alone or options else command_here
        return call("edgellm-export", "draft", *arguments, *out, *more, **options)

    return run


def _edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def _edit_tensors(folder: Path, **changes: object) -> Path:
    """Replace tensors (`__` for a dot); None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    return folder


def test_export_draft_writes_a_bundle(export, draft, tmp_path):
    result = export(draft, "--dtype", "fp32", alone=True)
    assert result.returncode == 0, result.stderr
    assert "eagle3 draft (SafeAILab)" in result.stdout
    assert "40 of 96 tokens" in result.stdout
    assert "hidden taps 2, 4, 5 (none configured" in result.stdout
    verdict = result.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"verdict: [\d.]+ MB in [\d.]+ s; all tensors of the draft are used, and all numbers are "
        r"finite; llm_inference --prove compares outputs with and without it",
        verdict,
    )
    manifest = load_bundle(tmp_path / "out", DRAFT_BUNDLE)
    verify_files(tmp_path / "out", manifest.files)
    names = {f"{name}.{end}" for name in ("model", "fuse") for end in ("onnx", "weights")}
    assert set(manifest.files) == names
    # A draft without a fuse graph over the former one leaves nothing of it.
    eagle1 = make_draft(tmp_path / "eagle1", EAGLE1)
    assert export(eagle1, "--overwrite").returncode == 0
    manifest = load_bundle(tmp_path / "out", DRAFT_BUNDLE)
    assert set(manifest.files) == {"model.onnx", "model.weights"}
    assert not (tmp_path / "out" / "fuse.onnx").exists()


def test_folders_without_a_draft_are_rejected(export, draft, draft_base, tmp_path):
    refused = export(tmp_path / "none", alone=True)
    assert_one_line_error(refused, "no such folder", "check the path")
    assert_one_line_error(export(draft_base), "is not a draft", "looks like a whole language model")
    assert_one_line_error(export(draft, base=draft), "is a draft, not a base", "--base_model_dir")
    (tmp_path / "empty").mkdir()
    assert_one_line_error(export(tmp_path / "empty"), "has no config.json")
    assert_one_line_error(export(draft, base=tmp_path / "empty"), "has no config.json")
    (draft / "model.safetensors").unlink()
    assert_one_line_error(export(draft), "no model.safetensors and no pytorch_model.bin")
    assert not (tmp_path / "out").exists()


def test_invalid_flags_and_foreign_files_are_rejected(export, draft, tmp_path):
    assert_one_line_error(export(draft, "--dtype", "fp8"), "fp16 or fp32")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fuse.onnx").write_text("mine")
    refused = export(draft, "--overwrite")
    assert_one_line_error(refused, "was not made by edgellm: it has fuse.onnx")
    assert (tmp_path / "out" / "fuse.onnx").read_text() == "mine"


def test_damaged_safetensors_are_rejected(export, draft, tmp_path):
    path = draft / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert_one_line_error(export(draft), "is truncated")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert_one_line_error(export(draft), "is truncated")
    assert not (tmp_path / "out").exists()
    sharded = make_draft(tmp_path / "sharded", Layout(SAFEAILAB.config, file="sharded"))
    (sharded / "b.safetensors").unlink()
    assert_one_line_error(export(sharded), "b.safetensors is missing")


class _Attack:
    def __reduce__(self):
        return os.system, ("touch /tmp/edgellm_was_here",)


def test_torch_files_are_exported(export, tmp_path):
    folder = make_draft(tmp_path / "bin", Layout(SAFEAILAB.config, file="pytorch_model.bin"))
    path = folder / "pytorch_model.bin"
    tensors = torch.load(path)
    assert export(folder, "--overwrite").returncode == 0
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert export(folder, "--overwrite").returncode == 0
    path.rename(folder / "part.bin")
    index = {"weight_map": dict.fromkeys(tensors, "part.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert export(folder, "--overwrite").returncode == 0
    (folder / "part.bin").unlink()
    assert_one_line_error(export(folder, "--overwrite"), "part.bin is missing")
    (folder / "part.bin").write_bytes(b"version https://git-lfs")
    assert_one_line_error(
        export(folder, "--overwrite"), "not a file of tensors that torch can read"
    )
    torch.save({"fc.weight": _Attack()}, folder / "part.bin")
    assert_one_line_error(
        export(folder, "--overwrite"), "not a file of tensors that torch can read"
    )
    assert not Path("/tmp/edgellm_was_here").exists()
    torch.save({"state_dict": tensors}, folder / "part.bin")
    assert_one_line_error(export(folder, "--overwrite"), "holds more than named tensors")
    torch.save({"fc.weight": torch.zeros(2, dtype=torch.complex64)}, folder / "part.bin")
    assert_one_line_error(export(folder, "--overwrite"), "fc.weight has type torch.complex64")


def test_torch_files_without_torch_are_rejected(export, tmp_path):
    folder = make_draft(tmp_path / "bin", Layout(SAFEAILAB.config, file="pytorch_model.bin"))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")])
    result = export(folder, env={**os.environ, "PYTHONPATH": path})
    assert_one_line_error(result, "torch is not installed", "pip install torch")


@pytest.mark.parametrize(
    ("tensors", "messages"),
    [
        ({"midlayer__mlp__up_proj__weight": None}, ["no tensor midlayer.mlp.up_proj.weight"]),
        ({"midlayer__extra__weight": torch.ones(3)}, ["does not use: midlayer.extra.weight"]),
        ({"norm__weight": torch.ones(95)}, ["norm.weight has shape [95]", "implies [96]"]),
        ({"fc__weight": torch.ones(96, 192)}, ["takes 192 values, but 3 taps of 96 make 288"]),
        ({"d2t": None}, ["has no d2t, but predicts only 40 of 96 tokens"]),
        ({"d2t": torch.full((40,), 57)}, ["d2t names token 96", "holds differences"]),
        ({"d2t": torch.arange(40, 0, -1)}, ["maps several draft ids to one token"]),
        ({"d2t": torch.zeros(40)}, ["d2t has type F32, not I64"]),
        ({"t2d": torch.zeros(96, dtype=torch.bool)}, ["contradict each other at 40 tokens"]),
        ({"t2d": torch.zeros(96).double()}, ["t2d has type F64, not BOOL"]),
        ({"fc__weight": torch.tensor(1.0)}, ["takes 0 values, but 3 taps"]),
        ({"lm_head__weight": None}, ["has no lm_head.weight", "draft_vocab_size = 40"]),
    ],
    ids=lambda value: value[0][:24] if isinstance(value, list) else "",
)
def test_faults_in_tensors_are_rejected(export, draft, tensors, messages, tmp_path):
    assert_one_line_error(export(_edit_tensors(draft, **tensors)), *messages)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"hidden_size": 64}, ["for a base of hidden size 64, this base has 96"]),
        ({"target_hidden_size": 128}, ["for a base of hidden size 128"]),
        ({"vocab_size": 100}, ["for a vocabulary of 100 tokens, this base has 96"]),
        ({"draft_vocab_size": 97}, ["draft_vocab_size 97 is larger than vocab_size 96"]),
        ({"eagle_config": {AUX: [1, 3, 7]}}, ["last layer's output before the final norm"]),
        ({"eagle_config": {AUX: [1, 3, 9]}}, ["tap 2, 4, 10 is outside of 0 to 8"]),
        ({"eagle_config": {AUX: [5, 3, 1]}}, ["the taps 6, 4, 2 do not ascend"]),
        ({"eagle_config": {AUX: [1, "3"]}}, ["is not a list of integers"]),
        ({"eagle_config": {AUX: [1, 3]}}, ["takes 288 values, but 2 taps of 96 make 192", AUX]),
        ({"eagle_config": {AUX: [1, 3, 4]}, AUX: [1, 3, 4]}, ["[1, 3, 4] at the top", "hence + 1"]),
        ({"eagle_config": {AUX: [1, 3, 4]}, AUX: [2, 4]}, ["[2, 4] at the top and [1, 3, 4]"]),
        ({"eagle_config": {AUX: [1, 3, 4]}, AUX: ["2"]}, ["is not a list of integers"]),
        ({AUX: [1, 3, 4]}, ["may count inputs or outputs", "into eagle_config"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state = False"]),
        ({"eagle_config": {"parallel_draft_step": 4}}, ["parallel_draft_step = 4"]),
        ({"eagle_config": {"novel_gate": True}}, ["does not understand: novel_gate"]),
        ({"kv_lora_rank": 64}, ["understand: kv_lora_rank", "--ignore_config_keys kv_lora_rank"]),
        ({"fc_norm": True, "norm_before_fc": True}, ["exclude each other"]),
        ({"fc_norm": True}, ["no tensor fc_norm.0.weight"]),
        ({"model_type": "gemma3"}, ["model_type = 'gemma3' is not supported"]),
        ({"sliding_window": 0}, ["sliding_window = 0", "tokens that a token attends to"]),
        ({"use_sliding_window": True}, ["but no layer slides", "or set use_sliding_window"]),
        (
            {"sliding_window": 8, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            ["a sliding window with M-RoPE is not supported"],
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, ["mrope_section [1, 2]"]),
        ({"attention_bias": True}, ["no tensor midlayer.self_attn.q_proj.bias"]),
        ({"speculators_model_type": "eagle"}, ["speculators_model_type = 'eagle'"]),
        ({"architectures": 3, "transformer_layer_config": []}, ["should be dict, found []"]),
    ],
    ids=lambda value: value[0][:24] if isinstance(value, list) else "",
)
def test_faults_in_the_config_are_rejected(export, draft, changes, messages, tmp_path):
    assert_one_line_error(export(_edit_config(draft, **changes)), *messages)
    assert not (tmp_path / "out").exists()


def test_known_keys_can_be_ignored(export, draft):
    _edit_config(draft, some_note=3, eagle_config={"other": 4})
    result = export(draft, "--ignore_config_keys", "some_note,other")
    assert result.returncode == 0, result.stderr


def test_a_narrow_draft_needs_its_own_embedding(export, tmp_path):
    config = {"draft_vocab_size": 40, "target_hidden_size": 96}
    folder = make_draft(tmp_path / "narrow", Layout(config, hidden=48, head_dim=8))
    assert_one_line_error(export(folder), "has no embed_tokens.weight", "rows of 96 values")


def test_faults_in_eagle1_drafts_are_rejected(export, tmp_path):
    folder = make_draft(tmp_path / "eagle1", EAGLE1)
    _edit_config(folder, bias=None)
    assert_one_line_error(export(folder), "no tensor fc.bias")
    _edit_config(folder, bias=False, norm_output=True)
    assert_one_line_error(export(folder), "EAGLE-1 draft", "norms of EAGLE-3")
    _edit_config(folder, norm_output=False)
    _edit_tensors(folder, fc__weight=torch.ones(96, 96))
    assert_one_line_error(export(folder), "embedding and feature of 96 make 192")


def test_a_base_too_small_for_the_default_taps_is_rejected(export, draft, tiny_checkpoint):
    assert_one_line_error(
        export(draft, base=tiny_checkpoint),
        "a base of 3 layers is too small",
        "2, 1, 0",
        "eagle_aux_hidden_state_layer_ids",
    )


def test_a_base_needs_no_tokenizer(export, draft, draft_base, tmp_path):
    base = Path(shutil.copytree(draft_base, tmp_path / "base"))
    (base / "tokenizer.json").unlink()
    assert export(draft, base=base).returncode == 0
