"""Chat in a terminal: lines with history and completion, replies over a footer with figures."""

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

# Control characters, which could move the cursor or change the terminal's state.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REFRESHES_PER_S = 10


class Terminal:
    """A `Screen` in a terminal."""

    stops_replies = True

    def __init__(self, history: History, footer: Callable[[], str], console: Console) -> None:
        """Create the prompt session.

        Args:
            history: earlier lines, for the arrow keys.
            footer: returns the line below the prompt.
            console: prints the replies.
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
        """Return a line; Ctrl-D, or Ctrl-C twice, raises `EOFError`."""
        while (line := self._line()) is None:
            self.show("Ctrl-C again leaves, as Ctrl-D does")
        return line

    def _line(self) -> str | None:
        """Return a line; None at the first Ctrl-C."""
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
        """Handle an earlier Ctrl-C at the start of a prompt, which handles later ones itself."""
        if self._was_interrupted:
            self._session.app.exit(exception=KeyboardInterrupt)

    def interrupt(self) -> None:
        """Count as a Ctrl-C at the next prompt."""
        self._was_interrupted = True

    @contextlib.contextmanager
    def streaming(self, output: RequestOutput) -> Iterator[Callable[[str], None]]:
        """Print full lines; redraw the last line and the footer."""
        flow = _Flow(self._console)
        live = Live(
            console=self._console,
            transient=True,
            refresh_per_second=_REFRESHES_PER_S,
            get_renderable=lambda: Group(Text(flow.last), _footer(output)),
        )
        try:
            with live:
                yield flow.push
        finally:
            flow.finish()

    def show(self, line: str) -> None:
        """Print in grey."""
        self._console.print(Text(line, style="dim"))

    def note(self, line: str) -> None:
        """Print in grey."""
        self.show(line)

    def fail(self, message: str, hint: str) -> None:
        """Print in red, with the remedy below."""
        self._console.print(Text.assemble(("error: ", "red"), _clean(message)))
        if hint:
            self.show(f"hint: {hint}")


class _Flow:
    """Streamed text, wrapped to the terminal's width."""

    def __init__(self, console: Console) -> None:
        self._console, self.last = console, ""  # the line that is not full

    def push(self, piece: str) -> None:
        """Add text; print the lines that are full."""
        *lines, self.last = (self.last + _clean(piece)).split("\n")
        for line in lines:
            self._console.print(Text(line))
        if cell_len(self.last) >= self._console.width:
            *wrapped, last = Text(self.last).wrap(self._console, self._console.width - 1)
            for line in wrapped:
                self._console.print(line)
            space = " " if self.last.endswith(" ") else ""  # wrapping drops it
            self.last = last.plain.rstrip(" ") + space

    def finish(self) -> None:
        """Print the last line."""
        self._console.print(Text(self.last))


class CommandCompleter(Completer):
    """Completion of commands after a slash, and of files as their arguments."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """See Completer."""
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
    """Return key bindings: Enter sends, Alt-Enter adds a line, Ctrl-C clears the line or leaves."""
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


def _footer(output: RequestOutput) -> Text:
    words = f" {describe(output)} · Ctrl-C stops"
    return Text(words, style="dim", no_wrap=True, overflow="ellipsis")


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
