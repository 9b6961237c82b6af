"""A share of every attack, with fixed seeds; `run.py` runs for a given time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversary import hooks, run
from adversary.attack import NAMES, Finding, Result, find, require, try_case
from adversary.commands import Ended
from adversary.workshop import Workshop

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Iterator[Workshop]:
    found = Workshop(tmp_path_factory.mktemp("workshop"))
    yield found
    found.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_each_attack_finds_nothing(workshop, name, tmp_path):
    results = [
        try_case(workshop, name, 0, number, tmp_path / str(number))
        for number in range(find(name).SHARE)
    ]
    assert [f"{one.command}\n{one.finding}" for one in results if one.finding] == []
    assert len({one.tried for one in results}) > 1


@pytest.mark.parametrize(
    ("code", "stderr", "timed_out", "finding"),
    [
        (0, "", True, "a hang"),
        (1, "Traceback (most recent call last):", False, "a traceback"),
        (-11, "", False, "a crash"),
        (2, "", False, "not one line"),
        (2, "error: a\nerror: b", False, "not one line"),
        (3, "error: unexpected KeyError: 'x'", False, "an unknown kind"),
        (2, "error: out of memory", False, "memory"),
        (0, "error: but it went on", False, "exit code 0"),
    ],
)
def test_verdicts(code, stderr, timed_out, finding):
    """They detect the faults that they are for."""
    ended = Ended("a command", code, "", stderr, 1.0, 0, timed_out)
    with pytest.raises(Finding, match=finding):
        ended.require_clear()


def test_a_finding_is_saved_and_reported(tmp_path, monkeypatch):
    """With its input, in both forms of the report."""

    def attack(_: object, number: int, __: object, folder: Path) -> str:
        (folder / "input").write_bytes(bytes([number]))
        require(number, "none is expected")
        return "fine"

    monkeypatch.setattr(hooks, "attack", attack)
    workshop = Workshop(tmp_path)
    results = [try_case(workshop, "hooks", 3, at, tmp_path / str(at)) for at in (0, 1)]
    command = "python tests/adversary/run.py --only hooks --seed 3 --case 0"
    assert results[0] == Result("hooks", 3, 0, "", "none is expected")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    for name in ("report.json", "report.md"):
        run.write_report(tmp_path / name, results)
        assert command in (tmp_path / name).read_text()
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["attacks"]["hooks"]["cases"] == 2
    assert found["findings"] == [{"command": command, "finding": "none is expected"}]


def test_the_command_tries_one_case(tmp_path):
    command = [
        sys.executable,
        run.__file__,
        "--only",
        "broken_files",
        "--seed",
        "0",
        "--case",
        "12",
    ]
    options = ["--folder", tmp_path, "--report", tmp_path / "report.json"]
    subprocess.run([*command, *options], check=True, timeout=120)
    assert json.loads((tmp_path / "report.json").read_text())["attacks"]["broken_files"]
