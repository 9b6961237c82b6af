"""`edgellm-transfer`: to a folder, to a device behind fakes, interrupted, refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import INTERRUPTED, assert_one_line_error
from device_fakes import CONTENTS, Device, make_bundle, make_device, write_command

from edgellm.contract import BrokenArtifactError, EdgeLLMError, LimitError
from edgellm.tools.transfer import send
from edgellm.tools.transfer.deliver import Delivery, check, deliver
from edgellm.tools.transfer.faults import explain
from edgellm.tools.transfer.file_list import load
from edgellm.tools.transfer.target import Target, connected, parse

ALL = (*CONTENTS, "manifest.json")
DEVICE = "robot@device:models/bundle"


@pytest.fixture
def bundle(tmp_path) -> Path:
    return make_bundle(tmp_path / "bundle", CONTENTS)


@pytest.fixture
def device(tmp_path, monkeypatch) -> Device:
    found, here = make_device(tmp_path)
    for name, value in found.environment(here).items():
        monkeypatch.setenv(name, value)
    return found


def _deliver(bundle: Path, to: str) -> Delivery:
    with connected(parse(to)) as target:
        return deliver(load(bundle), target)


def _check(bundle: Path, to: str) -> tuple[str, ...]:
    with connected(parse(to)) as target:
        return check(load(bundle), target)


def _same(one: Path, other: Path) -> bool:
    """Whether `other` has all files of `one`, byte by byte."""
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    return all((other / name).read_bytes() == (one / name).read_bytes() for name in names)


def _run(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "edgellm.tools.transfer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("to", ["there", DEVICE])
def test_everything_and_then_nothing(bundle, device, tmp_path, to):
    place = tmp_path / "there" if to == "there" else device.home / "models/bundle"
    to = str(place) if to == "there" else to
    first = _deliver(bundle, to)
    assert first.changed == ALL
    size = sum((bundle / name).stat().st_size for name in ALL)
    assert (first.sent.travelled, first.sent.found) == (size, 0)
    assert _same(bundle, place)
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".")] == []
    assert _check(bundle, to) == ()
    second = _deliver(bundle, to)
    assert (second.changed, second.sent.travelled) == ((), 0)
    assert not list(tmp_path.rglob("oops"))


@pytest.mark.parametrize("to", ["there", DEVICE])
def test_only_what_differs_travels(bundle, device, tmp_path, to):
    place = tmp_path / "there" if to == "there" else device.home / "models/bundle"
    to = str(place) if to == "there" else to
    _deliver(bundle, to)
    (place / "notes.txt").write_text("mine")
    stamps = (place / "model.onnx").stat().st_mtime_ns, (place / "model.onnx").stat().st_ino
    shutil.rmtree(bundle)
    make_bundle(bundle, {"model.onnx": b"graph", "model.weights": b"new", "more.bin": b"more"})
    found = _deliver(bundle, to)
    assert found.changed == ("model.weights", "more.bin", "manifest.json")
    assert _same(bundle, place)
    assert stamps == (
        (place / "model.onnx").stat().st_mtime_ns, (place / "model.onnx").stat().st_ino,
    )  # fmt: skip
    assert (place / "notes.txt").read_text() == "mine"
    assert not (place / "sub/it's $(touch oops).txt").exists()  # of the earlier bundle


def test_what_rsync_and_ssh_are_told(bundle, device):
    _deliver(bundle, DEVICE)
    ((arguments, names),) = device.rsync_calls()
    assert names == list(ALL)
    assert {"--ignore-times", "--partial-dir=.partial", "--files-from=-"} <= {*arguments}
    assert "--copy-dest=../bundle" not in arguments  # there is nothing yet to compare with
    assert arguments[-2:] == [f"{bundle}/", "robot@device:models/.bundle.transfer/"]
    assert arguments[arguments.index("-e") + 1].startswith("ssh -o ConnectTimeout=")
    calls = device.ssh_calls()
    assert all("BatchMode=yes" in call and "ControlPath=" in call for call in calls)
    assert all(call.endswith("robot@device sh -s") for call in calls[:-1])
    assert calls[-1].endswith("-O exit robot@device")
    make_bundle(bundle, {**CONTENTS, "model.onnx": b"another"})
    _deliver(bundle, DEVICE)
    assert "--copy-dest=../bundle" in device.rsync_calls()[1][0]


def test_a_broken_connection_goes_on_where_it_was(bundle, device, monkeypatch):
    """The copy ends in the middle of a file; the device keeps what it had."""
    place = device.home / "models/bundle"
    old = make_bundle(bundle.with_name("old"), {"model.onnx": b"old graph"})
    _deliver(old, DEVICE)
    monkeypatch.setenv("RSYNC_FAILS", "cut")
    with pytest.raises(EdgeLLMError, match="code 20") as found:
        _deliver(bundle, DEVICE)
    assert "run it again" in found.value.hint
    assert _check(old, DEVICE) == ()
    assert not (place / "model.weights").exists()
    monkeypatch.delenv("RSYNC_FAILS")
    again = _deliver(bundle, DEVICE)
    assert again.sent.found == len(CONTENTS["model.onnx"]) // 2
    assert _same(bundle, place)
    assert _check(old, DEVICE) == ("model.onnx", "manifest.json")


def test_files_that_arrived_do_not_travel_again(bundle, device):
    """Of a transfer that ended between two files."""
    stage = device.home / "models/.bundle.transfer"
    stage.mkdir(parents=True)
    shutil.copy(bundle / "model.weights", stage)
    found = _deliver(bundle, DEVICE)
    assert "model.weights" not in device.rsync_calls()[0][1]
    assert "model.weights" in found.changed
    assert _same(bundle, device.home / "models/bundle")


def test_a_move_that_was_cut_short_goes_on(bundle, device):
    """New files lie beside the old manifest, others still on the stage."""
    old = make_bundle(bundle.with_name("old"), {"model.onnx": b"old graph"})
    _deliver(old, DEVICE)
    place, stage = device.home / "models/bundle", device.home / "models/.bundle.transfer"
    stage.mkdir()
    shutil.copy(bundle / "model.weights", place)
    shutil.copy(bundle / "model.onnx", stage)
    _deliver(bundle, DEVICE)
    assert _same(bundle, place)


def test_a_local_copy_goes_on_where_it_was(bundle, tmp_path, monkeypatch):
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
        found = _deliver(bundle, str(tmp_path / "there"))
        assert found.sent.found == kept
        assert _same(bundle, tmp_path / "there")
        shutil.rmtree(tmp_path / "there")


def test_an_interrupt_reaches_rsync(bundle, device, monkeypatch):
    monkeypatch.setenv("RSYNC_FAILS", "hang")
    command = [sys.executable, "-m", "edgellm.tools.transfer", bundle, DEVICE]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (device.log / "hanging").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.splitlines()) == INTERRUPTED
    assert device.rsync_calls()[-1] == "terminated"
    assert not (device.home / "models/bundle").exists()
    monkeypatch.delenv("RSYNC_FAILS")
    assert _deliver(bundle, DEVICE).sent.found > 0


def test_what_arrives_damaged_is_refused(bundle, device, monkeypatch):
    monkeypatch.setenv("RSYNC_FAILS", "garble")
    with pytest.raises(BrokenArtifactError, match=r"model\.onnx, .* another sha256"):
        _deliver(bundle, DEVICE)
    assert not (device.home / "models/bundle").exists()
    monkeypatch.delenv("RSYNC_FAILS")
    assert _deliver(bundle, DEVICE).changed == ALL


def test_the_check_needs_nothing_but_sha256sum(bundle, device):
    place = device.home / "models/bundle"
    assert _check(bundle, DEVICE) == ALL
    shutil.copytree(bundle, place)
    for name in ("rsync", "df", "mkdir", "mv", "rm", "tail", "cat"):
        (device.commands / name).unlink()
    assert _check(bundle, DEVICE) == ()
    (place / "model.weights").write_bytes(b"x" * len(CONTENTS["model.weights"]))
    (place / "model.onnx").unlink()
    assert _check(bundle, DEVICE) == ("model.onnx", "model.weights")
    result = _run(bundle, DEVICE, "--check")
    assert_one_line_error(result, "2 of 4 files are missing or differ", "without --check")
    shutil.copy(bundle / "model.onnx", place)
    shutil.copy(bundle / "model.weights", place)
    assert "4 files, all hashes right" in _run(bundle, DEVICE, "--check").stdout
    assert device.rsync_calls() == []
    (device.commands / "sha256sum").unlink()
    with pytest.raises(EdgeLLMError, match="robot@device has no sha256sum"):
        _check(bundle, DEVICE)


def test_an_engine_takes_its_draft_along(tmp_path):
    engine, there = tmp_path / "engine", tmp_path / "there"
    make_bundle(engine, {"decode.onnx": b"base"}, kind="llm_engine")
    make_bundle(engine / "draft", {"draft.onnx": b"draft"}, kind="draft_engine")
    names = ("decode.onnx", "draft/draft.onnx", "draft/manifest.json", "manifest.json")
    assert _deliver(engine, str(there)).changed == names
    assert _same(engine, there)
    make_bundle(engine / "draft", {"draft.onnx": b"new"}, kind="draft_engine")
    assert _deliver(engine, str(there)).changed == ("draft/draft.onnx", "draft/manifest.json")
    assert _same(engine, there)


def test_a_changed_source_is_not_sent(bundle, device):
    (bundle / "model.weights").write_bytes(b"y" * len(CONTENTS["model.weights"]))
    with pytest.raises(BrokenArtifactError, match=r"model\.weights was changed"):
        _deliver(bundle, DEVICE)
    assert device.rsync_calls() == []
    assert not (device.home / "models/bundle").exists()


def test_files_of_others_are_left_alone(bundle, device):
    place = device.home / "models/bundle"
    place.mkdir(parents=True)
    (place / "model.onnx").write_text("of somebody else")
    with pytest.raises(EdgeLLMError, match=r"not of an earlier transfer: model\.onnx") as found:
        _deliver(bundle, DEVICE)
    assert "another folder" in found.value.hint
    assert (place / "model.onnx").read_text() == "of somebody else"
    (place / "model.onnx").unlink()
    make_bundle(place, {"draft.bin": b"x"}, kind="draft_bundle")
    with pytest.raises(EdgeLLMError, match=r"not of an earlier transfer: manifest\.json"):
        _deliver(bundle, DEVICE)
    assert (place / "draft.bin").exists()


def test_a_manifest_of_the_device_cannot_reach_outside(bundle, device):
    place = device.home / "models/bundle"
    (device.home / "precious").write_text("x")
    make_bundle(place, {"old.bin": b"x"})
    raw = json.loads((place / "manifest.json").read_text())
    raw["files"]["../../precious"] = raw["files"]["old.bin"]
    (place / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(EdgeLLMError, match="not of an earlier transfer"):
        _deliver(bundle, DEVICE)
    assert (device.home / "precious").exists()


def test_a_disk_that_is_too_small(bundle, device):
    (device.commands / "df").unlink()
    line = "/dev/disk 100 98 2 98% /data"
    write_command(device.commands / "df", f"#!/bin/sh\necho Filesystem\necho {line}\n")
    with pytest.raises(LimitError, match=r"models/bundle has 0.0 MB free, .* bytes") as found:
        _deliver(bundle, DEVICE)
    assert "free some space" in found.value.hint
    assert device.rsync_calls() == []


@pytest.mark.parametrize(
    ("errors", "message", "hint"),
    [
        ("ssh: Could not resolve hostname device: Name or service not known",
         "robot@device is not known", "check the name"),
        ("ssh: connect to host device port 22: No route to host",
         "robot@device cannot be reached", "the device is on"),
        ("ssh: connect to host device port 22: Connection refused",
         "robot@device refuses connections", "start its ssh server"),
        ("ssh: connect to host device port 22: Connection timed out",
         "robot@device does not answer", "the device is on"),
        ("robot@device: Permission denied (publickey,password).",
         "robot@device refuses the login", "check user and key"),
        ("Host key verification failed.", "is not the machine that it was", "connect once"),
        ("something new", "cannot be reached (something new)", "ssh must work"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("device")
def test_connections_that_fail(bundle, monkeypatch, errors, message, hint):
    monkeypatch.setenv("SSH_FAILS", errors)
    with pytest.raises(EdgeLLMError) as found:
        _deliver(bundle, DEVICE)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
    assert hint in found.value.hint


@pytest.mark.parametrize(
    ("errors", "message", "hint"),
    [
        ("rsync: [receiver] write failed on \"x\": No space left on device (28)", "is full",
         "what has arrived is kept"),
        ("rsync: [generator] mkdir \"x\" failed: Permission denied (13)", "cannot be written",
         "your user"),
        ("rsync error: unexplained error (code 255)", "unexplained error", "run it again"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("device")
def test_copies_that_fail(bundle, monkeypatch, errors, message, hint):
    monkeypatch.setenv("RSYNC_FAILS", f"says {errors}")
    with pytest.raises(EdgeLLMError) as found:
        _deliver(bundle, DEVICE)
    assert message in str(found.value)
    assert hint in found.value.hint


@pytest.mark.usefixtures("device")
def test_places_that_cannot_be_written(bundle, tmp_path):
    (tmp_path / "file").write_text("x")
    for to, message in (
        (f"robot@device:{tmp_path / 'file'}", "is a file"),
        (str(tmp_path / "file"), "is a file"),
        ("/proc/there", "/proc/there"),
        ("robot@device:/proc/there", "robot@device:/proc/there"),
    ):
        with pytest.raises(EdgeLLMError, match=message):
            _deliver(bundle, to)
    assert explain(Target("a@b", "c"), 21, "mkdir: 'c': Permission denied").hint


@pytest.mark.parametrize("absent", ["ssh", "rsync"])
@pytest.mark.usefixtures("device")
def test_tools_that_are_missing_here(bundle, tmp_path, monkeypatch, absent):
    here = tmp_path / "bin"
    (here / absent).unlink()
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(EdgeLLMError, match=f"{absent} is not installed here") as found:
        _deliver(bundle, DEVICE)
    assert "install it" in found.value.hint


def test_an_rsync_that_is_missing_there(bundle, device):
    (device.commands / "rsync").unlink()
    with pytest.raises(EdgeLLMError, match="robot@device has no rsync") as found:
        _deliver(bundle, DEVICE)
    assert "install it there" in found.value.hint


@pytest.mark.parametrize(
    ("text", "host", "folder"),
    [
        ("robot:models/b", "robot", "models/b"),
        ("me@robot:/data/b/", "me@robot", "/data/b"),
        ("me@robot:~/b", "me@robot", "b"),
        ("[fe80::1]:b", "[fe80::1]", "b"),
        ("me@[fe80::1]:/b", "me@[fe80::1]", "/b"),
        ("folder/with:colon", "", "folder/with:colon"),
        ("/absolute", "", "/absolute"),
    ],
)
def test_targets(text, host, folder):
    assert parse(text) == Target(host, folder)
    assert str(parse("me@robot:~/b")) == "me@robot:b"


@pytest.mark.parametrize("text", ["robot:", "robot:~", "robot:/", "-oProxyCommand=x:b", "", ".."])
def test_targets_that_are_none(text):
    with pytest.raises(EdgeLLMError, match="names no folder of its own"):
        parse(text)


def test_commands_that_are_refused(bundle, tmp_path):
    for arguments, fragments in (
        ((tmp_path / "none", "there"), ("no such folder", "edgellm-export")),
        ((tmp_path, "there"), ("has no readable manifest.json", "edgellm-export")),
        ((bundle, bundle), ("is the bundle itself", "another folder")),
        ((bundle, bundle / "inner"), ("is the bundle itself", "another folder")),
    ):
        assert_one_line_error(_run(*arguments), *fragments)
    result = _run(bundle, tmp_path / "there")
    assert "4 of 4 files new or changed" in result.stdout
    assert (result.returncode, result.stderr) == (0, "")


def test_a_full_disk_here(bundle, tmp_path):
    """As a quota would end it; the next run goes on."""
    import resource

    (bundle / "model.weights").unlink()
    make_bundle(bundle, {**CONTENTS, "model.weights": bytes(300_000)})
    limit = (100_000, 100_000)
    result = _run(
        bundle, tmp_path / "there",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )  # fmt: skip
    assert_one_line_error(result, f"File too large in {tmp_path}", "bytes are needed")
    assert not (tmp_path / "there").exists()
    assert _deliver(bundle, str(tmp_path / "there")).changed == ALL


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_rsync_itself(bundle, device, tmp_path):
    """Bytes that the device has in another version of a file do not travel."""
    real = str(shutil.which("rsync", path=os.environ["PATH"].partition(os.pathsep)[2]))
    (tmp_path / "bin/rsync").unlink()
    (device.commands / "rsync").unlink()
    (tmp_path / "bin/rsync").symlink_to(real)
    (device.commands / "rsync").symlink_to(real)
    weights = bytearray(hashlib.sha256(b"seed").digest() * 40_000)
    for start in range(0, len(weights), 4096):
        weights[start : start + 8] = start.to_bytes(8, "little")
    make_bundle(bundle, {**CONTENTS, "model.weights": bytes(weights)})
    _deliver(bundle, DEVICE)
    weights[500_000:500_100] = b"z" * 100
    make_bundle(bundle, {**CONTENTS, "model.weights": bytes(weights)})
    found = _deliver(bundle, DEVICE)
    assert found.changed == ("model.weights", "manifest.json")
    assert _same(bundle, device.home / "models/bundle")
    assert found.sent.travelled < len(weights) // 20
