"""`edgellm-trees`: the page's content, escaping of tokens, invalid input."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import assert_one_line_error
from html_pages import Page

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.request_files.request_file import OutputIndex
from edgellm.device_runtime.request_files.tree_log import TreeLog, trees_as_json
from edgellm.device_runtime.speculate.acceptance import Round
from edgellm.device_runtime.speculate.tree import Tree
from edgellm.tools.trees import PAGE, read_trees, render, summarize

NASTY = [
    "</script><script>alert(1)</script>", "<!--", "\n", "\"'&", "\u202eright to left", "שלום",
    "\u2028", "@DATA@", "", "\ud800", "]]>",
]  # fmt: skip
ROUND = {
    "emitted": ["b", "d", "e"],
    "tokens": ["a", "b", "c", "d"],
    "parents": [-1, 0, 0, 1],
    "expected": [1.0, 0.5, 0.25, 0.125],
    "confidence": [1.0, 0.6, 0.3, 0.2],
    "path": [0, 1, 3],
    "bonus": "e",
}
MISS = {**ROUND, "emitted": ["x"], "path": [0], "bonus": "x"}
RUN = {
    "input_file": "in.json",
    "requests": [
        {"request_idx": 0, "rounds": [{"emitted": ["a"]}, ROUND, MISS]},
        {"request_idx": 2, "rounds": [{"emitted": ["a"]}]},
    ],
}


@pytest.fixture
def run_trees(command, tmp_path):
    """Write a tree file and run the command on it."""
    return _over_a_file(command, tmp_path)


@pytest.fixture
def run_trees_here(command_here, tmp_path):
    """The same in this process."""
    return _over_a_file(command_here, tmp_path)


def _over_a_file(command, tmp_path):

    def run(content, *more):
        path = tmp_path / "trees.json"
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, "utf-8")
        result = command("edgellm-trees", path, *more)
        assert path.read_text("utf-8") == text
        return result

    return run


def test_the_page_has_all_rounds(run_trees, tmp_path):
    result = run_trees(RUN, "--output-file", tmp_path / "page.html")
    assert result.returncode == 0, result.stderr
    assert "2 requests, 2 rounds, acceptance length 2.00" in result.stdout
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    data = page.data()
    assert data["input_file"] == "in.json"
    assert data["requests"][0]["rounds"] == RUN["requests"][0]["rounds"]
    assert [request["index"] for request in data["requests"]] == [0, 2]
    assert data["summary"] == data["requests"][0]["summary"] | {"tokens": 6}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "trees.json"]


def test_summary_counts_rounds_with_a_tree():
    found = summarize(RUN["requests"][0]["rounds"])
    assert (found.rounds, found.tokens, found.nodes) == (2, 5, 4.0)
    assert found.acceptance_length == 2.0  # 3 tokens, then 1
    assert found.expected_length == 1.875
    assert found.histogram == (1, 0, 1)
    assert summarize(RUN["requests"][1]["rounds"]).rounds == 0


def test_the_page_needs_no_network_and_has_every_element_that_its_script_uses():
    import re

    text = PAGE.read_text("utf-8")
    page = Page(text)
    for _, attributes in page.elements:
        assert not {"src", "href", "onclick", "onload"} & attributes.keys()
    assert "default-src 'none'" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|url\(", text)
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert set(re.findall(r'byId\("([a-z-]+)"\)', text)) <= ids
    labels = {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a}
    assert labels <= ids
    assert "prefers-color-scheme: dark" in text


def test_tokens_cannot_break_the_page():
    content = copy.deepcopy(RUN)
    size = len(NASTY)
    content["input_file"] = "</title><script>"
    content["requests"][0]["rounds"][1] = {
        "emitted": [NASTY[0]], "tokens": NASTY, "parents": [-1, *range(size - 1)],
        "expected": [1.0] * size, "confidence": [1] * size, "path": [0], "bonus": NASTY[0],
    }  # fmt: skip
    text = render(content)
    text.encode("utf-8")
    page, empty = Page(text), Page(PAGE.read_text("utf-8"))
    assert page.elements == empty.elements
    assert page.data()["requests"][0]["rounds"][1]["tokens"] == NASTY
    assert page.data()["input_file"] == "</title><script>"
    assert "alert(1)<" not in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_valid(tmp_path):
    script = next(text for text in Page(render(RUN)).texts["script"] if "use strict" in text)
    (tmp_path / "page.js").write_text(script, "utf-8")
    checked = subprocess.run(["node", "--check", tmp_path / "page.js"], capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_tree_files_of_the_runtime_are_valid(tmp_path):
    class Tokenizer:
        def decode(self, token_ids):
            return f"<{token_ids[0]}>"

    tree = Tree(np.array([5, 6, 7]), np.array([-1, 0, 1]), np.array([1.0, 0.5, 0.25]))
    log = TreeLog(Tokenizer())  # type: ignore[arg-type]
    log.add(Step((5,), "a", Round((5,))))
    log.add(Step((6, 8), "b", Round((6, 8), tree, (0, 1), (1.0, 0.5, 0.5))))
    log.add(Step((9,), "c", Round((9,), Tree.of_root(8), (0,), (1.0,))))
    plain = TreeLog(Tokenizer())  # type: ignore[arg-type]
    plain.add(Step((5,), "plain"))
    path = tmp_path / "trees.json"
    rounds = {OutputIndex(0): log.rounds, OutputIndex(1): plain.rounds}
    path.write_text(json.dumps(trees_as_json("in.json", rounds)))
    (request,) = read_trees(path)["requests"]
    assert request["request_idx"] == 0
    rounds = request["rounds"]
    assert (len(rounds), summarize(rounds).acceptance_length) == (3, 1.5)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1, 2]", "holds no trees"),
        ({"responses": []}, "holds no trees"),
        ({"requests": [{"messages": []}]}, "request 0 has no list of rounds"),
        ({"requests": []}, "holds no round of speculation"),
        ({"requests": [{"rounds": [{"emitted": ["a"]}]}]}, "holds no round of speculation"),
        ({"requests": [{"rounds": [7]}]}, "round 0 of request 0 is not a round"),
    ],
)
def test_invalid_files_are_rejected(run_trees_here, tmp_path, content, fragment):
    result = run_trees_here(content)
    assert_one_line_error(result, fragment, "hint: ")
    assert result.returncode == 2
    assert not (tmp_path / "trees.html").exists()


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"emitted": None}, "emitted"),
        ({"tokens": []}, "not strings"),
        ({"tokens": ["a", 1, "c", "d"]}, "not strings"),
        ({"bonus": None}, "not strings"),
        ({"expected": [1, 2]}, "not 4 numbers"),
        ({"confidence": [1, 1, 1, float("nan")]}, "not 4 numbers"),
        ({"parents": [-1, 0, 0]}, "do not make a tree"),
        ({"parents": [-1, 0, 3, 0]}, "do not make a tree"),
        ({"parents": [-1, 0, -1, 1]}, "do not make a tree"),
        ({"path": None}, "start at the root"),
        ({"path": []}, "start at the root"),
        ({"path": [0, 3]}, "leaves the tree"),
        ({"path": [0, 9]}, "leaves the tree"),
    ],
)
def test_a_damaged_round_is_named(tmp_path, changes, fragment):
    path = tmp_path / "trees.json"
    rounds = [{"emitted": ["a"]}, {**ROUND, **changes}]
    path.write_text(json.dumps({"requests": [{"rounds": rounds}]}))
    with pytest.raises(EdgeLLMError, match="round 1 of request 0") as found:
        read_trees(path)
    assert fragment in str(found.value)


def test_the_input_is_never_overwritten(run_trees_here, tmp_path):
    os.symlink(tmp_path / "trees.json", tmp_path / "link.html")
    for output in ("trees.json", "link.html"):
        result = run_trees_here(RUN, "--output_file", tmp_path / output)
        assert_one_line_error(result, "is the input file", "another output file")
    assert_one_line_error(run_trees_here(RUN, "--output_file", tmp_path), "is a folder")
    assert_one_line_error(run_trees_here(RUN, "--output_file", tmp_path / "x/y"), "no such folder")
    missing = subprocess.run(
        [sys.executable, "-m", "edgellm.tools.trees", tmp_path / "absent.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert_one_line_error(missing, "no such file", "--treeOutputFile")
