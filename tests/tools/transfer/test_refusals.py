"""`edgellm-transfer`: rejected arguments, damaged files, errors of ssh and rsync."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import assert_one_line_error
from device_fakes import ALL, CONTENTS, PLACE, deliver_to, make_bundle, run_transfer, write_command

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
)
from edgellm.tools.transfer.errors import explain
from edgellm.tools.transfer.target import Target, parse


def test_files_damaged_in_transfer_are_rejected(bundle, device, monkeypatch):
    monkeypatch.setenv("RSYNC_FAILS", "garble")
    with pytest.raises(BrokenArtifactError, match=r"sha256 of model\.onnx, .* differs"):
        deliver_to(bundle, PLACE)
    assert not (device.home / "models/bundle").exists()
    monkeypatch.delenv("RSYNC_FAILS")
    assert deliver_to(bundle, PLACE).changed == ALL


def test_a_changed_source_is_not_sent(bundle, device):
    (bundle / "model.weights").write_bytes(b"y" * len(CONTENTS["model.weights"]))
    with pytest.raises(BrokenArtifactError, match=r"model\.weights was changed"):
        deliver_to(bundle, PLACE)
    assert device.rsync_calls() == []
    assert not (device.home / "models/bundle").exists()


def test_foreign_files_are_not_overwritten(bundle, device):
    place = device.home / "models/bundle"
    place.mkdir(parents=True)
    (place / "model.onnx").write_text("of another program")
    with pytest.raises(EdgeLLMError, match=r"not from an earlier transfer: model\.onnx") as found:
        deliver_to(bundle, PLACE)
    assert "another folder" in found.value.hint
    assert (place / "model.onnx").read_text() == "of another program"
    (place / "model.onnx").unlink()
    make_bundle(place, {"draft.bin": b"x"}, kind="draft_bundle")
    with pytest.raises(EdgeLLMError, match=r"not from an earlier transfer: manifest\.json"):
        deliver_to(bundle, PLACE)
    assert (place / "draft.bin").exists()


def test_a_manifest_of_the_device_cannot_reach_outside(bundle, device):
    place = device.home / "models/bundle"
    (device.home / "precious").write_text("x")
    make_bundle(place, {"old.bin": b"x"})
    raw = json.loads((place / "manifest.json").read_text())
    raw["files"]["../../precious"] = raw["files"]["old.bin"]
    (place / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(EdgeLLMError, match="not from an earlier transfer"):
        deliver_to(bundle, PLACE)
    assert (device.home / "precious").exists()


def test_a_full_disk_on_the_device_is_found_first(bundle, device):
    (device.commands / "df").unlink()
    line = "/dev/disk 100 98 2 98% /data"
    write_command(device.commands / "df", f"#!/bin/sh\necho Filesystem\necho {line}\n")
    with pytest.raises(LimitError, match=r"models/bundle has 0.0 MB free, .* bytes") as found:
        deliver_to(bundle, PLACE)
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
         "robot@device does not respond", "the device is on"),
        ("robot@device: Permission denied (publickey,password).",
         "robot@device refuses the login", "check user and key"),
        ("Host key verification failed.", "has a changed or unknown host key", "connect once"),
        ("something new", "cannot be reached (something new)", "ssh must work"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("device")
def test_errors_of_ssh_get_a_remedy(bundle, monkeypatch, errors, message, hint):
    monkeypatch.setenv("SSH_FAILS", errors)
    with pytest.raises(EdgeLLMError) as found:
        deliver_to(bundle, PLACE)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
    assert hint in found.value.hint


@pytest.mark.parametrize(
    ("errors", "message", "hint"),
    [
        ("rsync: [receiver] write failed on \"x\": No space left on device (28)", "is full",
         "it resumes"),
        ("rsync: [generator] mkdir \"x\" failed: Permission denied (13)", "cannot be written",
         "your user"),
        ("rsync error: unexplained error (code 255)", "unexplained error", "run it again"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("device")
def test_errors_of_rsync_get_a_remedy(bundle, monkeypatch, errors, message, hint):
    monkeypatch.setenv("RSYNC_FAILS", f"says {errors}")
    with pytest.raises(EdgeLLMError) as found:
        deliver_to(bundle, PLACE)
    assert message in str(found.value)
    assert hint in found.value.hint


@pytest.mark.usefixtures("device")
def test_unwritable_folders_are_rejected(bundle, tmp_path):
    (tmp_path / "file").write_text("x")
    for to, message in (
        (f"robot@device:{tmp_path / 'file'}", "is a file"),
        (str(tmp_path / "file"), "is a file"),
        ("/proc/there", "/proc/there"),
        ("robot@device:/proc/there", "robot@device:/proc/there"),
    ):
        with pytest.raises(EdgeLLMError, match=message):
            deliver_to(bundle, to)
    assert explain(Target(host="a@b", folder="c"), 21, "mkdir: 'c': Permission denied").hint


@pytest.mark.parametrize("absent", ["ssh", "rsync"])
@pytest.mark.usefixtures("device")
def test_missing_local_commands_are_reported(bundle, tmp_path, monkeypatch, absent):
    here = tmp_path / "bin"
    (here / absent).unlink()
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(EdgeLLMError, match=f"{absent} is not installed here") as found:
        deliver_to(bundle, PLACE)
    assert "install it" in found.value.hint


def test_a_missing_rsync_on_the_device_is_reported(bundle, device):
    (device.commands / "rsync").unlink()
    with pytest.raises(EdgeLLMError, match="robot@device has no rsync") as found:
        deliver_to(bundle, PLACE)
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
def test_targets_are_parsed(text, host, folder):
    assert parse(text) == Target(host=host, folder=folder)
    assert str(parse("me@robot:~/b")) == "me@robot:b"


@pytest.mark.parametrize("text", ["robot:", "robot:~", "robot:/", "-oProxyCommand=x:b", "", ".."])
def test_targets_without_a_folder_are_rejected(text):
    with pytest.raises(EdgeLLMError, match="names no folder for the bundle"):
        parse(text)


def test_invalid_bundles_and_targets_are_rejected(bundle, tmp_path):
    for arguments, fragments in (
        ((tmp_path / "none", "there"), ("no such folder", "edgellm-export")),
        ((tmp_path, "there"), ("has no readable manifest.json", "edgellm-export")),
        ((bundle, bundle), ("is the bundle itself", "another folder")),
        ((bundle, bundle / "inner"), ("is the bundle itself", "another folder")),
    ):
        assert_one_line_error(run_transfer(*arguments), *fragments)
    result = run_transfer(bundle, tmp_path / "there")
    assert "4 of 4 files new or changed" in result.stdout
    assert result.returncode == 0
    steps = ["comparing with the target", "sending: 0%", "verifying the hashes on the target"]
    assert result.stderr.splitlines() == steps


def test_a_local_copy_needs_no_rsync(bundle, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("sh", "sha256sum", "df", "mkdir", "mv", "rm", "cat", "tail", "rmdir"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = run_transfer(bundle, tmp_path / "there")
    assert (result.returncode, "4 of 4 files" in result.stdout) == (0, True), result.stderr


def test_a_full_local_disk_is_reported(bundle, tmp_path):
    """A limit of the file size simulates it; the next run resumes."""
    import resource

    (bundle / "model.weights").unlink()
    make_bundle(bundle, {**CONTENTS, "model.weights": bytes(300_000)})
    limit = (100_000, 100_000)
    result = run_transfer(
        bundle,
        tmp_path / "there",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert_one_line_error(result, f"File too large in {tmp_path}", "allows no file of this size")
    assert not (tmp_path / "there").exists()
    assert deliver_to(bundle, str(tmp_path / "there")).changed == ALL
