"""The chat loop: read a line, stream the reply; Ctrl-C stops a reply."""

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
    """Input of lines and output of replies."""

    stops_replies: bool  # whether Ctrl-C ends the reply instead of the program

    def read(self) -> str:
        """Return the next line; raise `EOFError` at the end."""
        ...

    def interrupt(self) -> None:
        """Handle Ctrl-C between reading and replies; called by a signal handler."""
        ...

    def streaming(self, output: RequestOutput) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context whose function takes the text of a reply piece by piece."""
        ...

    def show(self, line: str) -> None:
        """Show a line of a command's output."""
        ...

    def note(self, line: str) -> None:
        """Show a remark about a reply."""
        ...

    def fail(self, message: str, hint: str) -> None:
        """Show an error and its remedy."""
        ...


@dataclass(slots=True, kw_only=True)
class _Stop:
    """Signal handler of Ctrl-C; interrupts a prefill at once, decoding after the next step."""

    screen: Screen
    is_running: bool = False
    is_prefill: bool = False
    is_requested: bool = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_running:
            self.screen.interrupt()
            return
        was_requested, self.is_requested = self.is_requested, True
        if self.is_prefill and not was_requested:
            raise KeyboardInterrupt

    def begin(self) -> None:
        self.is_requested, self.is_prefill, self.is_running = False, True, True


def run(conversation: Conversation, screen: Screen) -> int:
    """Process lines until the input ends or /quit.

    Returns:
        Number of lines that failed.
    """
    failures = 0
    with _stoppable(screen) as stop:
        while (line := _line(screen)) is not None:
            failures += bool(line) and not _process(conversation, line, screen, stop)
    return failures


def _line(screen: Screen) -> str | None:
    """Return the next line; None at the end or for /quit."""
    try:
        line = screen.read().strip()
    except EOFError:
        return None
    return None if commands.parse(line) == ("quit", "") else line


def _process(conversation: Conversation, line: str, screen: Screen, stop: _Stop) -> bool:
    """Send a message or run a command; return whether it succeeded."""
    command = commands.parse(line)
    try:
        if command is None:
            _reply(conversation, line, screen, stop)
        elif command == ("continue", ""):
            _reply(conversation, None, screen, stop)
        else:
            for shown in commands.run(conversation, *command):
                screen.show(shown)
    except EdgeLLMError as error:
        screen.fail(str(error), error.hint)
        return False
    return True


def _reply(conversation: Conversation, text: str | None, screen: Screen, stop: _Stop) -> None:
    """Stream the reply to a message; without a message, continue the last reply."""
    output = conversation.continue_last() if text is None else conversation.ask(text)
    try:
        stop.begin()
        with screen.streaming(output) as show:
            for step in output:
                stop.is_prefill = False
                show(step.text)
                if stop.is_requested:
                    break
    except KeyboardInterrupt:
        if not stop.is_requested:
            raise
    finally:
        stop.is_running = False
    if not output.token_ids:
        screen.note(
            f"stopped; {'nothing was added' if text is None else 'the message was discarded'}"
        )
        return
    conversation.keep(text, output)
    if stop.is_requested:
        screen.note("stopped; the partial answer is kept")
    elif output.finish_reason == "length":
        screen.note(_truncation(conversation, output))


def _truncation(conversation: Conversation, output: RequestOutput) -> str:
    """Return why an output was truncated."""
    capacity = conversation.llm.manifest.max_kv_cache_capacity
    if conversation.context_tokens >= capacity:
        return f"truncated: the context of {capacity} tokens is full; /reset clears it"
    return (
        f"truncated after {output.max_tokens} tokens; /continue continues, "
        "--maxGenerateLength sets the limit"
    )


@contextlib.contextmanager
def _stoppable(screen: Screen) -> Iterator[_Stop]:
    """Install the signal handler while the block runs, if the screen stops replies."""
    stop = _Stop(screen=screen)
    if not screen.stops_replies:
        yield stop
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
