"""The pip command for missing packages: right for each command, extra and package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import assert_one_line_error

from edgellm.core.commands import extras
from edgellm.core.commands.entry_points import MODULES
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.command.cli import app

# Extras that no command of a user needs: for the project's own work, or of other programs.
OWN = {"docs", "proof", "quick", "tests", "dev", "gpu"}
MISSING = "import sys; sys.modules.update(dict.fromkeys({names!r})); sys.argv = {argv!r}; "
START = "from edgellm.core.commands import entry_points; entry_points.{name}()"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared() -> dict[str, list[str]]:
    """Packages of each extra, and the extras that it includes."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    return project["project"]["optional-dependencies"]


def test_the_extras_have_the_packages_that_the_project_declares():
    provided = packages_distributions()
    for extra, needs in _declared().items():
        if extra in OWN:
            continue
        included = {
            name
            for need in needs
            if (found := re.match(r"edgellm\[([\w,-]+)\]", need))
            for name in found[1].split(",")
        }
        assert included == set(extras._INCLUDED.get(extra, ())), extra
        packages = {_normal(re.match(r"[\w.-]+", need)[0]) for need in needs} - {"edgellm"}
        known = {
            _normal(package)
            for module in extras.EXTRAS[extra]
            for package in provided.get(module.partition(".")[0], [])
        }
        installed = {_normal(one) for names in provided.values() for one in names}
        assert packages & installed <= known, extra


def test_every_command_of_a_user_has_its_extras():
    subcommands = {f"edgellm {name}" for name in app.subcommands}
    assert {*extras.COMMANDS, *extras.ALIASES} == {*MODULES, *subcommands} - {"edgellm"}
    assert set(extras.ALIASES.values()) <= set(extras.COMMANDS)
    for alias, command in extras.ALIASES.items():
        module = app.subcommands[alias.partition(" ")[2]].module
        assert module == MODULES[command]


def _run(argv, *names, code=START):
    words = MISSING.format(names=names, argv=argv) + code.format(name=argv[0].replace("-", "_"))
    return subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=False, timeout=60
    )


ENGINE = ("--engineDir", "engine")
CASES = [
    (["edgellm", "serve", "m.gguf"], ["fastapi"], "serve"),
    (["edgellm", "serve", "m.gguf"], ["uvicorn"], "serve"),
    (["edgellm", "serve", "m.gguf", "--grpcPort", "0"], ["grpc"], "grpc"),
    (["edgellm", "serve", "m.gguf"], ["fastapi", "onnxruntime", "gguf"], "export,device,serve"),
    (["edgellm-serve", *ENGINE], ["fastapi"], "serve"),
    (["edgellm-serve", *ENGINE], ["anyio", "msgspec"], "device,serve"),
    (["edgellm", "run", "m.gguf", "hello"], ["tokenizers"], "export,device"),
    (["edgellm", "bench", "m.gguf"], ["tokenizers"], "export,device"),
    (["edgellm", "pull", "m.gguf"], ["tokenizers"], "export,device"),
    (["edgellm", "export", "llm", "--model_dir", "m.gguf", "--output_dir", "o"],
     ["tokenizers"], "export"),
    (["edgellm-export", "llm", "--model_dir", "m.gguf", "--output_dir", "o"],
     ["tokenizers"], "export"),
    (["edgellm", "quantize", "llm", "--model_dir", "m.gguf", "--output_dir", "o",
      "--quantization", "fp8"], ["modelopt"], "quantize"),
    (["edgellm", "build", *ENGINE, "--onnxDir", "b"], ["onnxruntime"], "device"),
    (["llm_inference", *ENGINE, "--prompt", "hello"], ["tokenizers"], "device"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "missing", "wanted"), CASES, ids=lambda value: " ".join(value))
def test_a_missing_package_is_named_with_the_command_that_adds_it(argv, missing, wanted, tmp_path):
    """Whatever the command needs is missing before it works: the hint names all of it."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    argv = [str(tmp_path / word) if word == "m.gguf" else word for word in argv]
    result = _run(argv, *missing)
    # Without torch, the hint of quantize names it, too.
    assert_one_line_error(result, "pip install ", f" 'edgellm[{wanted}]'")
    assert any(name in result.stderr for name in (*missing, "torch"))


def test_chats_need_their_packages_on_a_terminal_only(monkeypatch):
    from edgellm.tools.chat import screen

    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys, "argv", ["edgellm", "run", "m"])
    screen.require_packages()  # pytest's streams are no terminal
    monkeypatch.setattr(screen, "_is_terminal", lambda: True)
    with pytest.raises(EdgeLLMError, match="prompt_toolkit is not installed") as found:
        screen.require_packages()
    assert found.value.hint == "pip install 'edgellm[chat]'"


def test_packages_without_an_extra_come_with_edgellm_itself(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["edgellm-export"])
    assert extras.remedy("onnx_ir") == "pip install edgellm"
    assert extras.remedy("google") == "pip install edgellm"  # a namespace, of many packages
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert extras.remedy("grpc") == "pip install 'edgellm[grpc]'"


def test_torch_is_the_tested_version_where_there_is_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["edgellm-quantize"])
    for module in ("torch", "modelopt"):
        monkeypatch.setitem(sys.modules, module, None)
    assert extras.remedy("torch") == "pip install torch==2.13.0 'edgellm[quantize]'"
    project = Path(__file__).parents[3] / "pyproject.toml"
    assert f"pip install {extras._TORCH}" in project.with_name("Makefile").read_text() + "".join(
        path.read_text() for path in (project.parent / "docs").rglob("*.md")
    )


def test_pip_takes_extras_from_the_installation():
    """The command works from any folder: pip finds edgellm installed, and asks no index for it."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    result = subprocess.run(
        [*command, "edgellm[guide]"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
