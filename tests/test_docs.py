"""The docs site: it builds, its commands exist, its tutorial runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer
from device_fakes import make_device
from installed import PROJECT, ROOT, SCRIPTS, install
from serve_process import serving
from speech_checkpoints import chirp, write_wav
from typer.core import TyperGroup

from edgellm.build import backends
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime import runners
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.scripts.site.files import comments, manifest_page, request_page
from edgellm.scripts.site.flags import command_page, commands

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(r"(?P<real><!-- real -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)```", re.DOTALL)
_SERVER = "http://127.0.0.1:8000"
# Sizes of the tiny models in place of the tutorial's.
_TINY = {"1024": "64", "2048": "128"}


def _blocks(path: Path) -> list[re.Match[str]]:
    return list(_BLOCK.finditer(path.read_text("utf-8")))


def _typed(block: re.Match[str]) -> str:
    """What a user types: of a console block the lines after a prompt."""
    if block["kind"] != "console":
        return block["text"]
    lines = [line[2:] for line in block["text"].splitlines() if line.startswith("$ ")]
    right = [line for line in lines if "--temprature" not in line]  # a wrong flag
    return "\n".join(line.partition(" > ")[0] for line in right)


def _command_lines(text: str) -> list[list[str]]:
    """Words of the lines of a block that call one of our commands."""
    without = re.sub(r"<<'EOF'\n.*?\nEOF\n", "\n", text, flags=re.DOTALL)
    joined = re.sub(r"\s*\\\n\s*", " ", without)
    pieces = [part for line in joined.splitlines() for part in line.split(" | ")]
    lines = [shlex.split(piece, comments=True) for piece in pieces if "<" not in piece]
    return [words for words in lines if words and words[0] in SCRIPTS]


@pytest.fixture(scope="module")
def apps() -> dict[str, typer.core.TyperCommand]:
    return dict(commands((ROOT / "pyproject.toml").read_text("utf-8")))


def test_the_site_builds_and_needs_no_other_host(tmp_path):
    import mkdocs  # noqa: F401  # its absence is named, so that --quick leaves this out

    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    pages = ["index", "tutorial/index", "architecture/index"]
    pages += ["reference/commands/index", "reference/errors/index"]
    for page in pages:
        html = (tmp_path / f"{page}.html").read_text("utf-8")
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]+", html)
    assert (tmp_path / "demo.svg").exists()
    assert "From a host to a device" in (tmp_path / "index.html").read_text("utf-8")


def test_every_command_is_in_the_reference(apps):
    page = command_page((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {name.split()[0] for name in apps} == set(SCRIPTS)
    assert set(re.findall(r"^## (.+)$", page, re.MULTILINE)) == set(apps)
    engine = "Run the engine in this folder, which llm_build made. Required."
    assert f"| `--engineDir <path>` | {engine} |" in page
    assert "**Speculation**" in page
    assert "edgellm-bench --engineDir engine --prompt 128,512 --generate 64" in page
    assert "\\" not in page


def test_fields_and_their_descriptions():
    page = manifest_page()
    assert "| machine | `str` | dependencies of the compiled graphs, e.g. the CPU's" in page
    assert "Output of `llm_build` and `visual_build`" in page
    requests = request_page()
    assert "| top_p | `number > 0, <= 1 or null` | the model's, else `0.8` |" in requests
    assert "| apply_chat_template | `boolean` | `true` |" in requests
    assert '| role | `"assistant" or "system" or "tool" or "user"`' in requests


def test_comments_of_fields():
    from edgellm.core.model_spec import KVCacheSpec

    assert comments(KVCacheSpec) == {
        "ranges": "None: the KV cache has no calibrated ranges",
        "pages": "None: one sequence, whose rows lie in one piece",
        "heads": "num_kv_heads, head_dim of each layer; (): all alike",
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_have_these_flags(path, apps):
    """They are parsed, not run."""
    for block in _blocks(path):
        for words in _command_lines(_typed(block)):
            name, arguments = words[0], words[1:]
            if (longer := " ".join(words[:2])) in apps:
                name, arguments = longer, words[2:]
            command = apps[name]
            assert not isinstance(command, TyperGroup)
            command.make_context(name, arguments)  # raises the error that a user would get


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_json_is_json(path):
    for block in _blocks(path):
        if block["kind"] == "json":
            assert isinstance(json.loads(block["text"]), dict)


def test_extras_that_pages_name_exist():
    for path in PAGES:
        for named in re.findall(r"pip install '\.\[([\w,]+)\]'", path.read_text("utf-8")):
            assert set(named.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


@pytest.fixture(scope="module")
def followed(eagle_pair, tmp_path_factory) -> tuple[Path, dict[str, str], str]:
    """A folder of a tutorial run with tiny models, and its output."""
    folder = tmp_path_factory.mktemp("tutorial")
    shell = {
        **os.environ,
        **install(tmp_path_factory.mktemp("bin")),
        "MODEL": str(eagle_pair.base_checkpoint),
        "DRAFT": str(eagle_pair.draft_checkpoint),
        "EDGELLM_HOME": str(folder / "home"),
    }
    blocks = [one for one in _blocks(DOCS / "tutorial.md") if one["kind"] == "shell"]
    assert [bool(one["real"]) for one in blocks].count(True) == 1
    script = "set -e\n" + "".join(one["text"] for one in blocks if not one["real"])
    for real, tiny in _TINY.items():
        assert real in script
        script = script.replace(real, tiny)
    result = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=shell, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    _add_pooled_engines(folder, eagle_pair.base_checkpoint)
    return folder, shell, result.stdout


def _add_pooled_engines(folder: Path, checkpoint: Path) -> None:
    """The tiny model as `embedder` with prompts, and a tiny cross-encoder as `reranker`."""
    from encoder_checkpoints import make_encoder

    from edgellm.export.encoders import bert

    model = shutil.copytree(checkpoint, folder / "embedding-model")
    size = json.loads((model / "config.json").read_text("utf-8"))["hidden_size"]
    pooling = {"embedding_dimension": size, "pooling_mode": "lasttoken"}
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{name}"}
        for path, name in names.items()
    ]
    (model / "1_Pooling").mkdir()
    for path, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("config_sentence_transformers.json", {"prompts": {"query": "w20 "}}),
    ):
        (model / path).write_text(json.dumps(content), "utf-8")
    kind = "AutoModelForSequenceClassification"
    make_encoder(folder / "ranking-model", kind, **bert.TINY, num_labels=1)
    for name, source in (("embedder", model), ("reranker", folder / "ranking-model")):
        bundle = folder / f"{name}-bundle"
        export_llm(open_checkpoint(str(source)), bundle, ExportOptions(dtype="fp32"))
        plan = Plan(max_input_len=48, kv_capacity=48, threads=1)
        build_engine("llm", bundle, folder / name, plan, "onnxruntime", lambda _: None)


def test_the_tutorial_runs(followed):
    folder, _, printed = followed
    assert "1 of 1 answers identical, token by token" in printed
    assert (folder / "engine/draft/manifest.json").exists()


def test_wrong_inputs_print_what_the_page_says(tmp_path, tmp_path_factory, tiny_checkpoint):
    """Each command of the page's section on them, in order, in a folder with a model."""
    (tmp_path / "model").symlink_to(tiny_checkpoint)
    homes = {name: str(tmp_path / name.lower()) for name in ("EDGELLM_HOME", "HF_HOME")}
    shell = {**os.environ, **install(tmp_path_factory.mktemp("bin")), **homes}
    text = (DOCS / "how-to" / "first-run.md").read_text("utf-8").partition("## Wrong inputs")[2]
    expected = "".join(one["text"] for one in _BLOCK.finditer(text) if one["kind"] == "console")
    commands = [line.removeprefix("$ ") for line in expected.splitlines() if line[:2] == "$ "]
    assert len(commands) > 6
    printed = ""
    for command in commands:
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=shell, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        printed += f"$ {command}\n{result.stdout}"
        assert result.returncode == (2 if "error: " in result.stdout else 0)
    assert printed == expected


def _printed(text: str, folder: Path, shell: dict[str, str]) -> str:
    """What Python prints; tried again, since a random model's sampled output may end at once."""
    command, found = [sys.executable, "-c", text], ""
    for _ in range(3):
        result = subprocess.run(
            command, cwd=folder, env=shell, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        if found := result.stdout.strip():
            break
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_runs(path, followed, speech_engine):
    """Beside the tutorial's engine are one of Whisper, and a recording."""
    folder, shell, _ = followed
    if not (folder / "talk.wav").exists():
        (folder / "whisper-engine").symlink_to(speech_engine)
        write_wav(folder / "talk.wav", chirp(1))
    engines = folder / "engine", "--engineDir", f"whisper-tiny={speech_engine}"
    for block in _blocks(path):
        if block["kind"] != "python":
            continue
        text, is_client = block["text"], _SERVER in block["text"]
        with serving(*engines) if is_client else nullcontext() as server:
            text = text.replace(_SERVER, server.url) if server is not None else text
            printed = _printed(text, folder, shell)
        assert printed


@pytest.fixture(scope="module")
def four_commands(eagle_pair, tmp_path_factory) -> list[str]:
    """Output of the README's four commands, with a tiny model and a folder as the robot."""
    folder = tmp_path_factory.mktemp("readme")
    device, here = make_device(folder)
    shell = {**os.environ, **device.environment(here), "MODEL": str(eagle_pair.base_checkpoint)}
    bin_folder = install(tmp_path_factory.mktemp("bin"))
    shell |= {**bin_folder, "PATH": f"{here}{os.pathsep}{bin_folder['PATH']}"}
    (script,) = [one["text"] for one in _blocks(ROOT / "README.md") if one["kind"] == "shell"]
    (request,) = [one["text"] for one in _blocks(ROOT / "README.md") if one["kind"] == "json"]
    (folder / "requests.json").write_text(request, "utf-8")
    for real, tiny in _TINY.items():
        script = script.replace(real, tiny)
    result = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=shell, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (device.home / "bundle/manifest.json").exists()
    return result.stdout.splitlines()


def _form(line: str) -> str:
    """A printed line without the figures and names of a model."""
    return re.sub(r"[\d.]+|(?<=: )(llama|qwen\d)", "N", line)


def test_the_readmes_commands_print_its_output(four_commands):
    shown = [one["text"] for one in _blocks(ROOT / "README.md") if one["kind"] == "text"][-1]
    printed = {_form(line) for line in four_commands}
    said = [line for line in shown.splitlines() if not line.startswith("[")]
    said.remove("The capital of France is Paris.")  # a tiny model generates other words
    assert len(said) == 3
    assert [line for line in said if _form(line) not in printed] == []


def test_the_readme_is_a_page():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 90


def test_structure_names_every_package():
    page = (DOCS / "structure.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([\w/]+)` \|", page, re.MULTILINE))
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/__init__.py")}
    assert named == {name for name in folders if not name.startswith((".", "tests"))}


def test_paths_that_pages_name_exist():
    """`engine/step.py` may leave out the folders that the page is about."""
    files = [path.as_posix() for path in ROOT.glob("[a-z]*/**/*.py")]
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        path
        for page in pages
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text("utf-8"))
    }
    assert len(named) > 50
    missing = [path for path in named if not any(one.endswith(f"/{path}") for one in files)]
    assert sorted(missing) == []


def test_the_page_on_shared_test_modules_names_them_all():
    named = set(
        re.findall(r"`([a-z0-9_]+)`", (ROOT / "tests/support/README.md").read_text("utf-8"))
    )
    modules = {path.stem for path in (ROOT / "tests/support").glob("*.py")}
    assert {name for name in modules - named if not name.startswith("scripted_")} == set()


def test_paths_that_contributing_names_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    paths = re.findall(r"`((?:\w+/)+[\w.]*)`", page)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    section = page.partition("## A backend")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section)) - {"auto", "emit", "onnxruntime_cuda", "build"}
    functions = {*vars(backends.Backend), *vars(runners.Backend)}
    assert named == {name for name in functions if name.islower() and not name.startswith("_")}


def test_a_flag_that_does_not_exist_is_found(apps):
    (words,) = _command_lines("cat x | llm_inference --engineDir \\\n  engine --nope\n")
    with pytest.raises(Exception, match="--nope"):
        apps["llm_inference"].make_context(words[0], words[1:])


def test_the_reference_of_outputs_is_complete(followed):
    folder, _, _ = followed
    (response,) = json.loads((folder / "answers.json").read_text("utf-8"))["responses"]
    page = (DOCS / "reference/answers.md").read_text("utf-8")
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {*response, *response["timings"]} - named == set()
    optional = {"choice_idx", "error", "seed", "warnings", "embedding", "results"}
    assert named - {*response, *response["timings"]} == optional
