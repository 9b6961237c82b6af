"""`edgellm-inspect`: differences, the command and its pages, invalid input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error
from html_pages import Page
from safetensors.numpy import load_file, save_file

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.inspection.output.diff import compare, tables_of
from edgellm.tools.inspection.output.page import report_page, tables_page
from edgellm.tools.inspection.output.tables import tables
from edgellm.tools.inspection.sources.detect import inspect


@pytest.fixture
def run_inspect():
    """Run the command."""

    def run(*arguments):
        command = [sys.executable, "-m", "edgellm.tools.inspection", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_equal_folders_have_no_differences(tiny_bundle, tiny_checkpoint):
    for path in (tiny_bundle, tiny_checkpoint):
        for contents in (False, True):
            found = compare(inspect(path), inspect(path), contents=contents)
            assert found.is_empty
            assert found.equal_tensors == len(inspect(path).tensors)
    assert tables_of(found)[0].rows[0] == ("differences", "none")


def test_differences_of_bundles_are_grouped_by_layer(tiny_bundle, tiny_int4_bundle):
    found = compare(inspect(tiny_bundle), inspect(tiny_int4_bundle), contents=False)
    fields = {change.name: (change.left, change.right) for change in found.fields}
    assert "quantization" in fields
    assert "decoder.vocab_size" not in fields
    assert {change.name for change in found.files} >= {"model.onnx", "model.weights"}
    names = {change.name for change in found.tensors}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.norm.weight" not in names
    grouped = [row for table in tables_of(found) for row in table.rows]
    assert any("layers.N.self_attn.q_proj" in row[0] and "(3 of them)" in row[0] for row in grouped)


def test_contents_are_compared_on_demand(tmp_path, tiny_checkpoint):
    other = Path(shutil.copytree(tiny_checkpoint, tmp_path / "other"))
    arrays = load_file(other / "model.safetensors")
    arrays["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    save_file(arrays, other / "model.safetensors")
    left, right = inspect(tiny_checkpoint), inspect(other)
    assert compare(left, right, contents=False).is_empty
    found = compare(left, right, contents=True)
    assert [change.name for change in found.tensors] == ["model.layers.1.mlp.up_proj.weight"]
    assert found.tensors[0].right.endswith("other contents")
    assert found.equal_tensors == len(arrays) - 1


def test_engines_with_and_without_a_draft_differ(eagle_pair, tmp_path):
    plain = Path(shutil.copytree(eagle_pair.engine, tmp_path / "engine"))
    shutil.rmtree(plain / "draft")
    found = compare(inspect(eagle_pair.engine), inspect(plain), contents=False)
    assert [(change.name, change.right) for change in found.fields] == [("draft", "absent")]
    same = compare(inspect(eagle_pair.engine), inspect(eagle_pair.engine), contents=True)
    assert same.is_empty
    draft = inspect(eagle_pair.engine / "draft")
    assert same.equal_tensors == len(inspect(plain).tensors) + len(draft.tensors)


def test_different_kinds_cannot_be_compared(tiny_bundle, tiny_engine):
    with pytest.raises(EdgeLLMError, match=r"is of kind llm_bundle, .* of kind llm_engine"):
        compare(inspect(tiny_bundle), inspect(tiny_engine), contents=False)


def test_the_command_prints_tables_json_and_pages(run_inspect, tiny_engine, tiny_bundle, tmp_path):
    page = tmp_path / "page.html"
    result = run_inspect(tiny_engine, "--all", "--html", page, "--context", 9999)
    assert result.returncode == 0, result.stderr
    assert "KV cache, 64 tokens (all)" in result.stdout
    assert "64 tokens of context" in result.stdout
    assert Page(page.read_text("utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html"]
    content = json.loads(run_inspect(tiny_bundle, "--json", "--verify").stdout)
    assert content["kind"] == "llm_bundle"
    assert content["predictions"]["boards"][0]["decode_tokens_per_s_at_most"] > 0
    names = [tensor["name"] for tensor in content["graphs"][0]["tensors"]]
    assert "model.norm.weight" in names
    assert content["memory"]["kv_cache_per_token"] == 2 * 3 * 2 * 16 * 4
    difference = run_inspect(tiny_bundle, "--diff", tiny_bundle, "--json", "--html", page)
    assert json.loads(difference.stdout)["tensors"] == []
    assert ": differences" in page.read_text("utf-8")


def test_tables_need_no_template_library(tiny_bundle):
    """Jinja is in extras; the command without --html runs with the base packages."""
    code = "import sys; from edgellm.tools.inspection.cli import app; app(standalone_mode=False); "
    code += "assert 'jinja2' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code, tiny_bundle, "--all"], check=True, capture_output=True
    )


def test_the_page_needs_no_network(tiny_engine, eagle_pair):
    for folder in (tiny_engine, eagle_pair.engine):
        text = report_page(inspect(folder), 64)
        page = Page(text)
        assert "default-src 'none'" in text
        assert "@" not in re.sub("[^@]*@media", "", text)
        for tag, attributes in page.elements:
            assert tag not in ("script", "link", "img", "iframe")
            assert not {"src", "href", "onclick", "onload"} & attributes.keys()
        assert not re.findall(r"https?://", text)
        assert sum(tag == "svg" for tag, _ in page.elements) >= 4
        assert "prefers-color-scheme: dark" in text


def test_names_cannot_break_the_page(tmp_path, tiny_checkpoint):
    folder = tmp_path / "<b>&@PATH@"
    nasty = "model.layers.0.</td><script>alert(1)</script>.mlp.weight"
    folder.mkdir()
    shutil.copy(tiny_checkpoint / "config.json", folder)
    save_file({nasty: np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    report = inspect(folder)
    for text in (report_page(report, 1), tables_page("@SECTIONS@", str(folder), tables(report, 1))):
        assert not any(tag in ("script", "b") for tag, _ in Page(text).elements)
        assert "&lt;b&gt;&amp;@PATH@" in text


def _break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def _other_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"kind": "web_app"}')


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.weights", 1000)


def _remove(folder: Path) -> None:
    (folder / "model.weights").unlink()


def _break_graph(folder: Path) -> None:
    graph = folder / "model.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "message", "hint"),
    [
        (_break_manifest, "is not a manifest of edgellm, or damaged", "a bundle or an engine"),
        (_other_manifest, "is not a manifest of edgellm, or damaged", "a bundle or an engine"),
        (_cut, "has 1000 bytes instead of", "copy or make it again"),
        (_remove, "model.weights is missing", "copy or make the folder again"),
        (_break_graph, "is not an ONNX graph", "copy the folder again"),
    ],
)
def test_broken_bundles_are_rejected(tmp_path, tiny_bundle, harm, message, hint):
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    harm(bundle)
    with pytest.raises(EdgeLLMError, match=message) as found:
        inspect(bundle)
    assert hint in found.value.hint


def test_hashes_are_checked_on_demand(tmp_path, tiny_bundle):
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    with (bundle / "model.weights").open("r+b") as file:
        file.seek(500)
        file.write(b"\x00\x01\x02")
    inspect(bundle)
    with pytest.raises(EdgeLLMError, match="sha256 differs"):
        inspect(bundle, verify=True)


def test_other_paths_are_rejected_with_a_hint(tmp_path, tiny_bundle, tiny_checkpoint, command_here):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x05" + b"\x00" * 20)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "bundle").symlink_to(tiny_bundle)
    for path, message, hint in (
        (tmp_path / "nothing", "no such file or folder", "give a Hugging Face checkpoint"),
        (tmp_path / "notes.txt", "neither a folder nor a .gguf file", "give a Hugging Face"),
        (tmp_path / "cut.gguf", "is not a whole GGUF file", "download or copy it again"),
        (tmp_path / "empty.gguf", "is not a whole GGUF file", "download or copy it again"),
    ):
        with pytest.raises(EdgeLLMError, match=message) as found:
            inspect(path)
        assert hint in found.value.hint
    contained = "it contains bundle, cut.gguf, empty.gguf"
    for arguments, fragments in (
        ((tmp_path,), ("is neither checkpoint", contained)),
        ((tiny_checkpoint, "--verify"), ("has no manifest", "--diff")),
        ((tiny_bundle, "--html", tmp_path), ("is a folder",)),
    ):
        assert_one_line_error(command_here("edgellm-inspect", *arguments), *fragments)
