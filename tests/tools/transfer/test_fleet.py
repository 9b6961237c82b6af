"""`edgellm-transfer --fleet` to three simulated devices: stages, tests, rollbacks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import INTERRUPTED, assert_one_line_error
from device_fakes import make_bundle, run_transfer, terminate_transfer, write_command

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer import inventory, rollout
from edgellm.tools.transfer.cli import app
from edgellm.tools.transfer.file_list import load
from edgellm.tools.transfer.push import deliver, publish, stage
from edgellm.tools.transfer.rollout import CURRENT, FAILED, ROLLED_BACK, UNTOUCHED, UPDATED, Plan
from edgellm.tools.transfer.target import Commands, connected, parse
from edgellm.tools.transfer.versions import read_versions

NAMES = ("a", "b", "c")
NEW = {"model.onnx": b"new graph", "more/deep.bin": b"more", "model.weights": b"w" * 50}


@pytest.fixture
def new(tmp_path) -> Path:
    return make_bundle(tmp_path / "new", NEW)


@pytest.fixture
def fleet(tmp_path) -> Path:
    path = tmp_path / "fleet.txt"
    path.write_text("# the canary\na@robot:a/bundle\n\nb@robot:b/bundle # second\nc@robot:c/bundle")
    return path


def _roll_out(bundle: Path, fleet: Path, plan: Plan) -> list[str]:
    """Return the states in the order of the fleet."""
    targets = inventory.read(fleet, Commands())
    return [one.state for one in rollout.roll_out(load(bundle), targets, plan, lambda _: None)]


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_a_fleet_is_updated_and_rolled_back(bundle, new, device, fleet):
    plan = Plan(1, 2)
    assert _roll_out(bundle, fleet, plan) == [UPDATED] * 3
    first = _files(bundle)
    assert all(_files(device.home / name / "bundle") == first for name in NAMES)
    assert _roll_out(new, fleet, plan) == [UPDATED] * 3
    assert all(_files(device.home / name / "bundle") == _files(new) for name in NAMES)
    assert _roll_out(new, fleet, plan) == [CURRENT] * 3
    targets = inventory.read(fleet, Commands())
    back = rollout.roll_back(targets, 2, lambda _: None)
    assert [outcome.state for outcome in back] == [ROLLED_BACK] * 3
    for name in NAMES:
        assert _files(device.home / name / "bundle") == first
        assert os.listdir(device.home / name) == ["bundle"]
        assert not (device.home / name / "bundle/more").exists()
    again = rollout.roll_back(targets, 2, lambda _: None)
    assert [outcome.state for outcome in again] == [FAILED] * 3
    assert "no earlier version is kept" in again[0].detail


def test_a_failed_device_rolls_back_all(bundle, new, device, fleet):
    """The --test command fails on the last device."""
    _roll_out(bundle, fleet, Plan(1, 2))
    test = "test -f model.onnx && case $PWD in */c/bundle) echo no memory >&2; exit 3;; esac; cat"
    found = run_transfer(new, "--fleet", fleet, "--test", test, "--parallel", 1)
    assert_one_line_error(found, "of 3 devices 3 rolled back", "a@robot:a/bundle")
    assert found.returncode == 2
    lines = found.stdout.splitlines()
    assert "c@robot:c/bundle: rolled back: the test ended with exit code 3: no memory" in lines
    assert "a@robot:a/bundle: rolled back: since others failed" in lines
    assert all(_files(device.home / name / "bundle") == _files(bundle) for name in NAMES)
    assert _roll_out(new, fleet, Plan(1, 2, 1, test)) == [UPDATED, UPDATED, ROLLED_BACK]
    assert _files(device.home / "b/bundle") == _files(new)


def test_a_failed_canary_ends_the_rollout(bundle, device, fleet):
    assert _roll_out(bundle, fleet, Plan(1, 8, 5, "false")) == [ROLLED_BACK, UNTOUCHED, UNTOUCHED]
    assert os.listdir(device.home) == ["a"]
    assert os.listdir(device.home / "a") == []  # nothing was there before
    assert not device.rsync_calls()[1:]


def test_unreachable_devices_are_skipped(bundle, device, fleet, monkeypatch):
    monkeypatch.setenv("DEVICE_OFF", "b@robot")
    (device.home / "c").mkdir()
    (device.home / "c/bundle").write_text("of somebody else")
    found = run_transfer(bundle, "--fleet", fleet)
    assert_one_line_error(found, "of 3 devices 1 updated, 2 not updated; check b@robot:b/bundle")
    assert "b@robot:b/bundle: not updated: b@robot cannot be reached" in found.stdout
    assert _files(device.home / "a/bundle") == _files(bundle)
    monkeypatch.setenv("DEVICE_OFF", "a@robot")  # without a canary, the rollout ends
    (device.home / "c/bundle").unlink()
    assert _roll_out(bundle, fleet, Plan(1, 8)) == [UNTOUCHED] * 3
    assert _roll_out(bundle, fleet, Plan(2, 8)) == [UNTOUCHED, UPDATED, UPDATED]


def test_a_failed_move_rolls_back(bundle, new, device, fleet):
    """The move fails on one device, which then has files of both versions."""
    _roll_out(bundle, fleet, Plan(1, 2))
    mv = shutil.which("mv")
    (device.commands / "mv").unlink()
    guard = 'case "$PWD$*" in *"b/.bundle.transfer/model.weights "*) exit 1;; esac\n'
    write_command(device.commands / "mv", f'#!/bin/sh\n{guard}exec {mv} "$@"\n')
    assert _roll_out(new, fleet, Plan(1, 2)) == [ROLLED_BACK] * 3
    assert all(_files(device.home / name / "bundle") == _files(bundle) for name in NAMES)


def test_an_interrupted_move_can_be_rolled_back(bundle, new, device, fleet):
    """The kept files are the earlier version's, also if a second run finished the update."""
    _roll_out(bundle, fleet, Plan(1, 2))
    mv = shutil.which("mv")
    (device.commands / "mv").unlink()
    moved = f'case "$*" in *.transfer/model.weights*) kill -9 $PPID;; esac\nexec {mv} "$@"\n'
    write_command(device.commands / "mv", f"#!/bin/sh\n{moved}")
    with connected(parse("a@robot:a/bundle")) as target:
        staged = stage(load(new), target)
        with pytest.raises(EdgeLLMError):
            publish(staged, target, keep_for=load(new).version)
    assert (device.home / "a/bundle/model.onnx").read_bytes() == NEW["model.onnx"]
    (device.commands / "mv").unlink()
    (device.commands / "mv").symlink_to(str(mv))
    assert _roll_out(new, fleet, Plan(1, 2)) == [UPDATED] * 3
    targets = inventory.read(fleet, Commands())
    rollout.roll_back(targets, 2, lambda _: None)
    assert _files(device.home / "a/bundle") == _files(bundle)


def test_a_single_transfer_removes_kept_files(bundle, new, device, fleet):
    _roll_out(bundle, fleet, Plan(3, 2))
    _roll_out(new, fleet, Plan(3, 2))
    with connected(parse("a@robot:a/bundle")) as target:
        deliver(load(bundle), target)
    assert os.listdir(device.home / "a") == ["bundle"]
    assert sorted(os.listdir(device.home / "b")) == [".bundle.previous", "bundle"]


def test_a_disk_without_hard_links_keeps_copies(bundle, new, device, fleet):
    (device.commands / "ln").unlink()
    write_command(device.commands / "ln", "#!/bin/sh\nexit 1\n")
    _roll_out(bundle, fleet, Plan(1, 2))
    assert _roll_out(new, fleet, Plan(1, 2, 0, "false"))[0] == ROLLED_BACK
    assert _files(device.home / "a/bundle") == _files(bundle)


def test_the_status_shows_each_version(bundle, new, device, fleet, tmp_path, monkeypatch):
    _roll_out(bundle, fleet, Plan(1, 2))
    with connected(parse("a@robot:a/bundle")) as target:
        deliver(load(new), target)
    shutil.rmtree(device.home / "b")
    monkeypatch.setenv("DEVICE_OFF", "c@robot")
    for name in ("page.html", "page.md"):
        page = tmp_path / name
        found = run_transfer(new, "--fleet", fleet, "--status", "--page", page)
        assert (found.returncode, found.stderr) == (0, "")
        for text in (found.stdout, page.read_text()):
            version = load(new).version[:12]
            assert f"1 of 3 have {version}" in " ".join(text.split())
            for word in ("a@robot:a/bundle", version, "llm bundle", "nothing", "cannot be reached"):
                assert word in text
    found = run_transfer(new, "--fleet", fleet, "--check")
    assert_one_line_error(found, "1 up to date, 1 missing or different, 1 failed")


def test_the_version_of_an_engine_covers_its_draft(device, tmp_path):
    engine = make_bundle(tmp_path / "engine", {"decode.onnx": b"base"}, kind="llm_engine")
    seen = set()
    for content in (b"draft", b"other"):
        make_bundle(engine / "draft", {"draft.onnx": content}, kind="draft_engine")
        with connected(parse("a@robot:a/engine")) as target:
            deliver(load(engine), target)
        found = read_versions(parse("a@robot:a/engine"))
        assert found.version == load(engine).version
        assert found.files is not None
        assert found.files.files == load(engine).files
        seen.add(found.version)
    assert len(seen) == 2
    (device.home / "a/engine/manifest.json").write_text(json.dumps([]))
    assert read_versions(parse("a@robot:a/engine")).fault == "manifest.json is damaged"


def test_an_interrupt_ends_all_transfers(bundle, device, fleet, monkeypatch):
    monkeypatch.setenv("RSYNC_FAILS", "hang")
    found = terminate_transfer(device, 3, bundle, "--fleet", fleet, "--canary", 3)
    assert found == INTERRUPTED
    assert device.rsync_calls().count("terminated") == 3
    monkeypatch.delenv("RSYNC_FAILS")
    assert _roll_out(bundle, fleet, Plan(1, 2)) == [UPDATED] * 3


@pytest.mark.usefixtures("device")
def test_invalid_inventories_and_flags_are_rejected(bundle, fleet, tmp_path):
    wrong = tmp_path / "wrong.txt"
    for text, fragments in (
        ("", ("lists no device", "user@host:models/bundle")),
        ("a@robot:a\nb@robot:\n", ("line 2: b@robot: names no folder",)),
        ("a@robot:a\n\na@robot:a/\n", ("line 3: a@robot:a/ is listed already, in line 1",)),
        ("a@robot:a first floor\n", ("line 1", "more than one word")),
    ):
        wrong.write_text(text)
        _assert_rejected((bundle, "--fleet", wrong), fragments)
    for arguments, fragments in (
        ((bundle, "--fleet", tmp_path / "none"), ("none: No such file",)),
        ((bundle, "a@robot:a", "--fleet", fleet), ("a@robot:a and --fleet",)),
        (("--fleet", fleet), ("needs a bundle",)),
        ((bundle, "--fleet", fleet, "--rollback"), ("leave BUNDLE out",)),
        ((bundle, "--fleet", fleet, "--canary", "0"), ("--canary 0", "10%")),
        ((bundle, "--fleet", fleet, "--check", "--status"), ("one of them at a time",)),
        (("--fleet", fleet, "--status", "--page", "x.pdf"), (".html",)),
        ((bundle, "a@robot:a", "--rollback"), ("--rollback needs --fleet",)),
        ((bundle,), ("give BUNDLE and user@host:DIR",)),
    ):
        _assert_rejected(arguments, fragments)


def _assert_rejected(arguments: tuple, fragments: tuple[str, ...]) -> None:
    """Check message and hint of a command line that fails."""
    with pytest.raises(EdgeLLMError) as found:
        app([*map(str, arguments)], standalone_mode=False)
    for fragment in fragments:
        assert fragment in f"{found.value} {found.value.hint}"


@pytest.mark.parametrize(("text", "total", "number"), [("1", 5, 1), ("9", 5, 5), ("10%", 25, 3)])
def test_canaries_are_a_number_or_a_share(text, total, number):
    assert inventory.share(text, total) == number
