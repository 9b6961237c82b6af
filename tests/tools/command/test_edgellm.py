"""`edgellm`: from a model to its answers, with a store of engines."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import forks
import pytest
from conftest import assert_one_line_error
from manifests import read_manifest, write_manifest

EDGELLM = Path(sys.executable).parent / "edgellm"
FILES = ["--inputFile", "{requests}", "--outputFile", "{outputs}"]
ASK = ("w20 w21", "--maxTokens", 4, "--temperature", 0)


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_checkpoint):
    """A store, and a copy of the checkpoint that it has an engine of."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(tiny_checkpoint, folder / "tiny")
    environment = {**os.environ, "EDGELLM_HOME": str(folder)}
    command = [EDGELLM, "run", folder / "tiny", *map(str, ASK)]
    made = subprocess.run(
        command, env=environment, stdin=-3, capture_output=True, text=True, check=True
    )
    (folder / "expected.txt").write_text(made.stdout)
    return folder


@pytest.fixture
def stored(home, monkeypatch):
    monkeypatch.setenv("EDGELLM_HOME", str(home))
    return home


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def edgellm(command_here, monkeypatch):
    """Run a subcommand in this process; `stdin` is piped to it."""

    def run(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return command_here("edgellm", *words)

    return run


def _names(edgellm):
    return [entry["name"] for entry in json.loads(edgellm("list", "--json").stdout)]


def test_the_second_run_finds_the_engine(edgellm, stored):
    """By path and by name; the output is that of the first run."""
    expected = (stored / "expected.txt").read_text()
    for model in (stored / "tiny", "tiny"):
        again = edgellm("run", model, *ASK)
        assert (again.returncode, again.stdout, again.stderr) == (0, expected, _truncated(4))


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (("run", "tiny", *ASK), ("edgellm.export", "msgspec")),
        (("infer", "--engineDir", "{engine}", *FILES), ("edgellm.export", "edgellm.tools.store")),
        (("list",), ("numpy", "onnxruntime", "tokenizers", "jinja2", "concurrent.futures")),
    ],
    ids=["run", "infer", "list"],
)
def test_a_second_start_imports_what_it_needs(stored, tmp_path, words, unwanted):
    """Keep the time to the first forward pass below half a second: importing is most of it."""
    engine = next(stored.glob("models/*/engine"))
    requests, outputs = tmp_path / "requests.json", tmp_path / "outputs.json"
    requests.write_text(
        json.dumps({"requests": [{"messages": [{"role": "user", "content": "w"}]}]})
    )
    places = {"engine": engine, "requests": requests, "outputs": outputs}
    modules = tmp_path / "modules.json"
    code = (
        "import atexit, json, sys\n"
        "from edgellm.core.commands.entry_points import edgellm\n"
        f"atexit.register(lambda: json.dump([*sys.modules], open({str(modules)!r}, 'w')))\n"
        f"sys.argv = ['edgellm', *{[str(word).format(**places) for word in words]}]\n"
        "edgellm()"
    )
    subprocess.run([sys.executable, "-c", code], stdin=-3, capture_output=True, check=True)
    imported = set(json.loads(modules.read_text()))
    never = ("torch", "transformers", "onnx", "onnx_ir", "huggingface_hub", "gguf", "rich", "PIL")
    never += ("pydantic", "asyncio", "importlib.metadata", "fastapi", "prompt_toolkit")
    assert imported.isdisjoint({*never, *unwanted, "edgellm.build", "prometheus_client"})


def _truncated(tokens):
    return f"note: truncated after {tokens} tokens; --maxTokens sets the limit\n"


def test_a_prompt_is_followed_by_standard_input(edgellm, stored):
    joined = edgellm("run", "tiny", "w20\n\nw21", *ASK[1:])
    piped = edgellm("run", "tiny", "w20", *ASK[1:], stdin="w21\n")
    assert piped.stdout == joined.stdout != ""
    alone = edgellm("run", "tiny", *ASK[1:], stdin=ASK[0])
    assert alone.stdout == (stored / "expected.txt").read_text()
    assert_one_line_error(edgellm("run", "tiny"), "standard input is empty")


def test_list_and_show_print_source_size_and_engine(edgellm, stored):
    lines = edgellm("list").stdout.splitlines()
    assert lines[0].startswith("NAME  FAMILY  PARAMETERS  SIZE")
    assert lines[1].split()[:2] == ["tiny", "llama"]
    facts = json.loads(edgellm("show", "tiny", "--json").stdout)[0]
    assert facts["source"] == str((stored / "tiny").resolve())
    engine = Path(facts["engine"])
    assert (
        facts["bytes"]
        == sum(
            path.stat().st_size
            for path in engine.rglob("*")
            if path.is_file() and path.name != ".checked.json"
        )
        + (engine / ".checked.json").stat().st_size
    )
    assert f"engine       {engine}" in edgellm("show", "tiny").stdout


def test_run_takes_an_engine_or_a_bundle(edgellm, stored, tiny_bundle, tmp_path, monkeypatch):
    engine = json.loads(edgellm("show", "tiny", "--json").stdout)[0]["engine"]
    expected = (stored / "expected.txt").read_text()
    assert edgellm("run", engine, *ASK).stdout == expected
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    assert edgellm("run", tiny_bundle, *ASK).returncode == 0
    assert _names(edgellm) == [tiny_bundle.name]


@pytest.mark.usefixtures("stored")
def test_what_the_flags_ask_for_is_another_engine(edgellm):
    """A shorter context is part of a longer one; other precisions and drafts are not."""
    assert edgellm("run", "tiny", *ASK, "--context", 32).stderr == _truncated(4)
    for flags, key, value in (
        (("--fast",), "precision", "int4"),
        (("--quantize", "int8"), "precision", "int8"),
        (("--draft", "none"), "draft", "nothing"),
    ):
        made = edgellm("run", "tiny", *ASK, *flags)
        assert "exporting" in made.stderr
        again = edgellm("run", "tiny", *ASK, *flags)
        assert (again.stdout, again.stderr) == (made.stdout, _truncated(4))
        newest = json.loads(edgellm("list", "--json").stdout)[0]
        assert newest[key] == value
    assert_one_line_error(edgellm("run", "tiny", *ASK, "--fast", "--quantize", "int8"), "--fast")
    long = edgellm("run", "tiny", *ASK, "--context", 9999)
    assert_one_line_error(long, "positions")
    assert "exporting" not in long.stderr


@pytest.mark.usefixtures("empty")
def test_a_trained_draft_changes_no_output(edgellm, eagle_pair):
    base, draft = eagle_pair.base_checkpoint, eagle_pair.draft_checkpoint
    plain = edgellm("run", base, *ASK, "--draft", "none")
    drafted = edgellm("run", base, *ASK, "--draft", draft)
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout), drafted.stderr
    kinds = [entry["draft"] for entry in json.loads(edgellm("list", "--json").stdout)]
    assert kinds == ["eagle3", "nothing"]


@pytest.mark.usefixtures("empty")
def test_a_changed_checkpoint_is_exported_again(edgellm, tiny_checkpoint, tmp_path):
    source = shutil.copytree(tiny_checkpoint, tmp_path / "own")
    first = edgellm("run", source, *ASK)
    for file in source.iterdir():
        os.utime(file)  # touched, not changed
    assert "exporting" not in edgellm("run", source, *ASK).stderr
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] += " "
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    changed = edgellm("run", source, *ASK)
    assert "deleting the engine of an earlier own" in changed.stderr
    assert first.returncode == changed.returncode == 0
    assert _names(edgellm) == ["own"]


@pytest.mark.usefixtures("empty")
def test_an_engine_of_another_version_is_built_again(edgellm, tiny_checkpoint):
    edgellm("run", tiny_checkpoint, *ASK)
    engine = Path(json.loads(edgellm("list", "--json").stdout)[0]["engine"])
    manifest = read_manifest(engine)
    write_manifest(engine, {**manifest, "backend_version": "0.1"})
    again = edgellm("run", tiny_checkpoint, *ASK)
    assert again.returncode == 0
    assert "was built for ONNX Runtime 0.1" in again.stderr
    assert "exporting" not in edgellm("run", tiny_checkpoint, *ASK).stderr


def test_removal_says_what_it_deletes(edgellm, empty, tiny_checkpoint):
    edgellm("run", tiny_checkpoint, *ASK)
    entry = json.loads(edgellm("list", "--json").stdout)[0]
    removed = edgellm("rm", entry["name"])
    assert removed.stdout.startswith(f"deleted {entry['name']} (")
    assert str(Path(entry["engine"]).parent) in removed.stdout
    assert not [path for path in (empty / "models").iterdir() if path.suffix != ".lock"]
    assert tiny_checkpoint.is_dir()
    assert "no models in" in edgellm("list").stdout


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("run", "/no/such", "hi"), ("no such folder or file: /no/such",)),
        (("run", "./model.gguf", "hi"), ("no such folder or file",)),
        (("run", "tinny", "hi"), ("stored model: tinny", "did you mean tiny?")),
        (("rm", "tinny"), ("no stored model", "did you mean tiny?")),
        (("show", "other"), ("no stored model", "edgellm list")),
        (("run", "tiny", "hi", "--quantize", "int5"), ("--quantize int5",)),
        (("run", "tiny", "hi", "--device", "tpu"), ("--device tpu",)),
        (("run", "tiny", "hi", "--image", "none.png"), ("--image none.png", "no such file")),
        (("run", "tiny", "hi", "--draft", "/no/such"), ("/no/such",)),
        (("run", "tiny", "hi", "--image", __file__), ("tiny takes text only", "leave --image out")),
        (("run", "tiny", " "), ("the prompt is empty",)),
    ],
)
@pytest.mark.usefixtures("stored")
def test_wrong_words_end_in_one_line(edgellm, words, fragments):
    assert_one_line_error(edgellm(*words), *fragments)


def test_paths_without_a_model_are_rejected(edgellm, empty, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("hi")
    assert_one_line_error(edgellm("run", tmp_path / "folder", "hi"), "holds no model")
    assert_one_line_error(edgellm("run", tmp_path / "text.txt", "hi"), "neither a folder nor")
    assert not empty.exists()


@pytest.mark.parametrize("place", ["resource_estimate.free_disk_bytes", "engine.build_engine"])
def test_a_full_disk_names_what_moves_the_store(
    edgellm, empty, tiny_checkpoint, monkeypatch, place
):
    """The estimate before a build finds it, or the build; llm_build names its own flags."""

    def no_room(*_):
        if "free" in place:
            return 1000
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"edgellm.build.{place}", no_room)
    failed = edgellm("run", tiny_checkpoint, *ASK)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1] == (
        "hint: free some space, or name a folder on another disk in EDGELLM_HOME"
    )
    assert not [path for path in (empty / "models").iterdir() if path.suffix != ".lock"]


def _fork(home, *words):
    environment = {"EDGELLM_HOME": str(home)}
    return forks.shared().start("edgellm", *words, environment=environment, is_read=True)


def _start(home, *words):
    return subprocess.Popen(
        [EDGELLM, *map(str, words)],
        env={**os.environ, "EDGELLM_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(home, pattern):
    deadline = time.monotonic() + 60
    while not list((home / "models").glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_no_entry(edgellm, empty, tiny_checkpoint, number):
    process = _start(empty, "run", tiny_checkpoint, *ASK)
    _wait_for(empty, ".*.partial-*/files/bundles")
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), errors
    if number == signal.SIGINT:
        assert "what was downloaded is kept" in errors
        assert f"the same command goes on: edgellm run {tiny_checkpoint}" in errors
    assert not list((empty / "models").glob("*/model.json"))
    assert edgellm("run", tiny_checkpoint, *ASK).returncode == 0
    assert not list((empty / "models").glob(".*.partial-*"))


def test_of_two_runs_one_prepares_and_the_other_waits(empty, tiny_checkpoint):
    first = _fork(empty, "run", tiny_checkpoint, *ASK)
    _wait_for(empty, ".*.partial-*")
    second = _fork(empty, "run", tiny_checkpoint, *ASK)
    (output, _), (same, errors) = first.communicate(), second.communicate()
    assert first.returncode == second.returncode == 0
    assert output == same
    assert "waiting for another edgellm" in errors
    assert "exporting" not in errors


def test_a_served_model_answers_by_its_hub_id(home, tmp_path):
    copied = shutil.copytree(home, tmp_path / "home")
    for record in copied.glob("models/*/model.json"):
        record.write_text(record.read_text().replace('"name": "tiny"', '"name": "owner/tiny"'))
    process = _fork(copied, "serve", "owner/tiny", "--port", 0)
    try:
        greeting = process.stdout.readline()
        url = greeting.partition(" answers at ")[2].split()[0].rstrip(",;")
        body = {"model": "owner/tiny", "messages": [{"role": "user", "content": ASK[0]}]}
        body |= {"max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as response:
            found = json.load(response)["choices"][0]["message"]["content"]
        assert found.strip() == (home / "expected.txt").read_text().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.mark.usefixtures("stored")
def test_bench_measures_a_stored_model(edgellm):
    flags = ("--prompt", 8, "--generate", 4, "--repetitions", 1, "--output", "json")
    result = edgellm("bench", "tiny", *flags)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)


def test_other_commands_are_subcommands(edgellm):
    """With the same flags, errors and help."""
    assert_one_line_error(edgellm("build", "--onnxDir", "/no", "--engineDir", "x"), "/no")
    assert "--model_dir" in edgellm("export", "llm", "--help").stdout
    assert edgellm("doctor", "--help").stdout.startswith("Usage: ")


def test_help_fits_one_screen(edgellm):
    shown = edgellm("--help").stdout
    assert len(shown.splitlines()) <= 50
    for panel in ("Use a model:", "Stored models:", "Single steps:", "Tools:"):
        assert panel in shown
