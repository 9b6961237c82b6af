from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from manifests import read_manifest, write_manifest

from edgellm.core import artifact, file_lock
from edgellm.core.artifact import publish, temporary_folder, verify_files
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.manifest import (
    CONTRACT_VERSION,
    ENGINE_VERSION,
    LLM_BUNDLE,
    LLM_ENGINE,
    Bundle,
    GraphSpec,
    load_bundle,
    load_engine,
)
from edgellm.core.model_spec import DecoderSpec, KVCacheSpec
from edgellm.core.resources import require_space

SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=96,
    hidden_size=96,
    max_positions=128,
    num_parameters=1000,
    kv=KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float16"),
)
MANIFEST = Bundle(
    kind=LLM_BUNDLE,
    spec=SPEC,
    graphs={"decoder": GraphSpec("model.onnx")},
    dtype="float16",
    quantization="none",
    opset=24,
    options={"dtype": "fp16"},
    provenance={"from": "x"},
    eos_token_ids=(2, 7),
)


def _publish(output, content="one"):
    with temporary_folder(output) as folder:
        (folder / "model.onnx").write_text(content)
        return publish(folder, output, MANIFEST)


def _leftovers(folder):
    return [path.name for path in folder.iterdir() if ".partial-" in path.name]


def test_manifest_survives_the_disk(tmp_path):
    written = _publish(tmp_path / "out")
    assert load_bundle(tmp_path / "out", LLM_BUNDLE) == written
    assert written.files["model.onnx"].num_bytes == 3
    verify_files(tmp_path / "out", written.files)


def test_a_changed_value_or_a_missing_key_of_a_manifest_is_found(tmp_path):
    _publish(tmp_path)
    path = tmp_path / "manifest.json"
    text = path.read_text()
    raw = json.loads(text)
    for key in ("eos_token_ids", "generation_defaults", "hidden_taps"):  # all of them optional
        path.write_text(json.dumps({name: raw[name] for name in raw if name != key}))
        with pytest.raises(BrokenArtifactError, match="differs from its checksum"):
            load_bundle(tmp_path, LLM_BUNDLE)
    path.write_text(text.replace('"max_positions": 128', '"max_positions": 256'))
    with pytest.raises(BrokenArtifactError, match="differs from its checksum"):
        load_bundle(tmp_path, LLM_BUNDLE)
    path.write_text(json.dumps(raw))  # other spaces
    assert load_bundle(tmp_path, LLM_BUNDLE).eos_token_ids == (2, 7)
    write_manifest(tmp_path, read_manifest(tmp_path))
    assert load_bundle(tmp_path, LLM_BUNDLE).eos_token_ids == (2, 7)


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
    with pytest.raises(EdgeLLMError, match="exists and is not part of an earlier llm_bundle"):
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

    with pytest.raises(EdgeLLMError, match="No space left on device"):
        fail()
    assert load_bundle(output, LLM_BUNDLE) == before
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
    verify_files(output, load_bundle(output, LLM_BUNDLE).files)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.update(contract_version=99), "contract version 99"),
        (lambda raw: raw.update(kind="llm_engine"), "is of kind llm_engine, not llm_bundle"),
        (lambda raw: raw.pop("spec"), "is damaged"),
        (lambda raw: raw.update(graphs={}), "is damaged"),
        (lambda raw: raw.update(graphs={"oracle": {"path": "a.onnx"}}), "is damaged: .*oracle"),
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
        load_bundle(tmp_path / "out", LLM_BUNDLE)


KINDS = {
    "llm_bundle": "edgellm-export llm --model_dir 'my model' --output_dir {own}",
    "draft_bundle": "edgellm-export draft --draft_model_dir 'my model' --base_model_dir base "
    "--output_dir {own}",
    "visual_bundle": "edgellm-export visual --model_dir 'my model' --output_dir {own}",
    "audio_bundle": "edgellm-export audio --model_dir 'my model' --output_dir {own}",
    "llm_engine": "llm_build --onnxDir made --engineDir {own}",
    "draft_engine": "llm_build --eagleDraft --onnxDir made --engineDir {parent}",
    "visual_engine": "visual_build --onnxDir made --engineDir {own}",
    "audio_engine": "audio_build --onnxDir made --engineDir {own}",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [-1, 1])
def test_other_versions_are_named_with_the_command_that_makes_it_anew(tmp_path, kind, step):
    """Also where all other fields of the manifest have changed."""
    folder = tmp_path / "out"
    folder.mkdir()
    is_engine = kind.endswith("engine")
    reads = ENGINE_VERSION if is_engine else CONTRACT_VERSION
    raw = {
        "kind": kind,
        "contract_version": reads + step,
        "provenance": {
            "edgellm": "9.8.7", "checkpoint": "my model", "base": "base", "bundle": "made",
        },
        "another": 1,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(raw))
    own = importlib.metadata.version("edgellm")
    message = (
        f"{folder} has contract version {reads + step} (edgellm 9.8.7 wrote it); "
        f"edgellm {own} here reads {reads}"
    )
    with pytest.raises(BrokenArtifactError, match=re.escape(message)) as found:
        (load_engine if is_engine else load_bundle)(folder, kind)
    command = KINDS[kind].format(own=folder, parent=tmp_path)
    anew = f"make it anew, with its flags: {command} --overwrite"
    update = "update edgellm here to 9.8.7 or newer, or " if step > 0 else ""
    assert found.value.hint == update + anew


def test_a_manifest_of_an_unknown_version_without_provenance(tmp_path):
    raw = {"kind": LLM_ENGINE, "contract_version": "two"}
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BrokenArtifactError, match="has contract version two; edgellm") as found:
        load_engine(tmp_path, LLM_ENGINE)
    assert "llm_build --onnxDir ONNXDIR --engineDir" in found.value.hint


def test_a_manifest_that_is_not_json(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BrokenArtifactError, match="is damaged"):
        load_engine(tmp_path, LLM_ENGINE)


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


def test_an_interrupt_during_the_clean_up_leaves_nothing(tmp_path, monkeypatch):
    remove = file_lock.shutil.rmtree

    def interrupted(path, **how):
        remove(path, **how)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(file_lock.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), temporary_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("key", "value"), [("dtype", "é" * 5000), ("pooling", "max")])
def test_a_manifest_with_an_unknown_value_is_damaged(tmp_path, key, value):
    _publish(tmp_path)
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**raw, key: value}), "utf-8")
    with pytest.raises(BrokenArtifactError, match=f"damaged.*{key} '.*' is not one of"):
        load_bundle(tmp_path, LLM_BUNDLE)


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, "8", True])
def test_a_limit_that_no_engine_has_is_damage(tmp_path, value):
    _publish(tmp_path)
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**raw, "max_batch_size": value}), "utf-8")
    with pytest.raises(BrokenArtifactError, match=r"max_batch_size .* is no limit of an engine"):
        load_bundle(tmp_path, LLM_BUNDLE)


def test_a_deferred_interrupt_reaches_its_handler():
    """The interrupt is recorded, so that the command exits as interrupted."""
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


def _killed_in_the_middle(output):
    """Leftovers of a run that is killed while it writes."""
    before = set(_leftovers(output.parent))
    code = (
        "import os, pathlib, sys; from edgellm.core.artifact import temporary_folder\n"
        "with temporary_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'model.weights').write_bytes(b'x' * 9)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, output], check=False)
    assert result.returncode == -signal.SIGKILL
    (left,) = set(_leftovers(output.parent)) - before
    return left


def test_the_next_run_removes_leftovers_of_a_killed_one(tmp_path):
    """Foreign files and those of other outputs stay."""
    output = tmp_path / "out"
    other = _killed_in_the_middle(tmp_path / "out2")
    left = _killed_in_the_middle(output)
    foreign = tmp_path / ".out.partial-mine"
    (foreign / "files").mkdir(parents=True)
    (foreign / "lock").write_text("my own lock")
    (tmp_path / ".out.partial-file").write_text("mine")
    _publish(output)
    assert left != other
    assert sorted(_leftovers(tmp_path)) == sorted([other, ".out.partial-mine", ".out.partial-file"])
    assert (foreign / "lock").read_text() == "my own lock"


def test_two_runs_into_one_folder(tmp_path):
    """The second run of one output is rejected; another folder is free."""
    output = tmp_path / "out"
    with temporary_folder(output) as first:
        (first / "model.onnx").write_text("first")
        with pytest.raises(EdgeLLMError, match=r"another run is writing .*out") as caught:
            _publish(output, "second")
        assert caught.value.hint
        _publish(tmp_path / "out2")
        publish(first, output, MANIFEST)
    assert (output / "model.onnx").read_text() == "first"
    assert not _leftovers(tmp_path)
    _publish(output, "second")
    assert (output / "model.onnx").read_text() == "second"


def test_an_output_on_another_disk_than_the_folder_above(tmp_path, monkeypatch):
    """A container's volume: files cannot be renamed into it from outside."""
    output = tmp_path / "out"
    output.mkdir()
    devices = {output: 1, tmp_path: 2}
    stat = file_lock.Path.stat

    def with_devices(self, **options):
        found = stat(self, **options)
        if self not in devices:
            return found
        return SimpleNamespace(st_mode=found.st_mode, st_dev=devices[self])

    monkeypatch.setattr(file_lock.Path, "stat", with_devices)
    with temporary_folder(output) as folder:
        assert output in folder.parents
        (folder / "model.onnx").write_text("one")
        publish(folder, output, MANIFEST)
    assert sorted(path.name for path in output.iterdir()) == ["manifest.json", "model.onnx"]


def test_a_full_disk_names_folder_and_bytes(tmp_path):
    def fill():
        with temporary_folder(tmp_path / "out") as folder:
            (folder / "half").write_bytes(b"x" * 100_000)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EdgeLLMError, match=r"No space left on device in .*: more than ") as caught:
        fill()
    needed, free = map(int, re.findall(r"(\d+) (?:bytes )?are", str(caught.value)))
    assert needed - free >= 100_000
    assert str(tmp_path) in str(caught.value)
    fault = rf"in {tmp_path}: {10**18} bytes are needed, \d+ are"
    with pytest.raises(EdgeLLMError, match=fault), temporary_folder(tmp_path / "out") as folder:
        require_space(folder, 10**18)


def test_a_full_disk_of_safetensors_is_recognized(tmp_path):
    """Its own writer fails under a limit of file sizes, as `ulimit -f` sets it."""
    import safetensors  # noqa: F401  # its absence is named, so that --quick leaves this out

    code = (
        "import pathlib, resource, signal, sys, numpy\n"
        "from safetensors.numpy import save_file\n"
        "from edgellm.core.resources import explain_full_disk\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "with explain_full_disk(pathlib.Path(sys.argv[1])):\n"
        "    save_file({'x': numpy.zeros(10**5)}, sys.argv[1] + '/file')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "LimitError: File too large in" in found.stderr, found.stderr
