"""Damaged files of checkpoints: errors of one line with a hint, and no hang."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from edgellm.core.errors import BrokenArtifactError, EdgeLLMError, UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.core.peft_adapter import read_adapter
from edgellm.core.safetensors_io import Safetensors
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def rejected(folder: Path, message: str) -> None:
    with pytest.raises(BrokenArtifactError, match=message) as caught:
        open_checkpoint(str(folder))
    assert caught.value.hint


@pytest.mark.parametrize("template", [0.5, True, {}, ["x"], [{}], [{"name": "default"}], "\ud800"])
def test_a_chat_template_that_is_no_text_is_rejected(folder, template):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    rejected(folder, "the chat template of .* is damaged")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"caf\xe9"),
        ("chat_template.json", b"[]"),
        ("chat_template.json", b"{}"),
        ("chat_template.json", b'{"chat_template": 5}'),
        ("chat_template.json", b"[" * 100_000),
    ],
)
def test_a_chat_template_file_that_is_no_text_is_rejected(folder, name, content):
    (folder / name).write_bytes(content)
    rejected(folder, "the chat template of .* is damaged")


@pytest.mark.parametrize("content", ["[]", '"x"', "null", "3", "[" * 100_000])
def test_a_tokenizer_config_that_is_no_object_is_rejected(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    rejected(folder, "the tokenizer of .* is damaged")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_endless_files_are_not_read(folder, name, kind):
    path = folder / name
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    rejected(folder, f"{name} is not a regular file")


def test_pipes_and_devices_in_adapters_and_bundles_are_rejected(tmp_path):
    for name in ("adapter_config.json", "manifest.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(BrokenArtifactError, match="is not a regular file"):
            read_adapter(tmp_path)
        with pytest.raises(BrokenArtifactError, match="is not a regular file"):
            load_bundle(tmp_path, LLM_BUNDLE)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("content", [{"a": (1, 2)}, [1], "x", {"a": None}])
def test_a_pickle_without_tensors_is_rejected(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    rejected(folder, "pytorch_model.bin")


def test_a_pickle_with_a_flipped_bit_is_rejected_or_read(folder):
    """Damaged torch files raise one error type, or their tensors are read."""
    import torch
    from safetensors.torch import load_file

    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    whole = path.read_bytes()
    rejections = 0
    for at in range(60, 400, 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            open_checkpoint(str(folder), tokenizer=False)
        except BrokenArtifactError:
            rejections += 1
    assert rejections > 20


@pytest.mark.parametrize("begin", [-4, -0.0, 0.0, True])
def test_tensor_offsets_must_be_whole_numbers(tmp_path, begin):
    """Before the data lies the header, which a negative place would take for weights."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]}
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(BrokenArtifactError, match="not a safetensors file"):
        Safetensors([path])


@pytest.mark.parametrize(
    ("kind", "bits", "message"),
    [
        ("F8_E8M0", 8, "model.norm.weight has type F8_E8M0"),
        ("F4", 4, "model.norm.weight has type F4"),
        ("F5_E2M2", 8, "tensor model.norm.weight has the unknown type F5_E2M2"),
    ],
)
def test_types_that_weights_cannot_have_are_named(folder, kind, bits, message):
    """A type of the format is no damage, whether edgellm knows it or not."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    header, data = json.loads(path.read_bytes()[8 : 8 + length]), path.read_bytes()[8 + length :]
    size = norm.size * bits // 8
    place = [len(data), len(data) + size]
    header["model.norm.weight"] = {"dtype": kind, "shape": [*norm.shape], "data_offsets": place}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + bytes(size))
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        export_llm(open_checkpoint(str(folder)), folder / "bundle", ExportOptions(dtype="fp32"))
    assert caught.value.hint.startswith("convert it to")


def _changed(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "shard", ["", ".", "..", "../model.safetensors", "/etc/passwd", "a/../../b"]
)
def test_an_index_must_name_files_of_its_folder(folder, shard):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    rejected(folder, "which is no file of its folder")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"{", b'{"a": 0}'])
def test_a_slow_tokenizer_that_transformers_cannot_read_is_rejected(folder, name, content):
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(content)
    is_whole = (name, content) == ("vocab.json", b'{"a": 0}')
    message = "nothing says how" if is_whole else "transformers cannot read the tokenizer of"
    with pytest.raises(EdgeLLMError, match=message) as caught:
        open_checkpoint(str(folder))
    assert caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [[[2]], {"a": 1}, [True], [2.5], [2.0], "</s>", [{}], False])
def test_end_tokens_that_are_no_token_ids_are_rejected(folder, tmp_path, name, value):
    _changed(folder, name, eos_token_id=value)
    with pytest.raises(EdgeLLMError, match="is not a token of the model") as caught:
        export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert caught.value.hint


@pytest.mark.parametrize("value", [[], {}, 5, True, ["llama"]])
def test_a_model_type_that_is_no_text_is_rejected(folder, value):
    _changed(folder, "config.json", model_type=value)
    rejected(folder, "the model_type of config.json is not a text")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_theta"])
def test_a_rope_base_of_zero_is_rejected(folder, tmp_path, key):
    """0 is not the same as no number, which stands for the family's own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    config[key] = 0.0 if key == "rope_theta" else {"rope_type": "default", "rope_theta": 0.0}
    path.write_text(json.dumps(config))
    with pytest.raises(EdgeLLMError, match="rope"):
        export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
