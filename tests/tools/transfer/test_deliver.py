"""`edgellm-transfer` to a folder and to a simulated device: differences, resuming, checks."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import assert_one_line_error
from device_fakes import (
    ALL,
    CONTENTS,
    PLACE,
    deliver_to,
    make_bundle,
    run_transfer,
    terminate_transfer,
)

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer import scripts, send
from edgellm.tools.transfer.file_list import load
from edgellm.tools.transfer.push import check
from edgellm.tools.transfer.target import connected, parse


def _check(bundle: Path, to: str) -> tuple[str, ...]:
    with connected(parse(to)) as target:
        return check(load(bundle), target)


def _same(one: Path, other: Path) -> bool:
    """Return whether `other` has all files of `one`, byte by byte."""
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    return all((other / name).read_bytes() == (one / name).read_bytes() for name in names)


@pytest.mark.parametrize("to", ["there", PLACE])
def test_a_second_transfer_sends_nothing(bundle, device, tmp_path, to):
    place = tmp_path / "there" if to == "there" else device.home / "models/bundle"
    to = str(place) if to == "there" else to
    first = deliver_to(bundle, to)
    assert first.changed == ALL
    size = sum((bundle / name).stat().st_size for name in ALL)
    assert (first.sent.sent_bytes, first.sent.reused_bytes) == (size, 0)
    assert _same(bundle, place)
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".")] == []
    assert _check(bundle, to) == ()
    second = deliver_to(bundle, to)
    assert (second.changed, second.sent.sent_bytes) == ((), 0)
    assert not list(tmp_path.rglob("oops"))


@pytest.mark.parametrize("to", ["there", PLACE])
def test_only_changed_files_are_sent(bundle, device, tmp_path, to):
    place = tmp_path / "there" if to == "there" else device.home / "models/bundle"
    to = str(place) if to == "there" else to
    deliver_to(bundle, to)
    (place / "notes.txt").write_text("mine")
    stamps = (place / "model.onnx").stat().st_mtime_ns, (place / "model.onnx").stat().st_ino
    shutil.rmtree(bundle)
    make_bundle(bundle, {"model.onnx": b"graph", "model.weights": b"new", "more.bin": b"more"})
    found = deliver_to(bundle, to)
    assert found.changed == ("model.weights", "more.bin", "manifest.json")
    assert _same(bundle, place)
    assert stamps == (
        (place / "model.onnx").stat().st_mtime_ns,
        (place / "model.onnx").stat().st_ino,
    )
    assert (place / "notes.txt").read_text() == "mine"
    assert not (place / "sub/it's $(touch oops).txt").exists()  # of the earlier bundle


def test_arguments_of_rsync_and_ssh(bundle, device):
    deliver_to(bundle, PLACE)
    ((arguments, names),) = device.rsync_calls()
    assert names == list(ALL)
    assert {"--ignore-times", "--partial-dir=.partial", "--files-from=-"} <= {*arguments}
    assert "--copy-dest=../bundle" not in arguments  # the device has no earlier version
    assert arguments[-2:] == [f"{bundle}/", "robot@device:models/.bundle.transfer/"]
    assert arguments[arguments.index("-e") + 1].startswith("ssh -o ConnectTimeout=")
    calls = device.ssh_calls()
    assert all("BatchMode=yes" in call and "ControlPath=" in call for call in calls)
    assert all(call.endswith("robot@device sh -s") for call in calls[:-1])
    assert calls[-1].endswith("-O exit robot@device")
    make_bundle(bundle, {**CONTENTS, "model.onnx": b"another"})
    deliver_to(bundle, PLACE)
    assert "--copy-dest=../bundle" in device.rsync_calls()[1][0]


def test_a_transfer_resumes_after_a_lost_connection(bundle, device, monkeypatch):
    """The copy ends in the middle of a file; the device keeps its earlier version."""
    place = device.home / "models/bundle"
    old = make_bundle(bundle.with_name("old"), {"model.onnx": b"old graph"})
    deliver_to(old, PLACE)
    monkeypatch.setenv("RSYNC_FAILS", "cut")
    with pytest.raises(EdgeLLMError, match="code 20") as found:
        deliver_to(bundle, PLACE)
    assert "run it again" in found.value.hint
    assert _check(old, PLACE) == ()
    assert not (place / "model.weights").exists()
    monkeypatch.delenv("RSYNC_FAILS")
    again = deliver_to(bundle, PLACE)
    assert again.sent.reused_bytes == len(CONTENTS["model.onnx"]) // 2
    assert _same(bundle, place)
    assert _check(old, PLACE) == ("model.onnx", "manifest.json")


def test_staged_files_are_not_sent_again(bundle, device):
    """The earlier transfer ended between two files."""
    stage = device.home / "models/.bundle.transfer"
    stage.mkdir(parents=True)
    shutil.copy(bundle / "model.weights", stage)
    found = deliver_to(bundle, PLACE)
    assert "model.weights" not in device.rsync_calls()[0][1]
    assert "model.weights" in found.changed
    assert _same(bundle, device.home / "models/bundle")


def test_an_interrupted_publish_resumes(bundle, device):
    """Some new files are in the folder with the old manifest, others still in the stage."""
    old = make_bundle(bundle.with_name("old"), {"model.onnx": b"old graph"})
    deliver_to(old, PLACE)
    place, stage = device.home / "models/bundle", device.home / "models/.bundle.transfer"
    stage.mkdir()
    shutil.copy(bundle / "model.weights", place)
    shutil.copy(bundle / "model.onnx", stage)
    deliver_to(bundle, PLACE)
    assert _same(bundle, place)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_does_not_stop_the_moves(tmp_path, number):
    """The signal reaches the shell after the first of two moves."""
    stage, folder = tmp_path / "stage", tmp_path / "folder"
    stage.mkdir()
    for name in ("first", "second"):
        (stage / name).write_text(name)
    script = scripts.publish(str(folder), str(stage), ["first", "second"], [])
    assert "mv -f" in script
    struck = script.replace("mv -f", f"kill -{number.value} $$; mv -f")
    assert subprocess.run(["sh", "-s"], input=struck, text=True, check=False).returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
    assert not stage.exists()


def test_a_local_copy_resumes(bundle, tmp_path, monkeypatch):
    weights = CONTENTS["model.weights"]
    stage = tmp_path / ".there.transfer"
    partial = stage / ".partial" / "model.weights"
    partial.parent.mkdir(parents=True)
    monkeypatch.setattr(send, "_PIECE_BYTES", 1000)
    for kept, content in (
        (3000, weights[:3500]),
        (2000, weights[:2500] + b"x" * 9000),
        (len(weights), weights + b"more"),
        (0, b"x"),
    ):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        found = deliver_to(bundle, str(tmp_path / "there"))
        assert found.sent.reused_bytes == kept
        assert _same(bundle, tmp_path / "there")
        shutil.rmtree(tmp_path / "there")


def test_an_interrupt_terminates_rsync(bundle, device, monkeypatch):
    monkeypatch.setenv("RSYNC_FAILS", "hang")
    code, said = terminate_transfer(device, bundle, PLACE)
    kept, again = said[-2:]
    assert (code, kept) == (
        130,
        "error: interrupted; what arrived is kept in models/.bundle.transfer there",
    )
    assert again.endswith(f"edgellm.tools.transfer {bundle} {PLACE}")
    assert device.rsync_calls()[-1] == "terminated"
    assert not (device.home / "models/bundle").exists()
    monkeypatch.delenv("RSYNC_FAILS")
    assert deliver_to(bundle, PLACE).sent.reused_bytes > 0


def test_the_check_needs_only_sha256sum(bundle, device):
    place = device.home / "models/bundle"
    assert _check(bundle, PLACE) == ALL
    shutil.copytree(bundle, place)
    for name in ("rsync", "df", "mkdir", "mv", "rm", "tail", "cat"):
        (device.commands / name).unlink()
    assert _check(bundle, PLACE) == ()
    (place / "model.weights").write_bytes(b"x" * len(CONTENTS["model.weights"]))
    (place / "model.onnx").unlink()
    assert _check(bundle, PLACE) == ("model.onnx", "model.weights")
    result = run_transfer(bundle, PLACE, "--check")
    assert_one_line_error(result, "2 of 4 files are missing or differ", "without --check")
    shutil.copy(bundle / "model.onnx", place)
    shutil.copy(bundle / "model.weights", place)
    assert "4 files, all hashes right" in run_transfer(bundle, PLACE, "--check").stdout
    assert device.rsync_calls() == []
    (device.commands / "sha256sum").unlink()
    with pytest.raises(EdgeLLMError, match="robot@device has no sha256sum"):
        _check(bundle, PLACE)


def test_an_engine_is_sent_with_its_draft(tmp_path):
    engine, there = tmp_path / "engine", tmp_path / "there"
    make_bundle(engine, {"decode.onnx": b"base"}, kind="llm_engine")
    make_bundle(engine / "draft", {"draft.onnx": b"draft"}, kind="draft_engine")
    names = ("decode.onnx", "draft/draft.onnx", "draft/manifest.json", "manifest.json")
    assert deliver_to(engine, str(there)).changed == names
    assert _same(engine, there)
    make_bundle(engine / "draft", {"draft.onnx": b"new"}, kind="draft_engine")
    assert deliver_to(engine, str(there)).changed == ("draft/draft.onnx", "draft/manifest.json")
    assert _same(engine, there)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_rsync_reuses_data_of_the_earlier_version(bundle, device, tmp_path):
    """The real rsync sends only the changed parts of a file."""
    real = str(shutil.which("rsync", path=os.environ["PATH"].partition(os.pathsep)[2]))
    (tmp_path / "bin/rsync").unlink()
    (device.commands / "rsync").unlink()
    (tmp_path / "bin/rsync").symlink_to(real)
    (device.commands / "rsync").symlink_to(real)
    weights = bytearray(hashlib.sha256(b"seed").digest() * 40_000)
    for start in range(0, len(weights), 4096):
        weights[start : start + 8] = start.to_bytes(8, "little")
    make_bundle(bundle, {**CONTENTS, "model.weights": bytes(weights)})
    deliver_to(bundle, PLACE)
    weights[500_000:500_100] = b"z" * 100
    make_bundle(bundle, {**CONTENTS, "model.weights": bytes(weights)})
    found = deliver_to(bundle, PLACE)
    assert found.changed == ("model.weights", "manifest.json")
    assert _same(bundle, device.home / "models/bundle")
    assert found.sent.sent_bytes < len(weights) // 20
