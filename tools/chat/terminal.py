"""A terminal: lines with history and completion, answers over a footer with live figures."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from edgellm.device_runtime.api.llm import RequestOutput
from edgellm.tools.chat.commands import COMMANDS
from edgellm.tools.chat.statistics import describe

# What moves the cursor or changes the terminal does not come from a model's text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REFRESHES_PER_S = 10


class Terminal:
    """A `Screen` with a person before it."""

    stops_answers = True

    def __init__(self, history: History, footer: Callable[[], str], console: Console) -> None:
        """Take over the terminal when a line is read.

        Args:
            history: earlier lines, which the arrow keys bring back.
            footer: the line below the prompt.
            console: where answers go.
        """
        self._console = console
        self._is_leaving = self._was_interrupted = False
        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=CommandCompleter(),
            complete_while_typing=False,
            bottom_toolbar=lambda: f" {footer()}",
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation="  ",
        )

    def read(self) -> str:
        """A line; Ctrl-D, or Ctrl-C twice, raises `EOFError`."""
        while (line := self._line()) is None:
            self.say("Ctrl-C again leaves, as Ctrl-D does")
        return line

    def _line(self) -> str | None:
        """A line; None at the first Ctrl-C."""
        try:
            line = self._session.prompt("> ", pre_run=self._begin)
        except KeyboardInterrupt:
            if self._is_leaving:
                raise EOFError from None
            self._is_leaving, self._was_interrupted = True, False
            return None
        self._is_leaving = False
        return line

    def _begin(self) -> None:
        """Of a prompt: Ctrl-C is its own from here on."""
        if self._was_interrupted:
            self._session.app.exit(exception=KeyboardInterrupt)

    def interrupt(self) -> None:
        """Count as a Ctrl-C at the next prompt."""
        self._was_interrupted = True

    @contextlib.contextmanager
    def answering(self, answer: RequestOutput) -> Iterator[Callable[[str], None]]:
        """Rows that are full are printed for good, the last one and the footer are live."""
        flow = _Flow(self._console)
        live = Live(
            console=self._console,
            transient=True,
            refresh_per_second=_REFRESHES_PER_S,
            get_renderable=lambda: Group(Text(flow.row), _footer(answer)),
        )
        try:
            with live:
                yield flow.push
        finally:
            flow.finish()

    def say(self, line: str) -> None:
        """In grey."""
        self._console.print(Text(line, style="dim"))

    def note(self, line: str) -> None:
        """In grey, too."""
        self.say(line)

    def fail(self, message: str, hint: str) -> None:
        """In red, with the remedy below."""
        self._console.print(Text.assemble(("error: ", "red"), _clean(message)))
        if hint:
            self.say(f"hint: {hint}")


class _Flow:
    """Text that comes in pieces, cut into rows of the terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self.row = console, ""

    def push(self, piece: str) -> None:
        """Print the rows that are full."""
        *lines, self.row = (self.row + _clean(piece)).split("\n")
        for line in lines:
            self._console.print(Text(line))
        if cell_len(self.row) >= self._console.width:
            *rows, last = Text(self.row).wrap(self._console, self._console.width - 1)
            for row in rows:
                self._console.print(row)
            space = " " if self.row.endswith(" ") else ""  # wrapping drops it
            self.row = last.plain.rstrip(" ") + space

    def finish(self) -> None:
        """Print what is left."""
        self._console.print(Text(self.row))


class CommandCompleter(Completer):
    """Names of commands after a slash, and files after those that take one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """What may stand at the cursor."""
        before = document.text_before_cursor
        if not before.startswith("/"):
            return
        name, space, value = before[1:].partition(" ")
        if not space:
            for known, command in COMMANDS.items():
                if known.startswith(name):
                    yield Completion(known, -len(name), display_meta=command.about)
        elif name in COMMANDS and COMMANDS[name].takes_path:
            yield from self._paths.get_completions(Document(value), complete_event)


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter begins another line, Ctrl-C clears a line before it leaves."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _footer(answer: RequestOutput) -> Text:
    words = f" {describe(answer)} · Ctrl-C stops"
    return Text(words, style="dim", no_wrap=True, overflow="ellipsis")


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
