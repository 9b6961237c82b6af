"""Checks of the Dockerfiles without a daemon; nothing is built."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from installed import PROJECT, ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
_WORDS = ("ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR")


def _instructions(path: Path) -> list[tuple[str, str]]:
    """Word and rest of every instruction; comments are gone, continued lines joined."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in found]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def instructions(request) -> list[tuple[str, str]]:
    return _instructions(request.param)


def _copied(instructions: list[tuple[str, str]]) -> list[str]:
    """Paths of the context."""
    rests = [rest.split() for word, rest in instructions if word == "COPY"]
    return [path for words in rests if not words[0].startswith("--") for path in words[:-1]]


def test_there_is_one_for_each_side():
    assert [path.name for path in FILES] == ["device.Dockerfile", "host.Dockerfile"]


def test_instructions_are_known(instructions):
    assert {word for word, _ in instructions} <= set(_WORDS)
    assert instructions[0][0] == "ARG"  # the base, before the first FROM


def test_copied_files_exist_and_suffice_for_a_wheel(instructions):
    copied = _copied(instructions)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert set(copied) == {*wheel, "pyproject.toml", PROJECT["project"]["readme"], "LICENSE"}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert [p for p in copied for pattern in ignored if fnmatch.fnmatch(p, pattern)] == []


def test_the_extras_exist(instructions):
    (default,) = [rest for word, rest in instructions if word == "ARG" and "EXTRAS" in rest]
    extras = default.partition("=")[2].split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_last_stage_runs_as_a_user_and_starts_a_command_of_ours(instructions):
    last = max(at for at, (word, _) in enumerate(instructions) if word == "FROM")
    stage = instructions[last:]
    assert [rest for word, rest in stage if word == "USER"] == ["edgellm"]
    (started,) = [json.loads(rest) for word, rest in stage if word == "CMD"]
    assert started[0] in PROJECT["project"]["scripts"]
    after = [word for word, _ in stage[[word for word, _ in stage].index("USER") :]]
    assert "RUN" not in after
    assert "COPY" not in after


def test_scripts_are_shell(instructions):
    for word, rest in instructions:
        if word == "RUN":
            checked = subprocess.run(
                ["sh", "-n", "-c", rest], capture_output=True, text=True, check=False
            )
            assert (checked.returncode, checked.stderr) == (0, "")


def test_comments_name_commands_that_exist():
    run = re.compile(r"^#   docker run .*? edgellm-(?:host|device) (\S+)", re.MULTILINE)
    named = [name for path in FILES for name in run.findall(path.read_text("utf-8"))]
    assert named == ["llm_build", "edgellm-doctor", "edgellm-export"]
    assert set(named) <= set(PROJECT["project"]["scripts"])


@pytest.mark.nightly
def test_a_wheel_of_the_copied_files_alone_installs(tmp_path):
    """The first stage, and the start of the second."""
    source = tmp_path / "source"
    source.mkdir()
    for path in _copied(_instructions(FILES[0])):
        (source / path).symlink_to(ROOT / path)
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    subprocess.run([*wheel, source], check=True, capture_output=True)
    venv.create(tmp_path / "env", symlinks=True)
    into = ["--python", tmp_path / "env/bin/python", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *into, next(tmp_path.glob("*.whl"))], check=True, capture_output=True)
    assert (tmp_path / "env/bin/llm_inference").exists()
