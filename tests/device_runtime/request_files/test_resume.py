"""`llm_inference --resume`: outputs from before an interrupt are not computed again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from conftest import assert_one_line_error

from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.device_runtime.engine.profile import Profile, RoundCounts
from edgellm.device_runtime.request_files import resume as module
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.resume import FinishedOutput, settings_of, unfinished_run

GIVEN = (Options(), [{"messages": [{"role": "user", "content": "\ud800"}]}])
FLAGS = {
    "max_generate_length": None,
    "context_reuse": False,
    "allow_special_tokens": False,
    "trees": False,
}
SETTINGS = settings_of(GIVEN, {"base": "1"}, None, **FLAGS)
PROFILE = Profile(
    stages_ms={"llm_prefill": [0.1]},
    prompt_tokens=[3],
    rounds=[RoundCounts(emitted=2, tree_size=5, tree_depth=3, accepted=1)],
)


def answered(index):
    return FinishedOutput({"output_text": f"\ud800{index}"}, PROFILE, [{"tokens": ["a"]}])


def begin(output, count, settings=SETTINGS, *, goes_on=False):
    """Run up to `count` requests, then interrupt."""
    with unfinished_run(output, settings, goes_on=goes_on) as run:
        for index in range(len(run.answered), count):
            run.add(answered(index))
        raise KeyboardInterrupt


def test_finished_outputs_survive_an_interrupt(tmp_path):
    output, path = tmp_path / "out.json", tmp_path / "out.json.partial"
    with pytest.raises(KeyboardInterrupt):
        begin(output, 2)
    before = path.read_bytes()
    with pytest.raises(EdgeLLMError, match=r"partial holds 2 answers") as caught:
        begin(output, 3)
    assert "--resume" in caught.value.hint
    path.write_bytes(before + b'{"response": {"torn')
    with pytest.raises(KeyboardInterrupt):
        begin(output, 3, goes_on=True)
    assert path.read_bytes().startswith(before)
    with unfinished_run(output, SETTINGS, goes_on=True) as run:
        assert run.answered == [answered(index) for index in range(3)]
        with (
            pytest.raises(EdgeLLMError, match="another llm_inference is writing"),
            unfinished_run(output, SETTINGS, goes_on=True),
        ):
            pass
    assert not list(tmp_path.iterdir())


def test_no_outputs_leave_no_log(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "out.json", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"content": (Options(top_k=1), GIVEN[1])}, "requests in --inputFile"),
        ({"engines": {"base": "2"}}, "engines"),
        ({"max_generate_length": 3}, "--maxGenerateLength"),
        ({"context_reuse": True}, "--enableContextReuse"),
        ({"allow_special_tokens": True}, "--allowSpecialTokens"),
        ({"trees": True}, "--treeOutputFile"),
    ],
)
def test_a_changed_run_is_rejected(tmp_path, changes, named):
    output, path = tmp_path / "out.json", tmp_path / "out.json.partial"
    with pytest.raises(KeyboardInterrupt):
        begin(output, 1)
    before = path.read_bytes()
    others = {"content": GIVEN, "engines": {"base": "1"}, "spec": None, **FLAGS, **changes}
    with pytest.raises(EdgeLLMError, match=f"was begun with other {named}") as caught:
        begin(output, 1, settings_of(**others), goes_on=True)
    assert caught.value.hint
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["my notes, without a line's end", '{"kind": 1}\n', "\n"])
def test_a_foreign_file_is_not_changed(tmp_path, content):
    path = tmp_path / "out.json.partial"
    path.write_text(content)
    with pytest.raises(EdgeLLMError, match="is not of an interrupted run"):
        begin(tmp_path / "out.json", 1, goes_on=True)
    assert path.read_text() == content


def test_a_damaged_line_is_reported(tmp_path):
    path = tmp_path / "out.json.partial"
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "out.json", 2)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1], b"\0" * 9, b""]))
    with pytest.raises(EdgeLLMError, match="line 3 is not an answer"):
        begin(tmp_path / "out.json", 2, goes_on=True)


def test_a_damaged_first_line_is_reported(tmp_path):
    path = tmp_path / "out.json.partial"
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "out.json", 2)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0][:-1], *lines[1:]]))
    with pytest.raises(EdgeLLMError, match="line 1 is damaged") as caught:
        begin(tmp_path / "out.json", 2, goes_on=True)
    assert caught.value.hint


def test_a_full_disk_keeps_earlier_lines(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "out.json", 2)
    path = tmp_path / "out.json.partial"
    before, write = path.read_bytes(), os.write

    def full(file, data):
        if len(data) < 9:
            raise OSError(28, "full")
        return write(file, bytes(data[: len(data) - 5]))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LimitError, match=rf"No space left on device in {tmp_path}: \d+ bytes"):
        begin(tmp_path / "out.json", 3, goes_on=True)
    assert path.read_bytes() == before


def test_append_cost_is_constant(tmp_path, monkeypatch):
    """Bytes written for each, and disk syncs: one a second."""
    written, waits, write = [], [], os.write
    monkeypatch.setattr(
        os, "write", lambda file, data: written.append(len(data)) or write(file, data)
    )
    monkeypatch.setattr(os, "fsync", waits.append)
    monkeypatch.setattr(module, "_SYNC_EVERY_S", 1e9)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "out.json", 3000)
    assert len(written) == 3001
    assert max(written[1:]) - min(written[1:]) <= 3  # digits of the number
    assert not waits


# ------------------------------------------------------------------ the command
COUNT = 12


@pytest.fixture
def inference(eagle_pair, tmp_path):
    """A command line with all output files."""
    source = tmp_path / "in.json"
    requests = [
        {"messages": [{"role": "user", "content": f"w{20 + index} w{30 + index}"}]}
        for index in range(COUNT)
    ]
    requests[1] = {"messages": []}
    content = {"temperature": 0, "max_generate_length": 40, "requests": requests}
    source.write_text(json.dumps(content))
    script = Path(sys.executable).parent / "llm_inference"

    def command(name, *more):
        return [
            script, "--engineDir", eagle_pair.engine, "--inputFile", source, "--eagle",
            "--outputFile", tmp_path / f"{name}.json", *more,
            "--treeOutputFile", tmp_path / f"{name}.trees.json",
            "--profileOutputFile", tmp_path / f"{name}.profile.json",
        ]  # fmt: skip

    return command


def run(words):
    return forks.shared().run("llm_inference", *words[1:])


def interrupted(words, journal, lines, number):
    """Output of a run that gets a signal when its log has `lines` lines."""
    process = subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    return process.returncode, printed


def without_times(path):
    content = json.loads(path.read_text())
    for response in content["responses"]:
        response.pop("timings", None)
    return content


def test_a_resumed_run_equals_an_uninterrupted_one(inference, tmp_path):
    words, journal = inference("out"), tmp_path / "out.json.partial"
    code, printed = interrupted(words, journal, 4, signal.SIGINT)
    assert code == 130
    kept = journal.read_bytes().count(b"\n") - 1
    assert f"{kept} of {COUNT} outputs are saved in {journal}; the same command" in printed
    assert "Traceback" not in printed
    assert_one_line_error(run(words), f"holds {kept} answers", "--resume")
    code, _ = interrupted([*words, "--resume"], journal, kept + 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    responses = json.loads((tmp_path / "out.json").read_text())["responses"]
    assert len(responses) == kept  # of the Ctrl-C; the kill wrote none
    result = run([*words, "--resume"])
    assert result.returncode == 1, result.stderr  # of the bad request
    assert f"resuming with request {kept + 2} of" in result.stderr
    assert not journal.exists()
    whole = run(inference("whole", "--resume"))  # nothing to resume: from the beginning
    assert whole.returncode == 1, whole.stderr
    assert without_times(tmp_path / "out.json") == without_times(tmp_path / "whole.json")
    for name in ("trees", "profile"):
        assert (tmp_path / f"out.{name}.json").exists()
    counted = [
        {
            name: json.loads((tmp_path / f"{run}.profile.json").read_text())[part][name]
            for part, name in (("prefill", "computed_tokens"), ("prefill", "total_runs"))
        }
        for run in ("out", "whole")
    ]
    assert counted[0] == counted[1]
    trees = [json.loads((tmp_path / f"{run}.trees.json").read_text()) for run in ("out", "whole")]
    indices = [[found["request_idx"] for found in one["requests"]] for one in trees]
    assert indices[0] == indices[1] == [0, *range(2, COUNT)]


def test_a_second_ctrl_c_ends_at_once():
    """While the first is handled by code that Python does not interrupt.

    The lines are written without a buffer: a signal between the write and the return of a
    buffered flush makes Python write the line again.
    """
    code = (
        "import itertools, os, time; from edgellm.core.cli import run_command\n"
        "def work():\n"
        "    try:\n"
        "        os.write(1, b'on\\n'); time.sleep(60)\n"
        "    finally:\n"
        "        os.write(1, b'cleaning\\n'); sum(itertools.repeat(0, 10**11))\n"
        "run_command(work)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for line in ("on\n", "cleaning\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    begin_s = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - begin_s < 20
