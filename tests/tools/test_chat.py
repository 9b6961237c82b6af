"""`edgellm-chat`: turns, commands, a full context; through a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from conftest import assert_one_line_error
from PIL import Image
from vlm_engines import build_vlm

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.tools.chat import commands, repl
from edgellm.tools.chat.conversation import Conversation, Settings
from edgellm.tools.chat.statistics import describe

GREEDY = Settings(SamplingParams(temperature=0), 8, enable_thinking=False)


@pytest.fixture(scope="module")
def llm(tiny_engine) -> LLM:
    return LLM(tiny_engine, context_reuse=True)


@pytest.fixture
def conversation(llm) -> Conversation:
    return Conversation(llm=llm, settings=GREEDY)


@pytest.fixture
def chat(tiny_engine):
    """Run the command with lines on its standard input."""

    def run(lines, *arguments, engine=tiny_engine):
        words = [sys.executable, "-m", "edgellm.tools.chat", "--engineDir", engine,
                 "--temperature", 0, *arguments]  # fmt: skip
        return subprocess.run(
            list(map(str, words)), input=lines, capture_output=True, text=True, check=False
        )

    return run


class Script:
    """A screen that reads prepared lines and records its output."""

    stops_replies = True

    def __init__(self, *lines: str) -> None:
        self.lines, self.shown, self.on_piece = list(lines), [], lambda: None

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def interrupt(self) -> None:
        self.shown.append("interrupt")

    @contextlib.contextmanager
    def streaming(self, output):
        del output
        yield lambda piece: (self.shown.append(piece), self.on_piece())

    def show(self, line: str) -> None:
        self.shown.append(f"show {line}")

    def note(self, line: str) -> None:
        self.shown.append(f"note {line}")

    def fail(self, message: str, hint: str) -> None:
        self.shown.append(f"fail {message} ({hint})")


def _talk(conversation: Conversation, text: str) -> str:
    output = conversation.ask(text)
    for _ in output:
        pass
    conversation.keep(text, output)
    return output.text


def test_earlier_turns_reuse_the_kv_cache(conversation):
    first = _talk(conversation, "w20 w21")
    assert conversation.messages == [
        {"role": "user", "content": "w20 w21"},
        {"role": "assistant", "content": first},
    ]
    held = conversation.context_tokens
    again = conversation.ask("w22")
    for _ in again:
        pass
    assert sum(again.profile.reused_tokens) >= held - 2  # the end of the answer is rendered anew
    conversation.reset()
    assert (conversation.messages, conversation.context_tokens) == ([], 0)


def test_continue_extends_the_last_message(conversation):
    screen = Script("/continue", "w20 w21", "/continue", "/continue x")
    assert repl.run(conversation, screen) == 2
    assert screen.shown[0] == "fail there is no answer yet (type a message first)"
    assert screen.shown[-1] == "fail /continue takes no argument (/continue alone)"
    asked, answered = conversation.turns
    more = conversation.llm.generate(
        [asked, {**answered, "content": ""}],
        sampling=GREEDY.sampling,
        max_generate_length=8,
    )
    list(more)
    assert answered["content"].startswith(more.text)
    assert len(answered["content"]) > len(more.text)
    assert conversation.totals.answers == 2


def test_reset_keeps_the_system_prompt(conversation):
    assert commands.run(conversation, "system", "") == ["no system prompt"]
    assert commands.run(conversation, "system", "w30 w31") == ["system: w30 w31"]
    _talk(conversation, "w20")
    commands.run(conversation, "reset", "")
    assert conversation.messages == [{"role": "system", "content": "w30 w31"}]


def test_a_message_beyond_the_context_fails_and_changes_nothing(conversation):
    _talk(conversation, "w20 " * 20)
    before = list(conversation.turns)
    with pytest.raises(RequestError, match=r"conversation is too long: .* takes 48") as found:
        conversation.ask("w21 " * 20)
    assert "/reset" in found.value.hint
    assert conversation.turns == before
    with pytest.raises(RequestError, match=r"^the prompt has"):
        conversation.ask("w21 " * 60)
    conversation.reset()
    assert _talk(conversation, "w21 " * 20)


def test_an_output_is_truncated_when_the_context_is_full(llm):
    settings = Settings(SamplingParams(temperature=0), 500, enable_thinking=False)
    screen = Script("w20 " * 40, "w20")
    assert repl.run(Conversation(llm=llm, settings=settings), screen) == 1
    assert "note truncated: the context of 64 tokens is full; /reset clears it" in screen.shown
    assert "/reset" in screen.shown[-1]


def test_ctrl_c_keeps_the_partial_output(conversation, tiny_engine):
    screen = Script("w20 w21")
    screen.on_piece = lambda: os.kill(os.getpid(), signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    assert repl.run(conversation, screen) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert screen.shown[-1] == "note stopped; the partial answer is kept"
    assert conversation.totals.generated_tokens == 1
    assert len(conversation.turns) == 2
    whole = _talk(conversation, "w22")  # the cache is sound
    fresh = Conversation(llm=LLM(tiny_engine), settings=GREEDY, turns=conversation.turns[:2])
    assert whole == _talk(fresh, "w22")


def test_ctrl_c_during_prefill_discards_the_message(conversation, monkeypatch):
    run_batch = conversation.llm.base.run_batch

    def interrupted(parts):
        os.kill(os.getpid(), signal.SIGINT)
        return run_batch(parts)

    monkeypatch.setattr(conversation.llm.base, "run_batch", interrupted)
    screen = Script("w20 w21")
    repl.run(conversation, screen)
    assert screen.shown == ["note stopped; the message was discarded"]
    assert conversation.turns == []
    monkeypatch.undo()
    assert _talk(conversation, "w20 w21")


def test_ctrl_c_after_a_reply_goes_to_the_prompt(conversation, monkeypatch):
    """A late Ctrl-C must not end the program."""
    screen = Script("w20", "w21")
    keep = Conversation.keep

    def late(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        keep(*arguments)

    monkeypatch.setattr(Conversation, "keep", late)
    assert repl.run(conversation, screen) == 0
    assert screen.shown.count("interrupt") == 2
    assert len(conversation.turns) == 4


def test_ctrl_c_ends_the_program_without_a_terminal(conversation, monkeypatch):
    screen = Script("w20")
    screen.stops_replies = False

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation.llm.base, "run_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repl.run(conversation, screen)


def test_statistics_include_the_acceptance_length(eagle_pair):
    llm = LLM(eagle_pair.engine, spec=SpecOptions(), context_reuse=True)
    conversation = Conversation(llm=llm, settings=GREEDY)
    output = conversation.ask("w20 w21")
    assert describe(output) == f"prefill of {output.prompt_token_count} tokens"
    for _ in output:
        pass
    conversation.keep("w20 w21", output)
    assert "tokens/s, acceptance" in describe(output)
    lines = commands.run(conversation, "stats", "")
    assert any(line.startswith("acceptance length: ") for line in lines)
    assert lines[-1] == f"context {conversation.context_tokens} of 128 tokens"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/help", ("help", "")),
        ("  /system be\nterse ", ("system", "be\nterse")),
        ("/etc/hosts is what?", None),
        ("1/2", None),
        ("/", None),
    ],
)
def test_commands_are_a_slash_and_one_word(line, expected):
    assert commands.parse(line) == expected


def test_invalid_commands_raise(conversation, tmp_path):
    for name, value, message in (
        ("foo", "", "no such command: /foo"),
        ("save", "", "/save needs a file"),
        ("reset", "all", "/reset takes no argument"),
        ("image", "x.png", "takes text only"),
        ("save", str(tmp_path), "is a folder"),
        ("save", str(tmp_path / "no" / "file"), "no such folder"),
        ("save", "a\0b", "is not a path"),
        ("save", "~no-such-user/file", "is not a path"),
    ):
        with pytest.raises(EdgeLLMError, match=message):
            commands.run(conversation, name, value)


def test_a_saved_conversation_is_a_request_file(conversation, tmp_path, command, tiny_engine):
    conversation.system = "w30"
    _talk(conversation, "w20 w21")
    (line,) = commands.run(conversation, "save", str(tmp_path / "said.json"))
    assert line.endswith("said.json: 3 messages")
    result = command(
        "llm_inference", "--engineDir", tiny_engine, "--inputFile", tmp_path / "said.json",
        "--outputFile", tmp_path / "out.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.usefixtures("one_thread")
def test_images_go_with_the_next_message(tmp_path):
    made = build_vlm(tmp_path, "smolvlm")
    llm = LLM(made.engine, multimodal_engine_dir=made.visual_engine, context_reuse=True)
    conversation = Conversation(llm=llm, settings=GREEDY)
    picture = tmp_path / "red.png"
    Image.new("RGB", (60, 40), "red").save(picture)
    assert commands.run(conversation, "image", str(picture))[0].startswith("red.png: goes with")
    (tmp_path / "broken.png").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"broken\.png"):
        commands.run(conversation, "image", str(tmp_path / "broken.png"))
    for wrong in ("a\0b", "~no-such-user/a.png", "~\0/a.png"):
        with pytest.raises(RequestError, match="is not a path"):
            commands.run(conversation, "image", wrong)
    _talk(conversation, "w20")
    content = conversation.turns[0]["content"]
    assert content[0] == {"type": "image", "image": str(picture)}
    assert content[1] == {"type": "text", "text": "w20"}
    assert conversation.images == []
    _talk(conversation, "w21")
    assert conversation.turns[2]["content"] == "w21"
    assert conversation.totals.reused_tokens > 20  # with the image's tokens


def test_a_pipe_prints_replies_and_notes(chat, llm):
    result = chat("w20 w21\n\n/stats\n/bad\nw22\n/quit\nw23\n", "--maxGenerateLength", 5)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == _talk(
        Conversation(
            llm=llm, settings=Settings(SamplingParams(temperature=0), 5, enable_thinking=False)
        ),
        "w20 w21",
    )
    assert lines[1] == "answers: 1, 5 tokens"
    assert "\x1b" not in result.stdout + result.stderr
    assert_one_line_error(result, "no such command: /bad", "/help lists them")
    assert (
        "note: truncated after 5 tokens; /continue continues, --maxGenerateLength sets the limit"
        in result.stderr
    )
    assert lines[4] == "sampling: greedy"
    assert lines[5] == "context 12 of 64 tokens"
    assert len(lines) == 7  # one more answer, then /quit
    assert chat("w20").returncode == 0  # no newline at the end


def test_equal_seeds_give_equal_outputs(chat):
    arguments = ("--temperature", 5, "--topK", 0, "--topP", 1)
    found = [chat("w20\n", *arguments, *more).stdout for more in (["--seed", 1], ["--seed", 1], [])]
    assert found[0] == found[1] != found[2]


def test_invalid_flags_are_rejected(command_here, tiny_engine, tiny_bundle, tmp_path):
    for arguments, engine, message in (
        ((), tiny_bundle, "is of kind llm_bundle, not llm_engine"),
        ((), tmp_path / "none", "none"),
        (("--eagle",), tiny_engine, "is not an EAGLE base"),
        (("--eagleTree", "x"), tiny_engine, "--eagleTree needs speculation"),
        (("--topP", 0), tiny_engine, "top_p 0.0 is out of range"),
        (("--multimodalEngineDir", tmp_path), tiny_engine, "manifest.json"),
    ):
        result = command_here("edgellm-chat", "--engineDir", engine, *arguments)
        assert_one_line_error(result, message)
        assert (result.returncode, result.stdout) == (2, "")
