"""Output folders: reused by the same command, replaced only on request, foreign ones never."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from edgellm.core.artifact import MADE_BY_NAME, move_files, own_files
from edgellm.core.commands.output_folder import OutputKey, fingerprint, is_finished, require_own
from edgellm.core.errors import EdgeLLMError

MEBIBYTE = 1 << 20


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_bytes(bytes(2 * MEBIBYTE))
    return folder


def _key(model: Path, command: str = "edgellm-export llm", **settings: object) -> OutputKey:
    return OutputKey(
        command=command,
        settings={"dtype": "fp16", "nested": {"seed": 0}, **settings},
        inputs={"--model_dir": model, "--lora_dir": None},
    )


def _write(output: Path, key: OutputKey, *names: str) -> None:
    """What a command does: write into a temporary folder, then move."""
    work = output.with_name("work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in names:
        (work / name).write_text(f"{name} of {key.command}")
    move_files(work, output, list(names), own_files(output), key.facts())


def test_the_same_command_finds_its_result(model, tmp_path):
    output, key = tmp_path / "out", _key(model)
    assert not is_finished(output, key, overwrite=False)
    output.mkdir()
    assert not is_finished(output, key, overwrite=False)  # empty
    _write(output, key, "a", "b")
    assert is_finished(output, key, overwrite=False)
    assert not is_finished(output, key, overwrite=True)
    (output / "b").write_text("cut")
    assert not is_finished(output, key, overwrite=False)  # damaged: it is written again
    (output / "b").unlink()
    assert not is_finished(output, key, overwrite=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "fp32"}, "it has dtype fp16, not fp32"),
        ({"nested": {"seed": 7}}, "it has seed 0, not 7"),
        ({"more": [1]}, r"it has more missing, not \[1\]"),
        ({"command": "llm_build"}, "edgellm-export llm made it"),
    ],
)
def test_another_result_is_replaced_on_request_only(model, tmp_path, changes, said):
    output = tmp_path / "out"
    _write(output, _key(model), "a", "b")
    (output / "notes").write_text("mine")
    other = _key(model, **changes)
    with pytest.raises(EdgeLLMError, match=f"holds another result: {said}") as refused:
        is_finished(output, other, overwrite=False)
    assert "--overwrite" in refused.value.hint
    assert not is_finished(output, other, overwrite=True)
    _write(output, other, "b", "c")
    assert is_finished(output, other, overwrite=False)
    assert {path.name for path in output.iterdir()} == {"b", "c", "notes", MADE_BY_NAME}
    assert (output / "notes").read_text() == "mine"


def test_inputs_count_by_content(model, tmp_path):
    output = tmp_path / "out"
    _write(output, _key(model), "a")
    copy = Path(shutil.copytree(model, tmp_path / "copy"))  # keeps times
    assert is_finished(output, _key(copy), overwrite=False)
    os.utime(copy / "config.json")  # small files are hashed
    assert is_finished(output, _key(copy), overwrite=False)
    (copy / "bundle").mkdir()  # outputs in the folder of the model
    (copy / "bundle" / "model.onnx").touch()
    assert is_finished(output, _key(copy), overwrite=False)
    before = fingerprint(copy)
    for change in (
        lambda: (copy / "config.json").write_text('{"a": 1}'),
        lambda: os.utime(copy / "weights", (1, 1)),
        lambda: (copy / "more").touch(),
        lambda: (copy / "more").rename(copy / "other"),
    ):
        change()
        assert fingerprint(copy) != before
        before = fingerprint(copy)
    with pytest.raises(EdgeLLMError, match="it is from other files of --model_dir"):
        is_finished(output, _key(copy), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_folders_and_inputs_are_refused(model, tmp_path, overwrite):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis").write_text("years of work")
    (output / MADE_BY_NAME).write_text('{"command": 1}')  # no record of ours
    with pytest.raises(EdgeLLMError, match="was not made by edgellm: it has thesis"):
        is_finished(output, _key(model), overwrite=overwrite)
    with pytest.raises(EdgeLLMError, match="is a file"):
        is_finished(output / "thesis", _key(model), overwrite=overwrite)
    ours = tmp_path / "ours"
    _write(ours, _key(model), "a")
    with pytest.raises(EdgeLLMError, match="is the input --model_dir"):
        is_finished(ours, _key(ours), overwrite=overwrite)


def test_a_foreign_file_of_a_needed_name_stays(model, tmp_path):
    output = tmp_path / "out"
    _write(output, _key(model), "a")
    (output / "b").write_text("mine")
    with pytest.raises(EdgeLLMError, match="b exists and is not written by edgellm"):
        _write(output, _key(model, dtype="fp32"), "a", "b")
    assert (output / "b").read_text() == "mine"
    assert is_finished(output, _key(model), overwrite=False)


def test_a_record_names_no_files_outside(model, tmp_path):
    output, outside = tmp_path / "out", tmp_path / "outside"
    outside.write_text("mine")
    _write(output, _key(model), "a")
    record = (output / MADE_BY_NAME).read_text()
    more = f'"../outside": [1, 1], "{outside}": [1, 1], "a":'
    (output / MADE_BY_NAME).write_text(record.replace('"a":', more))
    assert own_files(output) == {"a", MADE_BY_NAME}
    _write(output, _key(model, dtype="fp32"), "c")
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_between_two_moves_leaves_an_unfinished_folder(
    model, tmp_path, monkeypatch, replaces
):
    """It is never taken for finished or foreign, and the same command finishes it."""
    output, replace = tmp_path / "out", Path.replace
    if replaces:
        _write(output, _key(model, dtype="fp32"), "a", "old")

    def cut(path, target):
        nonlocal moves
        moves += 1
        if moves == last:
            raise KeyboardInterrupt
        return replace(path, target)

    last = moves = 0
    for attempt in range(1, 9):
        last, moves = attempt, 0
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", cut)
            _write(output, _key(model), "a", "b")
            break
        require_own(output)
        if own_files(output) - {"old"} and (output / "b").exists():
            assert not is_finished(output, _key(model), overwrite=False)
    assert last == (5 if replaces else 3)
    assert is_finished(output, _key(model), overwrite=False)
    assert {path.name for path in output.iterdir()} == {"a", "b", MADE_BY_NAME}


def test_an_input_of_several_gguf_files_changes_with_each(tmp_path):
    parts = [tmp_path / f"m-0000{index}-of-00002.gguf" for index in (1, 2)]
    for part in parts:
        part.write_bytes(b"weights")
    before = fingerprint(parts[0])
    parts[1].write_bytes(b"changed")
    assert fingerprint(parts[0]) != before
