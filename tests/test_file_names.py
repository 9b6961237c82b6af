"""Folders whose names are not UTF-8, by themselves or in the locale of the process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from edgellm.core.resources import utf8_path

REQUESTS = {
    "requests": [{"messages": [{"role": "user", "content": "w20"}]}],
    "temperature": 0,
    "max_generate_length": 4,
}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("name", [b"plain", "été".encode(), b"\xff\xe9"])
def test_libraries_get_a_path_that_they_can_open(tmp_path, name):
    path = tmp_path / os.fsdecode(name) / "file"
    path.parent.mkdir()
    path.write_text("content")
    with utf8_path(path) as found:
        assert Path(found).read_text() == "content"
        found.encode()  # no half of a surrogate pair
        assert (found == str(path)) == (name != b"\xff\xe9")
    assert Path(found).exists() == (found == str(path))


@pytest.mark.parametrize(
    ("name", "environment"), [(b"\xff\xe9", {}), ("été".encode(), ASCII)], ids=["bytes", "locale"]
)
def test_a_bundle_is_built_and_runs(command, infer_here, tiny_bundle, tmp_path, name, environment):
    folder = tmp_path / os.fsdecode(name)
    shutil.copytree(tiny_bundle, folder / "bundle")
    (folder / "in.json").write_text(json.dumps(REQUESTS))
    paths = ("--onnxDir", folder / "bundle", "--engineDir", folder / "engine")
    sizes = ("--maxInputLen", 16, "--maxKVCacheCapacity", 32, "--threads", 1)
    settings = {"env": {**os.environ, **environment}}
    built = command("llm_build", *paths, *sizes, **settings)
    assert built.returncode == 0, built.stderr
    files = ("--inputFile", folder / "in.json", "--outputFile", folder / "out.json")
    ran = command("llm_inference", "--engineDir", folder / "engine", *files, **settings)
    assert ran.returncode == 0, ran.stderr
    (output,) = json.loads((folder / "out.json").read_text("utf-8"))["responses"]
    (folder / "engine").rename(tmp_path / "engine")
    _, (expected,) = infer_here(tmp_path / "engine", REQUESTS)
    assert output["output_text"] == expected["output_text"] != ""
