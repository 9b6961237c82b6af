"""`edgellm-chat` in a terminal: keys, completion, wrapping; Ctrl-C in a pseudo-terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from pseudo_terminal import person
from rich.console import Console

from edgellm.tools.chat import screen
from edgellm.tools.chat.terminal import CommandCompleter, Terminal, _Flow

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"
# The command with slow forward passes.
_SLOWLY = """
import time
from edgellm.device_runtime.networks.decoder import DecoderNetwork
run_batch = DecoderNetwork.run_batch
def slow(self, parts):
    time.sleep(0.05)
    return run_batch(self, parts)
DecoderNetwork.run_batch = slow
from edgellm.tools.chat.cli import main
main()
"""


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as source, create_app_session(input=source, output=DummyOutput()):
        yield source


@pytest.fixture
def terminal(keys) -> Terminal:
    del keys
    console = Console(file=io.StringIO(), width=40)
    return Terminal(InMemoryHistory(), lambda: "context 0 of 64", console)


def _shown(terminal: Terminal) -> str:
    return terminal._console.file.getvalue()


def test_lines_with_history_and_line_breaks(terminal, keys):
    keys.send_text("hello\r")
    assert terminal.read() == "hello"
    keys.send_text(f"one{ALT_ENTER}two\r")
    assert terminal.read() == "one\ntwo"
    keys.send_text(f"{UP}{UP}{UP}\r")
    assert terminal.read() == "hello"
    keys.send_text("\x1b[200~pasted\nlines\x1b[201~\r")
    assert terminal.read() == "pasted\nlines"


def test_ctrl_d_and_two_ctrl_c_leave(terminal, keys):
    keys.send_text(CTRL_D)
    with pytest.raises(EOFError):
        terminal.read()
    keys.send_text(CTRL_C * 2)
    with pytest.raises(EOFError):
        terminal.read()
    assert "Ctrl-C again leaves" in _shown(terminal)


def test_ctrl_c_clears_a_line_before_it_leaves(terminal, keys):
    keys.send_text(f"wrong{CTRL_C}right\r")
    assert terminal.read() == "right"
    assert _shown(terminal) == ""


def test_a_line_between_two_ctrl_c_keeps_the_chat(terminal, keys):
    keys.send_text(f"{CTRL_C}x\r")
    assert terminal.read() == "x"
    keys.send_text(f"{CTRL_C}y\r")
    assert terminal.read() == "y"


def test_ctrl_c_between_prompts_counts_at_the_next_prompt(terminal, keys):
    terminal.interrupt()
    keys.send_text("x\r")
    assert terminal.read() == "x"
    assert "Ctrl-C again leaves" in _shown(terminal)
    terminal.interrupt()
    keys.send_text(CTRL_C)
    with pytest.raises(EOFError):
        terminal.read()


def test_commands_and_files_are_completed(tmp_path):
    (tmp_path / "kitchen.jpg").touch()

    def complete(text: str) -> list[str]:
        found = CommandCompleter().get_completions(Document(text), CompleteEvent())
        return [one.text for one in found]

    assert complete("/s") == ["system", "stats", "save"]
    assert complete(f"/image {tmp_path}/ki") == ["tchen.jpg"]
    assert complete("/reset x") == complete("/x") == complete("hello") == []


def test_lines_wrap_between_words():
    console = Console(file=io.StringIO(), width=20)
    flow = _Flow(console)
    text = (
        "the quick brown fox jumps over the lazy dog\n\n  and 日本語日本語日本語日本語 so on " * 2
    )
    for piece in re.findall(r".{1,3}", text, re.DOTALL):
        flow.push(piece)
    flow.finish()
    shown = console.file.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= 20
    assert (
        shown.split()
        == text.replace("日本語日本語日本語日本語", "日本語日本語日本語 日本語").split()
    )


def test_output_text_cannot_move_the_cursor(terminal):
    flow = _Flow(terminal._console)
    flow.push("a\x1b[2Jb\x07\r\x9b1m\tc\n")
    flow.finish()
    assert not set("\x1b\x07\r\x9b") & set(_shown(terminal))
    terminal.fail("not\x1b[31m here", "")
    assert "\x1b" not in _shown(terminal)


def test_the_history_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    screen._history(None).append_string("secret")
    path = tmp_path / "state/edgellm/chat_history"
    assert "secret" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    screen._history(None).append_string("not kept")
    with pytest.raises(screen.EdgeLLMError, match="no such folder"):
        screen._history(tmp_path / "none" / "history")


def test_ctrl_c_stops_a_reply_and_not_the_program(tiny_engine, tmp_path):
    command = (
        sys.executable, "-c", _SLOWLY, "--engineDir", tiny_engine, "--temperature", 0,
        "--historyFile", tmp_path / "history",
    )  # fmt: skip
    with person(*command) as someone:
        someone.wait_for(r"/help lists commands[\s\S]*>")
        someone.type("w20 w21\r")
        someone.wait_for(r"\b[3-9] tokens, [\d.]+ tokens/s · Ctrl-C stops")
        someone.type(CTRL_C)
        someone.wait_for("stopped; the partial answer is kept")
        someone.type("/stats\r")
        shown = someone.wait_for(r"answers: 1, \d+ tokens")
        assert 3 <= int(shown.rpartition("answers: 1, ")[2].split()[0]) < 40
        assert someone.process.poll() is None
        someone.wait_for(">")
        someone.type(CTRL_C)
        someone.wait_for("Ctrl-C again leaves")
        someone.type(CTRL_C)
        assert someone.process.wait(60) == 0
    assert "+w20 w21" in (tmp_path / "history").read_text()
