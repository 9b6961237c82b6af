"""Folders with files of several saves: the choice of transformers, or an error with both names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints.checkpoint import read_whole
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def sharded(folder: Path, count: int = 2, factor: float = 1.0) -> list[str]:
    """Replace the whole file by shards with their index, with tensors times `factor`."""
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = [f"model-{at + 1:05}-of-{count:05}.safetensors" for at in range(count)]
    parts = {shard: {} for shard in names}
    for at, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[names[at % count]][name] = tensor * factor
    for shard, part in parts.items():
        save_file(part, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def edit(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def ours(folder: Path, name: str = NORM) -> torch.Tensor:
    data = read_whole(open_checkpoint(str(folder)).tensors, name)
    return torch.frombuffer(data, dtype=torch.float32)


def theirs(folder: Path, name: str = NORM) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()[name].reshape(-1)


def holder(folder: Path, name: str = NORM) -> tuple[str, str]:
    """The shard with a tensor by the index, and another."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map[name], next(each for each in weight_map.values() if each != weight_map[name])


def refused(folder: Path, *names: str) -> BrokenArtifactError:
    with pytest.raises(BrokenArtifactError) as caught:
        open_checkpoint(str(folder))
    assert all(name in str(caught.value) for name in names), str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("is_later", [False, True])
def test_a_stale_tensor_in_another_shard_is_rejected(folder, is_later):
    """For any order of shards."""
    sharded(folder)
    own, other = holder(folder)
    stale = sorted([own, other])[is_later]
    tensor = load_file(folder / own)[NORM]
    for shard in (own, other):
        scale = 3 if shard == stale else 1
        edit(folder / shard, lambda tensors, scale=scale: tensors.update({NORM: tensor * scale}))
    refused(folder, own, other, NORM)


@pytest.mark.parametrize("change", [lambda x: x.half(), lambda x: x[:8].clone()])
def test_shards_with_different_types_or_shapes_are_rejected(folder, change):
    sharded(folder)
    own, other = holder(folder)
    tensor = load_file(folder / own)[NORM]
    edit(folder / other, lambda tensors: tensors.update({NORM: change(tensor)}))
    refused(folder, own, other, NORM)


def test_equal_tensors_in_two_shards_are_accepted(folder):
    expected = theirs(folder)
    sharded(folder)
    own, other = holder(folder)
    tensor = load_file(folder / own)[NORM]
    edit(folder / other, lambda tensors: tensors.update({NORM: tensor}))
    assert torch.equal(ours(folder), expected)
    assert torch.equal(theirs(folder), expected)


def test_a_whole_file_is_read_if_the_shards_of_its_index_are_gone(folder):
    """Transformers reads the whole file."""
    whole = (folder / WHOLE).read_bytes()
    for shard in sharded(folder, factor=2):
        (folder / shard).unlink()
    (folder / WHOLE).write_bytes(whole)
    assert torch.equal(ours(folder), theirs(folder))


def test_a_whole_file_with_shards_of_another_save_is_rejected(folder):
    whole = (folder / WHOLE).read_bytes()
    names = sharded(folder, factor=2)
    (folder / WHOLE).write_bytes(whole)
    assert "move model.safetensors away" in refused(folder, WHOLE, names[0]).hint
    (folder / INDEX).unlink()
    assert torch.equal(ours(folder), theirs(folder))


def test_an_index_may_name_the_whole_file(folder):
    weight_map = dict.fromkeys(load_file(folder / WHOLE), WHOLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(ours(folder), theirs(folder))


def test_shards_of_another_save_are_rejected(folder):
    whole = (folder / WHOLE).read_bytes()
    old = sharded(folder, 3, factor=2)
    (folder / WHOLE).write_bytes(whole)
    new = sharded(folder, 2)
    refused(folder, old[0], new[0])
    for shard in old:
        (folder / shard).unlink()
    assert torch.equal(ours(folder), theirs(folder))


def test_missing_shards_are_rejected(folder):
    names = sharded(folder)
    (folder / names[1]).unlink()
    refused(folder, names[1])


@pytest.mark.parametrize("weight_map", [None, [], {NORM: 5}, {NORM: None}])
def test_a_damaged_index_is_rejected(folder, weight_map):
    sharded(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BrokenArtifactError, match="has no weight_map, or one that names no files"):
        open_checkpoint(str(folder))


def test_safetensors_win_over_torch_files(folder):
    tensors = load_file(folder / WHOLE)
    torch.save({name: 2 * tensor for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    assert torch.equal(ours(folder), theirs(folder))
    names = sharded(folder)
    assert len(names) == 2
    assert torch.equal(ours(folder), theirs(folder))


def test_torch_shards_with_different_tensors_are_rejected(folder):
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    torch.save(tensors, folder / names[0])
    torch.save({NORM: tensors[NORM] * 2}, folder / names[1])
    weight_map = {**dict.fromkeys(tensors, names[0]), NORM: names[1]}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    refused(folder, *names, NORM)
    torch.save({NORM: tensors[NORM]}, folder / names[1])
    assert torch.equal(ours(folder), theirs(folder))
