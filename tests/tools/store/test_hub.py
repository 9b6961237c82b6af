"""Downloads from a hub on this machine, by huggingface_hub's own client."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import assert_one_line_error
from huggingface_hub import constants
from local_hub import serve_hub

from edgellm.core.errors import UnsupportedModelError
from edgellm.tools.store import hub as hub_module
from edgellm.tools.store.hub import choose, encoder_of, is_id

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
TEXTS = ["config.json", "merges.txt", "tokenizer.json", "tokenizer.model"]


@pytest.fixture
def hub(tiny_checkpoint):
    with serve_hub() as found:
        found.add("owner/tiny", tiny_checkpoint)
        yield found


@pytest.fixture
def edgellm(command_here, hub, tmp_path, monkeypatch):
    """Run a subcommand in this process, as a user of the hub; settings of huggingface_hub by name.

    The client reads its variables of the environment when it is imported.
    """
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "edgellm"))
    monkeypatch.setattr(sys, "stdin", None)

    def run(*words, **settings):
        own = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in {**own, **settings}.items():
            monkeypatch.setattr(constants, name, value)
        return command_here("edgellm", *words)

    return run


@pytest.mark.parametrize(
    ("names", "precision", "chosen"),
    [
        ([*SHARDS, *TEXTS, "README.md", "original/model.safetensors"], "", [*SHARDS, *TEXTS]),
        (["consolidated.safetensors", *SHARDS, "config.json"], "", [*SHARDS, "config.json"]),
        (["pytorch_model.bin", "training_args.bin", "config.json"], "",
         ["pytorch_model.bin", "config.json"]),
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf"], "", ["m-Q4_K_M.gguf"]),
        (["m-Q8_0.gguf", "m-IQ2_XS.gguf"], "", ["m-Q8_0.gguf"]),
        (["m.Q8_0.gguf", "m.q4_0.gguf", "m.safetensors"], "q4_0", ["m.q4_0.gguf"]),
        (["q/m-Q4_K_M-00001-of-00002.gguf", "q/m-Q4_K_M-00002-of-00002.gguf"], "Q4_K_M",
         ["q/m-Q4_K_M-00001-of-00002.gguf", "q/m-Q4_K_M-00002-of-00002.gguf"]),
        (["m-UD-Q4_K_XL.gguf", "m-BF16.gguf"], "UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (["model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/config.json",
          "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "onnx/model.onnx"], "",
         ["model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/config.json",
          "2_Dense/model.safetensors"]),
        (["model.safetensors", "1_Pooling/config.json"], "", ["model.safetensors"]),
    ],
)  # fmt: skip
def test_the_files_of_a_repository_that_are_fetched(names, precision, chosen):
    assert choose("o/m", names, precision) == chosen


@pytest.mark.parametrize(
    ("names", "precision", "fragment"),
    [
        (["m-Q8_0.gguf"], "Q4_0", "no GGUF file of that precision"),
        (["README.md"], "", "no weights"),
        (["model.safetensors"], "Q4_0", "no GGUF file"),
    ],
)
def test_a_repository_without_fitting_files_is_refused(names, precision, fragment):
    with pytest.raises(UnsupportedModelError, match=fragment):
        choose("o/m", names, precision)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("Qwen/Qwen3-0.6B", True), ("o/m:Q4_K_M", True), ("m", False), ("a/b/c", False), ("", False)],
)
def test_a_hub_id_is_owner_model_and_optional_precision(text, is_one):
    assert is_id(text) == is_one


def test_a_model_is_fetched_once_and_again_when_it_changed(edgellm, hub):
    """A second run asks the hub nothing; `pull` asks, and builds a new commit."""
    first = edgellm("run", "owner/tiny", "w20 w21", "--maxTokens", 3, "--temperature", 0)
    assert first.returncode == 0, first.stderr
    assert "downloading owner/tiny" in first.stderr
    assert first.stdout.strip()
    hub.requests.clear()
    second = edgellm("run", "tiny", "w20 w21", "--maxTokens", 3, "--temperature", 0)
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr
    assert not hub.requests
    same = edgellm("pull", "owner/tiny")
    assert same.returncode == 0, same.stderr
    assert "downloading" not in same.stderr
    assert "exporting" not in same.stderr
    hub.repositories["owner/tiny"]["new.txt"] = b"another commit"
    newer = edgellm("pull", "owner/tiny")
    assert newer.returncode == 0, newer.stderr
    assert "deleting the engine of an earlier owner/tiny" in newer.stderr
    listed = edgellm("list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["NAME", "owner/tiny"]


def test_a_read_only_cache_of_the_hub_is_read(hub, tmp_path, monkeypatch):
    """What it lacks goes to a private folder, unless a variable names the cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    cache = tmp_path / "home/hub"
    url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    own = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": url, "HF_HUB_CACHE": str(cache)}
    for name, value in {**own, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    old = hub_module.download("owner/tiny")
    hub.add("owner/new", {"config.json": b"{}", "model.safetensors": b"weights"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hub_module, "can_write", lambda folder: folder != cache)
    hub.requests.clear()
    assert hub_module.download("owner/tiny") == old
    assert [path for _, path, _ in hub.requests if "/resolve/" in path] == []
    new = hub_module.download("owner/new")
    private = tmp_path / f"edgellm-{os.getuid()}/.cache/huggingface/hub"
    assert new.path.is_relative_to(private)
    assert (new.path / "model.safetensors").read_bytes() == b"weights"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert (hub_module.download("owner/tiny"), hub_module.download("owner/new")) == (old, new)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_module._cache() == cache


def test_a_download_that_breaks_goes_on_where_it_stopped(hub, tmp_path):
    """The client keeps whole pieces of 10 MiB."""
    content = os.urandom(1 << 20) * 24
    hub.add("owner/large", {"config.json": b"{}", "model.safetensors": content})
    hub.cut_after = 15 << 20
    code = "from edgellm.tools.store.hub import download; print(download('owner/large').path)"
    environment = {**os.environ, **hub.environment(tmp_path)}
    folder = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert Path(folder.strip(), "model.safetensors").read_bytes() == content
    ranges = [wanted for _, path, wanted in hub.requests if path.startswith("/cdn")]
    assert ranges == ["", f"bytes={10 << 20}-"]


def test_gated_and_missing_models_get_a_remedy(edgellm, hub, monkeypatch):
    hub.gated.add("owner/tiny")
    assert_one_line_error(edgellm("pull", "owner/tiny"), "gated", "HF_TOKEN")
    assert_one_line_error(edgellm("pull", "owner/none"), "the hub has no model owner/none")
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert edgellm("pull", "owner/tiny").returncode == 0


def test_without_a_connection_the_cache_answers_or_one_line_does(edgellm, tmp_path):
    lacking = edgellm("pull", "owner/tiny", HF_HUB_OFFLINE=True)
    assert_one_line_error(lacking, "HF_HUB_OFFLINE is set", "the hub's cache lacks owner/tiny")
    unreachable = edgellm("pull", "owner/tiny", ENDPOINT="http://127.0.0.1:9")
    assert_one_line_error(unreachable, "http://127.0.0.1:9 cannot be reached")
    assert edgellm("pull", "owner/tiny").returncode == 0
    again = edgellm("pull", "owner/tiny", HF_HUB_OFFLINE=True)
    assert again.returncode == 0, again.stderr
    assert not list((tmp_path / "edgellm").rglob("*.partial-*"))


@pytest.mark.parametrize(
    ("model", "names", "architecture", "found"),
    [
        (
            "m-Q4_0.gguf",
            ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"],
            "qwen2vl",
            ["mmproj-F16.gguf"],
        ),
        ("m-Q4_0.gguf", ["m-mmproj-Q8_0.gguf", "mmproj-other.gguf"], "", ["m-mmproj-Q8_0.gguf"]),
        ("m-Q4_0.gguf", ["mmproj-F16.gguf"], "phi3", []),
        ("q/m-Q4_0.gguf", ["mmproj-F16.gguf"], "qwen2vl", []),
        ("m.safetensors", ["mmproj-F16.gguf"], "", []),
    ],
)
def test_the_encoder_of_a_gguf_model_is_fetched_too(model, names, architecture, found):
    assert encoder_of(model, [model, *names], architecture) == found


@pytest.mark.parametrize("name", ["m-Q4_0.gguf", "Q4_0/m-Q4_0.gguf"])
@pytest.mark.parametrize("precision", ["", ":Q4_0"])
def test_without_a_connection_a_gguf_file_of_the_cache_is_found(hub, tmp_path, name, precision):
    mmproj = name.replace("m-Q4_0", "mmproj-F16")
    hub.add("owner/quantized", {name: b"GGUF", mmproj: b"GGUF", "README.md": b""})
    code = (
        "from edgellm.tools.store.hub import download\n"
        "from huggingface_hub import constants\n"
        f"first = download('owner/quantized{precision}')\n"
        "constants.HF_HUB_OFFLINE = True\n"
        f"assert download('owner/quantized{precision}') == first\n"
        "print(first.path)"
    )
    environment = {**os.environ, **hub.environment(tmp_path)}
    path = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert path.strip().endswith(f"/{name}")
    assert Path(path.strip()).with_name(Path(mmproj).name).exists()
