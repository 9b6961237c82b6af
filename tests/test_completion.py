"""Shell completion of all commands, in real shells if installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from installed import SCRIPTS, install
from pseudo_terminal import person

FLAGS = {
    "edgellm": ("edgellm run --maxT", "--maxTokens"),
    "edgellm-quantize": ("edgellm-quantize llm --model", "--model_dir"),
    "edgellm-export": ("edgellm-export draft --base", "--base_model_dir"),
    "llm_build": ("llm_build --engineD", "--engineDir"),
    "visual_build": ("visual_build --maxImageTokensP", "--maxImageTokensPerImage"),
    "audio_build": ("audio_build --maxAudio", "--maxAudioSeconds"),
    "llm_inference": ("llm_inference --engineDir x --inp", "--inputFile"),
    "edgellm-trees": ("edgellm-trees --out", "--output_file"),
    "edgellm-inspect": ("edgellm-inspect --di", "--diff"),
    "edgellm-chat": ("edgellm-chat --hist", "--historyFile"),
    "edgellm-bench": ("edgellm-bench --repe", "--repetitions"),
    "edgellm-doctor": ("edgellm-doctor --de", "--debug"),
    "edgellm-eval": ("edgellm-eval --runC", "--runCode"),
    "edgellm-serve": ("edgellm-serve --queue", "--queueSize"),
    "edgellm-transfer": ("edgellm-transfer --ch", "--check"),
    "edgellm-train-draft": ("edgellm-train-draft --self", "--self_prompts"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def shell(commands, tmp_path) -> dict[str, str]:
    """Environment of a user; the home has a folder `engines`."""
    (tmp_path / "engines").mkdir()
    return {**commands, "HOME": str(tmp_path)}


def _script(shell: dict[str, str], command: str, name: str) -> str:
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    return _run([command], {**shell, variable: f"source_{name}"})


def _run(command: list[str], shell: dict[str, str]) -> str:
    return subprocess.run(
        [str(shutil.which(command[0], path=shell["PATH"])), *command[1:]],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **shell},
        cwd=shell["HOME"],
    ).stdout


def _completed(shell: dict[str, str], line: str) -> list[str]:
    """Output of a command for the completion function of bash, fish and zsh."""
    name, *words = line.split()
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    asked[f"_{name.replace('-', '_').upper()}_COMPLETE"] = "complete_bash"
    return _run([name], {**shell, **asked}).split()


def _complete_in_bash(shell: dict[str, str], line: str) -> list[str]:
    """COMPREPLY of the completion function in bash."""
    name, *words = line.split()
    script = (
        f"{_script(shell, name, 'bash')}\n"
        f"COMP_WORDS=({line})\n"
        f"COMP_CWORD={len(words)}\n_{name.replace('-', '_')}_completion {name}\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    return _run(["bash", "-c", script], shell).split()


@pytest.mark.each_change("edgellm", "edgellm-export", "llm_build", "edgellm-serve")
@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_in_bash(shell, name):
    assert name in FLAGS, "add a line of the new command"
    line, flag = FLAGS[name]
    assert _completed(shell, line) == [flag]


def test_subcommands_in_bash(shell):
    assert _complete_in_bash(shell, "edgellm-export v") == ["visual"]


@pytest.mark.parametrize("line", ["llm_inference --engineDir eng", "edgellm-inspect eng"])
def test_folders_in_bash(shell, line):
    """The function returns nothing, so that bash completes files."""
    assert _complete_in_bash(shell, line) == []
    with person("bash", "--norc", "-i", **shell, PS1="$ ") as someone:
        someone.type(f"cd; complete -r; {_one_line(shell, line)}\r")
        someone.wait_for("ready-now")
        someone.type(f"{line}\t")
        someone.wait_for("engines/")


def _one_line(shell: dict[str, str], line: str) -> str:
    """A command that loads the completion of a line's command, and prints it."""
    script = Path(shell["HOME"], "completion")
    script.write_text(_script(shell, line.split()[0], "bash"))
    return 'source ./completion; echo "ready"-now'


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish(shell):
    Path(shell["HOME"], "completion").write_text(_script(shell, "llm_build", "fish"))

    def complete(line: str) -> list[str]:
        found = _run(["fish", "-c", f"source completion; complete -C '{line}'"], shell)
        return [one.partition("\t")[0] for one in found.splitlines()]

    assert complete("llm_build --engineD") == ["--engineDir"]
    assert "engines/" in complete("llm_build --onnxDir eng")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("typed", "expected"), [("--onnxD", "--onnxDir"), ("--onnxDir eng", "engines")]
)
def test_zsh(shell, typed, expected):
    Path(shell["HOME"], "completion").write_text(_script(shell, "llm_build", "zsh"))
    with person("zsh", "-f", "-i", **shell) as someone:
        someone.type("cd; autoload -Uz compinit; compinit -u; source ./completion\r")
        someone.type('echo "ready"-now\r')
        someone.wait_for("ready-now")
        someone.type(f"llm_build {typed}\t")
        someone.wait_for(expected)
