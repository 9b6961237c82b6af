"""The page of errors: all texts of the source, and those that users get."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.core.artifact import check_output_file
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_files.request_file import parse_request, read_file
from edgellm.device_runtime.speculate.policy.static_tree import read_choices
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.multimodal.images import open_image
from edgellm.scripts.site.errors import error_page, error_texts
from edgellm.tools.trees import read_trees

ROOT = Path(__file__).parents[2]
FOLDERS = ("quantize", "export", "build", "device_runtime", "multimodal", "tools", "core")
MAX_WITHOUT_REMEDY = 240  # texts that say themselves what to change; must not increase
NO_FOLDER, NO_FILE = Path("no-such-folder"), Path("no-such-file")
CASES: dict[str, Callable[[Path], object]] = {
    "a tree": lambda _: read_choices("[["),
    "a checkpoint": lambda folder: open_checkpoint(str(folder)),
    "an id": lambda _: open_checkpoint("no/such/model/anywhere"),
    "a picture": lambda folder: open_image("cat.png", folder),
    "an address": lambda folder: open_image("https://a.example/cat.png", folder),
    "an output": lambda folder: check_output_file(folder),
    "requests": lambda folder: read_file(folder / "in.json"),
    "a request": lambda _: parse_request({"messages": [], "num_logprobs": 5}, 0),
    "a file of trees": lambda _: read_trees(NO_FILE),
}


@pytest.fixture(scope="module")
def texts():
    return sorted({*error_texts(ROOT)})


def _pattern(text: str) -> str:
    """Values of the case match anything."""
    parts = re.split(r"\{\w+\}|…", text)
    return ".*".join(map(re.escape, parts))


@pytest.mark.parametrize("case", CASES)
def test_errors_of_users_are_on_the_page(tmp_path, texts, case):
    with pytest.raises(EdgeLLMError) as caught:
        CASES[case](tmp_path)
    message, hint = str(caught.value), caught.value.hint
    assert [
        each
        for each in texts
        if re.fullmatch(_pattern(each.message), message)
        and re.fullmatch(_pattern(each.hint), hint)
        and each.kind == type(caught.value).__name__
    ]


def test_every_text_of_the_source_is_on_the_page(texts):
    """The literal begin of what is raised, as a search in the files finds it."""
    page = " ".join(error_page(ROOT).replace("\\\\", "\\").replace("\\|", "|").split())
    classes = "EdgeLLM|UnsupportedModel|BrokenArtifact|Limit|Request"
    raised = re.compile(rf"raise (?:{classes})Error\(\s*f?\"([A-Za-z][^\"{{\\`]{{12,}})[\"{{]")
    found = [
        begin.strip()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for begin in raised.findall(path.read_text("utf-8"))
    ]
    assert len(found) > 200
    assert [begin for begin in found if begin not in page] == []
    assert len(texts) > 800


def test_errors_have_remedies(texts):
    assert sum(not each.hint for each in texts) <= MAX_WITHOUT_REMEDY


def test_the_site_has_the_page():
    assert "reference/errors.md" in (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "error_page" in (ROOT / "scripts/site/hooks.py").read_text("utf-8")
