"""Engines are checked at each load: damage is found, verified files are not read again."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from edgellm.core import checksums
from edgellm.core.artifact import hash_file
from edgellm.core.checksums import RECORD_NAME, FileCheck, remember
from edgellm.core.errors import BrokenArtifactError
from edgellm.device_runtime import LLM, SpecOptions

NAMES = ("a.onnx", "deep/b.data")
WHOLE = b"0123456789" * 1000


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(WHOLE)
    return tmp_path / "engine"


@pytest.fixture
def reads(monkeypatch):
    """Names of files, recorded when they are read."""
    found: list[str] = []

    def read(path: Path, *arguments):
        found.append(path.name)
        return hash_file(path, *arguments)

    monkeypatch.setattr(checksums, "hash_file", read)
    return found


def _files(folder):
    return {name: hash_file(folder / name) for name in NAMES}


def _check(folder, files, verify=None):
    with FileCheck(folder, files, verify):
        pass


def _flip(path, keeps_time=False):
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    data[len(data) // 2 + 1] ^= 255
    path.write_bytes(data)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_files_are_read_once(folder, reads):
    files = _files(folder)
    for _ in range(3):
        _check(folder, files)
    assert sorted(reads) == ["a.onnx", "b.data"]
    _check(folder, files, verify=True)
    assert len(reads) == 4
    (folder / "a.onnx").touch()
    _check(folder, files, verify=False)
    assert len(reads) == 4
    _check(folder, files)
    assert reads[4:] == ["a.onnx"]


def test_files_of_the_build_are_not_read_again(folder, reads):
    remember(folder, files := _files(folder))
    _check(folder, files)
    assert reads == []


@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_two_flipped_bytes(folder, known, keeps_time):
    files = _files(folder)
    if known:
        _check(folder, files)
        time.sleep(0.02)  # file systems resolve times to some milliseconds
    _flip(folder / "deep/b.data", keeps_time)
    for verify in (None, None, True):
        with pytest.raises(BrokenArtifactError, match=r"b\.data was changed: its sha256 differs"):
            _check(folder, files, verify)
    _check(folder, files, verify=False)


def test_a_copy_is_read(folder, tmp_path, reads):
    _check(folder, files := _files(folder))
    copy = shutil.copytree(folder, tmp_path / "copy")  # the record, too
    _check(copy, files)
    assert sorted(reads) == ["a.onnx", "a.onnx", "b.data", "b.data"]


def test_another_manifest_is_another_check(folder):
    files = _files(folder)
    _check(folder, files)
    files["a.onnx"] = type(files["a.onnx"])(len(WHOLE), "0" * 64)
    with pytest.raises(BrokenArtifactError, match="sha256 differs"):
        _check(folder, files)


def test_where_nothing_can_be_written_the_cache_remembers(folder, tmp_path, reads):
    files = _files(folder)
    (folder / RECORD_NAME).mkdir()  # stands for a read-only folder, which root could write
    for _ in range(2):
        _check(folder, files)
    assert len(reads) == 2
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("")  # nor can the cache
    for _ in range(2):
        _check(folder, files)
    assert len(reads) == 6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a.onnx": 5}', '{"a.onnx": [[]]}', "\xff"])
def test_a_broken_record_is_none(folder, reads, text):
    (folder / RECORD_NAME).write_text(text, "latin-1")
    _check(folder, _files(folder))
    assert len(reads) == 2


def test_a_record_that_is_a_link_to_itself_is_replaced(folder, reads):
    (folder / RECORD_NAME).symlink_to(RECORD_NAME)
    files = {name: hash_file(folder / name) for name in NAMES}
    with FileCheck(folder, files, None):
        pass
    assert (folder / RECORD_NAME).is_file()
    assert len(reads) == len(NAMES)


def test_damage_is_reported_before_its_consequences(folder):
    files = _files(folder)
    _flip(folder / "a.onnx")
    with (
        pytest.raises(BrokenArtifactError, match=r"a\.onnx was changed"),
        FileCheck(folder, files, None),
    ):
        raise ValueError("no graph")


def test_other_errors_are_unchanged(folder):
    with (
        pytest.raises(ValueError, match="for another machine"),
        FileCheck(folder, _files(folder), None),
    ):
        raise ValueError("for another machine")


def test_an_interrupt_does_not_wait_for_the_hashes(folder, monkeypatch):
    files = _files(folder)

    def read(_path, is_stopped):
        while not is_stopped():
            time.sleep(0.001)
        return files["a.onnx"]

    monkeypatch.setattr(checksums, "hash_file", read)
    with pytest.raises(KeyboardInterrupt), FileCheck(folder, files, None):
        raise KeyboardInterrupt
    assert not (folder / RECORD_NAME).exists()


@pytest.mark.parametrize("part", ["", "draft"])
def test_engines(eagle_pair, tmp_path, reads, part):
    """Base and draft: a load after a build reads nothing, and damage is found without a flag."""
    LLM(eagle_pair.engine, spec=SpecOptions())
    assert reads == []
    engine = Path(shutil.copytree(eagle_pair.engine, tmp_path / "engine"))
    largest = max((engine / part).glob("*.*"), key=lambda path: path.stat().st_size)
    _flip(largest)
    with pytest.raises(BrokenArtifactError, match=f"{largest.name} was changed"):
        LLM(engine, spec=SpecOptions())


def test_a_draft_model(tree_engine, tiny_engine, tmp_path, reads):
    draft = Path(shutil.copytree(tiny_engine, tmp_path / "draft"))
    _flip(draft / "decode.data")
    with pytest.raises(BrokenArtifactError, match=r"decode\.data was changed"):
        LLM(tree_engine, spec=SpecOptions(network="draft", draft_engine_dir=draft))
    assert set(reads) <= {path.name for path in draft.iterdir()}
