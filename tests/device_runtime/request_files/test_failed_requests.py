"""A failed request gets an error response; finished outputs are saved at once, in any order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from lettered_engine import with_letters

from edgellm.device_runtime import LLM
from edgellm.device_runtime.engine.sequence import Sequence, Step
from edgellm.device_runtime.request_files.resume import UnfinishedRun

# A word of the message selects what the template does.
TEMPLATE = (
    "{%- set word = messages[0].content -%}"
    "{%- if word == 'zero' -%}{{ 1 // 0 }}"
    "{%- elif word == 'value' -%}{{ [1].index(2) }}"
    "{%- elif word == 'type' -%}{{ 1 + 'a' }}"
    "{%- elif word == 'raise' -%}{{ raise_exception('no such word') }}"
    "{%- elif word == 'huge' -%}{{ 'a' * 99999999999999999 }}"
    "{%- endif -%}{{ word }}"
)
IN_TEMPLATE = {
    "zero": "ZeroDivisionError: integer division or modulo by zero",
    "value": "ValueError: 2 is not in list",
    "raise": "the chat template refuses the messages: no such word",
    "type": "the chat template refuses the messages: ",
    "huge": "out of memory",
}
IN_GRAMMAR = {  # that no text satisfies
    "regex": r"ab[^\s\S]",
    "json_schema": {"$ref": "#"},
    "ebnf": 'root ::= "a" rest\nrest ::= rest',
}


def _request(word: str, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": word}], **more}


GOOD = [_request(word) for word in ("ab", "cd", "ef", "gh")]
BAD = [
    *(_request(word) for word in IN_TEMPLATE),
    *(_request("Hi", guided_decoding={kind: form}) for kind, form in IN_GRAMMAR.items()),
]


@pytest.fixture(scope="module")
def lettered(tiny_engine, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("failing") / "engine"
    return with_letters(tiny_engine, folder, chat_template=TEMPLATE)


def _content(requests: list[dict]) -> dict:
    return {"temperature": 0, "max_generate_length": 6, "requests": requests}


def _texts(responses: list[dict]) -> list[str]:
    return [one["output_text"] for one in responses if "error" not in one]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_file_continues_after_failed_requests(lettered, infer_here, batch_size, monkeypatch):
    monkeypatch.setattr(LLM, "batch_size", batch_size)
    flags = "--batchSize", batch_size
    _, whole = infer_here(lettered, _content(GOOD), *flags)
    mixed = [*GOOD[:2], *BAD, *GOOD[2:]]
    result, found = infer_here(lettered, _content(mixed), *flags)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert [one["request_idx"] for one in found] == list(range(len(mixed)))
    assert _texts(found) == _texts(whole)
    failed = found[2 : 2 + len(BAD)]
    assert all(one["finish_reason"] == "error" for one in failed)
    for one, reason in zip(failed, IN_TEMPLATE.values(), strict=False):
        assert reason in one["error"]["message"]
        assert f"request {one['request_idx']} failed: {one['error']['message']}" in result.stderr
    for one in failed[len(IN_TEMPLATE) :]:
        assert "no text of this form" in one["error"]["message"]


class _Interrupted:
    """`UnfinishedRun.add` until a Ctrl-C."""

    def __init__(self, after: int) -> None:
        self.left, self._add = after, UnfinishedRun.add

    def add(self, run: UnfinishedRun, answered: object) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self._add(run, answered)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_resume_skips_failed_requests(lettered, infer_here, tmp_path, batch_size, monkeypatch):
    monkeypatch.setattr(LLM, "batch_size", batch_size)
    content = _content([GOOD[0], *BAD, *GOOD[1:]])
    _, whole = infer_here(lettered, content, "--batchSize", batch_size)
    interrupted = _Interrupted(after=5)
    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedRun, "add", lambda run, one: interrupted.add(run, one))
        result, found = infer_here(lettered, content, "--batchSize", batch_size)
    assert f"5 of {len(content['requests'])} outputs are saved in {tmp_path}" in result.stderr
    assert "the same command with --resume continues:\n  llm_inference " in result.stderr
    assert len(found) == 5
    indices = [one["request_idx"] for one in found]
    assert indices == sorted(indices)
    result, found = infer_here(lettered, content, "--batchSize", batch_size, "--resume")
    assert result.returncode == 1, result.stderr
    assert [_without_times(one) for one in found] == [_without_times(one) for one in whole]
    assert not list(tmp_path.glob("*.partial"))


def _without_times(response: dict) -> dict:
    return {name: value for name, value in response.items() if name != "timings"}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_an_interrupted_pass_finishes_is_kept(
    shared_engine, infer_here, tmp_path, batch_size, monkeypatch
):
    """Ctrl-C comes in the forward pass that finishes the first outputs."""
    finish, ended = Sequence._end, []

    def end(sequence: Sequence, **more: bool) -> list[Step]:
        if not ended:
            signal.raise_signal(signal.SIGINT)
        ended.append(sequence)
        return finish(sequence, **more)

    monkeypatch.setattr(Sequence, "_end", end)
    handler = signal.getsignal(signal.SIGINT)
    words = [f"w{at} w{at + 9}" for at in range(20, 27)]
    content = _content([_request(word, ignore_eos=True) for word in words])
    result, found = infer_here(shared_engine, content, "--batchSize", batch_size)
    signal.signal(signal.SIGINT, handler)
    assert result.returncode != 0
    assert ended
    assert len(found) == len(ended) < len(words)
    assert all(one["finish_reason"] == "length" for one in found)
    assert f"{len(ended)} of {len(words)} outputs are saved in {tmp_path}" in result.stderr


# ------------------------------------------------------------------ a process that is killed
COUNT = 12


@pytest.fixture
def inference(shared_engine, tmp_path):
    """The command for a file whose first output takes longer than all others in total."""
    requests = [
        {**_request(f"w{20 + at} w30"), "max_generate_length": 2 if at else 50}
        for at in range(COUNT)
    ]
    source = tmp_path / "in.json"
    source.write_text(json.dumps({"temperature": 0, "batch_size": 3, "requests": requests}))
    script = Path(sys.executable).parent / "llm_inference"

    def command(name: str, *more: object) -> list[str]:
        output = tmp_path / f"{name}.json"
        words = [script, "--engineDir", shared_engine, "--inputFile", source]
        return [*map(str, [*words, "--outputFile", output, *more])]

    return command


def _stopped(words: list[str], journal: Path, lines: int, number: int) -> str:
    """Output of a run that gets a signal when its log has `lines` lines."""
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(number)
    return process.communicate(timeout=60)[1]


def _indices(journal: Path) -> list[int]:
    lines = journal.read_text().splitlines()[1:]
    return [json.loads(line)["response"]["request_idx"] for line in lines]


def test_outputs_after_a_long_one_survive_a_kill(inference, tmp_path):
    journal, output = tmp_path / "out.json.partial", tmp_path / "out.json"
    _stopped(inference("out"), journal, 4, signal.SIGKILL)
    kept = _indices(journal)
    assert len(kept) >= 3
    assert 0 not in kept  # it started first, and continues
    printed = _stopped(inference("out", "--resume"), journal, len(kept) + 4, signal.SIGINT)
    assert f"resuming with request 0 of {COUNT}; {len(kept)} are finished" in printed
    kept = _indices(journal)
    assert f"{len(kept)} of {COUNT} outputs are saved in {journal}" in printed
    assert "llm_inference --engineDir" in printed
    responses = json.loads(output.read_text())["responses"]
    assert [one["request_idx"] for one in responses] == sorted(kept)
    for words in (inference("out", "--resume"), inference("whole")):
        assert forks.shared().run("llm_inference", *words[1:]).returncode == 0
    found, whole = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("out", "whole")
    )
    pairs = zip(found["responses"], whole["responses"], strict=True)
    assert all(_without_times(one) == _without_times(other) for one, other in pairs)
    assert not journal.exists()
