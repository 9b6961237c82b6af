"""Read a line, answer it, again; Ctrl-C stops an answer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import RequestOutput
from edgellm.tools.chat import commands
from edgellm.tools.chat.conversation import Conversation


class Screen(Protocol):
    """Where lines come from and answers go to."""

    stops_answers: bool  # whether Ctrl-C ends an answer, and not the program

    def read(self) -> str:
        """The next line; raises `EOFError` where there is none."""
        ...

    def interrupt(self) -> None:
        """Ctrl-C while neither a line was read nor an answer came; called by a signal handler."""
        ...

    def answering(self, answer: RequestOutput) -> AbstractContextManager[Callable[[str], None]]:
        """Take the text of an answer, piece by piece."""
        ...

    def say(self, line: str) -> None:
        """Show what a command found."""
        ...

    def note(self, line: str) -> None:
        """Remark on an answer."""
        ...

    def fail(self, message: str, hint: str) -> None:
        """Show a failure and its remedy."""
        ...


@dataclass(slots=True)
class _Stop:
    """What Ctrl-C does; while a prompt is read, which may be long, it interrupts at once."""

    screen: Screen
    is_answering: bool = False
    is_reading: bool = False
    is_asked: bool = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_answering:
            self.screen.interrupt()
            return
        was_asked, self.is_asked = self.is_asked, True
        if self.is_reading and not was_asked:
            raise KeyboardInterrupt

    def begin(self) -> None:
        self.is_asked, self.is_reading, self.is_answering = False, True, True


def run(conversation: Conversation, screen: Screen) -> int:
    """Go on until the lines end, or /quit.

    Returns:
        How many lines failed.
    """
    failures = 0
    with _stoppable(screen) as stop:
        while (line := _line(screen)) is not None:
            failures += bool(line) and not _obey(conversation, line, screen, stop)
    return failures


def _line(screen: Screen) -> str | None:
    """The next line; None at the end, or for /quit."""
    try:
        line = screen.read().strip()
    except EOFError:
        return None
    return None if commands.parse(line) == ("quit", "") else line


def _obey(conversation: Conversation, line: str, screen: Screen, stop: _Stop) -> bool:
    """Whether a line could be answered or carried out."""
    command = commands.parse(line)
    try:
        if command is None:
            _answer(conversation, line, screen, stop)
        elif command == ("continue", ""):
            _answer(conversation, None, screen, stop)
        else:
            for shown in commands.run(conversation, *command):
                screen.say(shown)
    except EdgeLLMError as error:
        screen.fail(str(error), error.hint)
        return False
    return True


def _answer(conversation: Conversation, text: str | None, screen: Screen, stop: _Stop) -> None:
    """Answer a message, or go on with the last answer."""
    answer = conversation.go_on() if text is None else conversation.ask(text)
    try:
        stop.begin()
        with screen.answering(answer) as show:
            for step in answer:
                stop.is_reading = False
                show(step.text)
                if stop.is_asked:
                    break
    except KeyboardInterrupt:
        if not stop.is_asked:
            raise
    finally:
        stop.is_answering = False
    if not answer.token_ids:
        screen.note(
            f"stopped; {'nothing was added' if text is None else 'the message was taken back'}"
        )
        return
    conversation.keep(text, answer)
    if stop.is_asked:
        screen.note("stopped; what came of the answer is kept")
    elif answer.finish_reason == "length":
        screen.note(_cut(conversation, answer))


def _cut(conversation: Conversation, answer: RequestOutput) -> str:
    """Why an answer has no end."""
    capacity = conversation.llm.manifest.max_kv_cache_capacity
    if conversation.context_tokens >= capacity:
        return f"cut: the context of {capacity} tokens is full; /reset begins anew"
    return (
        f"cut after {answer.max_tokens} tokens; /continue goes on, --maxGenerateLength allows more"
    )


@contextlib.contextmanager
def _stoppable(screen: Screen) -> Iterator[_Stop]:
    """Ctrl-C goes to the stop while the block runs, where the screen wants it."""
    stop = _Stop(screen)
    if not screen.stops_answers:
        yield stop
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
