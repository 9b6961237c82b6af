"""Tests of the command `edgellm-export`, bad input first."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import onnxruntime
import pytest
from conftest import INTERRUPTED, assert_one_line_error, interrupt, limit_file_size, write_tokenizer
from onnx import TensorProto, helper

from edgellm.core.artifact import verify_files
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export import models


def _export(command, model, output, *more, **options):
    return command(
        "edgellm-export", "llm", "--model_dir", model, "--output_dir", output, *more, **options
    )


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    """A copy for damage by a test."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def _edit_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_export_llm_writes_a_bundle_and_verifies_it(command, tiny_checkpoint, tmp_path):
    result = _export(command, tiny_checkpoint, tmp_path / "out", "--dtype", "fp32", "--verify")
    assert result.returncode == 0, result.stderr
    assert "llama" in result.stdout
    assert "top-1 agreement 100.0%" in result.stdout
    assert result.stdout.endswith("outputs equal those of transformers\n")
    manifest = load_bundle(tmp_path / "out", LLM_BUNDLE)
    verify_files(tmp_path / "out", manifest.files)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
            "generation_config.json"} <= set(manifest.files)  # fmt: skip
    assert manifest.eos_token_ids == (2,)


def test_flags_may_be_kebab_case(command_here, tiny_checkpoint, tmp_path):
    arguments = ("--model-dir", tiny_checkpoint, "--output-dir", tmp_path / "out")
    result = command_here("edgellm-export", "llm", *arguments, "--num-layers", "1")
    assert result.returncode == 0, result.stderr


def test_sharded_checkpoints_are_exported(command_here, checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(tensors.items()):
        shards["ab"[index % 2] + ".safetensors"][name] = tensor
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    for shard, part in shards.items():
        save_file(part, checkpoint / shard)
    index = {"weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    result = _export(command_here, checkpoint, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    (checkpoint / "b.safetensors").unlink()
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out", "--overwrite"),
        "b.safetensors is missing",
    )


def test_a_cached_hub_model_is_exported(command, checkpoint, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    shutil.move(checkpoint, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    result = _export(command, "someone/tiny", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert_one_line_error(
        _export(command, "someone/other", tmp_path / "out2"), "someone/other", "hf download"
    )


def test_a_missing_folder_is_rejected(command_here, tmp_path):
    result = _export(command_here, tmp_path / "none", tmp_path / "out")
    assert_one_line_error(result, "no such folder", "check the path")
    assert "hf download" not in result.stderr  # which takes no path


def test_a_folder_without_a_checkpoint_is_rejected(command_here, tmp_path):
    assert_one_line_error(_export(command_here, tmp_path, tmp_path / "out"), "has no config.json")
    (tmp_path / "file.txt").write_text("x")
    assert_one_line_error(
        _export(command_here, tmp_path / "file.txt", tmp_path / "out"), "neither a folder nor"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1000], "is truncated"),
        (lambda data: data[:5], "is not a safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "is truncated: its header alone"),
        (lambda data: data[:8] + b"x" + data[9:], "is not a safetensors file"),
    ],
)
def test_damaged_weights_are_rejected(command_here, checkpoint, tmp_path, damage, message):
    path = checkpoint / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert_one_line_error(_export(command_here, checkpoint, tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_missing_superfluous_and_misshapen_tensors_are_rejected(command_here, checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.extra.weight": tensors["model.norm.weight"]}, path)
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"), "model.layers.0.extra.weight"
    )
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, path)
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"), "no tensor model.norm"
    )
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1].copy()}, path)
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"),
        "has shape [95], config.json implies [96]",
    )


def test_faults_in_the_config_are_rejected(command_here, checkpoint, tmp_path):
    _edit_config(checkpoint, model_type="lama")
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"), "'lama'", "supported: apertus"
    )
    _edit_config(checkpoint, model_type="llama", residual_multiplier=0.22)
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"),
        "does not understand: residual_multiplier",
        "--ignore_config_keys residual_multiplier",
    )
    result = _export(
        command_here, checkpoint, tmp_path / "out", "--ignore_config_keys", "residual_multiplier"
    )
    assert result.returncode == 0, result.stderr
    (checkpoint / "config.json").write_text("{broken")
    broken = _export(command_here, checkpoint, tmp_path / "out", "--overwrite")
    assert_one_line_error(broken, "is not valid JSON")


def test_faults_in_the_tokenizer_are_rejected(command_here, checkpoint, tmp_path):
    _edit_config(checkpoint, eos_token_id=4711)
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"), "4711 is not a token"
    )
    (checkpoint / "tokenizer.json").write_text("{}")
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"), "tokenizer", "damaged"
    )
    (checkpoint / "tokenizer.json").unlink()
    assert_one_line_error(
        _export(command_here, checkpoint, tmp_path / "out"), "has no tokenizer.json"
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", "float16"), ("half", "float16"), ("Float16", "float16"), ("float32", "float32")],
)
def test_the_type_of_activations_has_the_names_of_other_programs(
    command_here, tiny_checkpoint, tmp_path, name, dtype
):
    assert _export(command_here, tiny_checkpoint, tmp_path / "out", "--dtype", name).returncode == 0
    assert load_bundle(tmp_path / "out", LLM_BUNDLE).dtype == dtype


@pytest.mark.parametrize("operator", ["MatMul", "Add", "Mul"])
def test_why_no_graph_computes_in_bfloat16(operator):
    """The reason of the error of --dtype bf16: if this fails, bfloat16 may be possible."""
    values = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [2, 2]) for name in "abc"]
    node = helper.make_node(operator, ["a", "b"], ["c"])
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented):
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_invalid_flags_are_rejected(command_here, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    assert_one_line_error(
        _export(command_here, tiny_checkpoint, out, "--dtype", "fp8"), "fp16 or fp32"
    )
    for name in ("bf16", "bfloat16", "BF16"):
        result = _export(command_here, tiny_checkpoint, out, "--dtype", name)
        assert_one_line_error(result, f"--dtype {name}: ONNX Runtime computes no bf16 on CPUs")
        assert "keep their bits" in result.stderr
        assert "--dtype fp32" in result.stderr
    assert_one_line_error(_export(command_here, tiny_checkpoint, out, "--num_layers", "9"), "has 3")
    result = _export(command_here, tiny_checkpoint, out, "--num_lay", "1")
    assert result.returncode == 2
    assert "No such option" in result.stderr
    assert "--num_layers" in result.stderr


def test_foreign_files_in_the_output_folder_are_kept(command_here, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    assert _export(command_here, tiny_checkpoint, out).returncode == 0
    (out / "thesis.txt").write_text("years of work")
    (out / "commit.onnx").write_text("mine")
    again = _export(command_here, tiny_checkpoint, out, "--overwrite")
    assert_one_line_error(again, "commit.onnx exists and is not part of an earlier llm_bundle")
    (out / "commit.onnx").unlink()
    assert _export(command_here, tiny_checkpoint, out, "--overwrite").returncode == 0
    assert (out / "thesis.txt").read_text() == "years of work"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"mine": true}')
    for flags in ((), ("--overwrite",)):
        refused = _export(command_here, tiny_checkpoint, foreign, *flags)
        assert_one_line_error(refused, "was not made by edgellm", "another output folder")
    assert [path.name for path in foreign.iterdir()] == ["manifest.json"]
    (tmp_path / "file").write_text("x")
    assert_one_line_error(_export(command_here, tiny_checkpoint, tmp_path / "file"), "is a file")


def test_the_checkpoint_is_rejected_as_output_folder(command_here, checkpoint):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    for flags in ((), ("--overwrite",)):
        refused = _export(command_here, checkpoint, checkpoint, *flags)
        assert_one_line_error(refused, "was not made by edgellm")
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def _sparse_checkpoint(folder: Path) -> Path:
    """A sparse gigabyte of zeros, whose export is long enough for an interrupt."""
    folder.mkdir()
    hidden, inner, layers = 2048, 8192, 8
    config = {**models.find("llama").TINY, "hidden_size": hidden, "intermediate_size": inner,
              "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
              "rope_theta": 1e4}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, 96)
    shapes = {"model.embed_tokens.weight": [96, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = [hidden]
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = [hidden, hidden]
        for name, shape in (
            ("gate", [inner, hidden]),
            ("up", [inner, hidden]),
            ("down", [hidden, inner]),
        ):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = shape
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + offset)
    return folder


def test_ctrl_c_leaves_nothing_half_written(command, tiny_checkpoint, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    assert _export(command, tiny_checkpoint, work / "out").returncode == 0
    before = load_bundle(work / "out", LLM_BUNDLE)
    large = _sparse_checkpoint(tmp_path / "large")
    export = ["edgellm-export", "llm", "--model_dir", large, "--output_dir", work / "out"]
    export += ["--overwrite"]
    code, said = interrupt(export, work, ".out.partial-*/files/model.weights")
    assert (code, said[-1:]) == INTERRUPTED
    assert [path.name for path in work.iterdir()] == ["out"]
    assert load_bundle(work / "out", LLM_BUNDLE) == before
    verify_files(work / "out", before.files)


def test_a_failing_disk_leaves_nothing_half_written(command, tiny_checkpoint, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    result = _export(command, tiny_checkpoint, work / "out", preexec_fn=limit_file_size)
    assert_one_line_error(result, f"File too large in {work}: the file system", "ulimit -f")
    assert not list(work.iterdir())
