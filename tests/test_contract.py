from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal

import pytest

from edgellm import artifact
from edgellm.artifact import publish, temporary_folder, verify_files
from edgellm.contract import (
    BrokenArtifactError,
    BundleManifest,
    DecoderSpec,
    EdgeLLMError,
    EngineManifest,
    KVCacheSpec,
    load_manifest,
)

SPEC = DecoderSpec("llama", 96, 96, 128, 1000, KVCacheSpec(3, 2, 16, "float16"))
MANIFEST = BundleManifest(SPEC, "float16", "none", 24, (2, 7), {"dtype": "fp16"}, {"from": "x"})


def _publish(output, content="one"):
    with temporary_folder(output) as folder:
        (folder / "model.onnx").write_text(content)
        return publish(folder, output, MANIFEST)


def _leftovers(folder):
    return [path.name for path in folder.iterdir() if ".partial-" in path.name]


def test_manifest_survives_the_disk(tmp_path):
    written = _publish(tmp_path / "out")
    assert load_manifest(tmp_path / "out", BundleManifest) == written
    assert written.files["model.onnx"].num_bytes == 3
    verify_files(tmp_path / "out", written.files)


def test_kv_bytes_per_token():
    assert SPEC.kv.bytes_per_token == 2 * 3 * 2 * 16 * 2


def test_publishing_again_replaces_only_our_files(tmp_path):
    output = tmp_path / "out"
    _publish(output)
    (output / "notes.txt").write_text("mine")
    with temporary_folder(output) as folder:
        (folder / "other.onnx").write_text("two")
        publish(folder, output, MANIFEST)
    assert sorted(p.name for p in output.iterdir()) == ["manifest.json", "notes.txt", "other.onnx"]
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.onnx", "manifest.json"])
def test_a_foreign_file_is_never_overwritten(tmp_path, name):
    output = tmp_path / "out"
    output.mkdir()
    (output / name).write_text("{}")
    with pytest.raises(EdgeLLMError, match="exists and is not of an earlier llm_bundle"):
        _publish(output)
    assert (output / name).read_text() == "{}"
    assert not _leftovers(tmp_path)


def test_a_failure_leaves_the_old_artifact(tmp_path):
    output = tmp_path / "out"
    before = _publish(output)

    def fail():
        with temporary_folder(output) as folder:
            (folder / "model.onnx").write_text("half")
            raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert load_manifest(output, BundleManifest) == before
    verify_files(output, before.files)
    assert not _leftovers(tmp_path)


def test_an_interrupt_waits_for_the_renames(tmp_path, monkeypatch):
    output = tmp_path / "out"
    replace = artifact.Path.replace

    def interrupted(self, target):
        os.kill(os.getpid(), signal.SIGINT)
        return replace(self, target)

    monkeypatch.setattr(artifact.Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _publish(output)
    monkeypatch.undo()
    verify_files(output, load_manifest(output, BundleManifest).files)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.update(contract_version=99), "contract version 99"),
        (lambda raw: raw.update(kind="llm_engine"), "is a llm_engine, not a llm_bundle"),
        (lambda raw: raw.pop("decoder"), "is damaged"),
        (lambda raw: raw.update(opset="24"), "is damaged"),
        (lambda raw: raw.pop("kind"), "is damaged"),
    ],
)
def test_damaged_manifests(tmp_path, damage, message):
    _publish(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(BrokenArtifactError, match=message):
        load_manifest(tmp_path / "out", BundleManifest)


def test_a_manifest_that_is_not_json(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BrokenArtifactError, match="is damaged"):
        load_manifest(tmp_path, EngineManifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.unlink(), "is missing"),
        (lambda p: p.write_text("on"), "2 bytes instead of 3"),
        (lambda p: p.write_text("ONE"), "sha256 differs"),
    ],
)
def test_changed_files_are_found(tmp_path, change, message):
    manifest = _publish(tmp_path / "out")
    change(tmp_path / "out" / "model.onnx")
    with pytest.raises(BrokenArtifactError, match=message):
        verify_files(tmp_path / "out", manifest.files)


def test_manifests_are_facts():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MANIFEST.opset = 23


def test_a_deferred_interrupt_reaches_its_handler():
    """Which notes it, so that a command ends as interrupted."""
    seen: list[object] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def finish() -> None:
        with artifact.defer_interrupt():
            signal.raise_signal(signal.SIGTERM)
            seen.append("finished")

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            finish()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["finished", signal.SIGTERM]
