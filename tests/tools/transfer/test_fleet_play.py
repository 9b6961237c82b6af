"""The Ansible play of docs/how-to/fleet.md: it is YAML, and its commands exist."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml
from installed import ROOT, SCRIPTS

from edgellm.scripts.site.flags import commands

PAGE = (ROOT / "docs/how-to/fleet.md").read_text("utf-8")
PLAY = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])[0]
ARGUMENTS = [task["ansible.builtin.command"]["argv"] for task in PLAY["tasks"]]


def test_canaries_are_first_and_a_failure_ends_the_rollout():
    assert PLAY["serial"][0] == 1
    assert PLAY["serial"][-1] == "100%"
    assert PLAY["max_fail_percentage"] == 0


def test_the_switch_is_the_last_task():
    """A device whose transfer, build or test fails keeps its version."""
    assert [words[0] for words in ARGUMENTS] == [
        "edgellm-transfer",
        "llm_build",
        "edgellm-bench",
        "ln",
        "mv",
    ]
    assert ARGUMENTS[-1][-1] == "models/current"


@pytest.mark.parametrize("words", ARGUMENTS, ids=lambda words: words[0])
def test_the_commands_exist_and_parse(words):
    if words[0] not in SCRIPTS:
        assert shutil.which(words[0])
        return
    apps = dict(commands((ROOT / "pyproject.toml").read_text("utf-8")))
    filled = [re.sub(r"\{\{.*?\}\}", "name", word) for word in words[1:]]
    apps[words[0]].make_context(words[0], filled)  # raises the error that a user would get


def test_the_switch_is_one_step(tmp_path):
    """The last two commands replace the link; the version must be a folder beside it."""
    import subprocess

    for version in ("1", "2"):
        (tmp_path / "models" / version).mkdir(parents=True)
        for words in ARGUMENTS[-2:]:
            filled = [word.replace("{{ version }}", version) for word in words]
            subprocess.run(filled, cwd=tmp_path, check=True)
        assert (tmp_path / "models/current").readlink().name == version
        assert sorted(path.name for path in (tmp_path / "models").iterdir())[-1] == "current"
