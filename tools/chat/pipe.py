"""Lines from a pipe or a file: plain text, failures on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from edgellm.device_runtime.api.llm import RequestOutput


class Pipe:
    """A `Screen` without a terminal; Ctrl-C ends the program."""

    stops_answers = False

    def read(self) -> str:
        """The next line of standard input."""
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line

    def interrupt(self) -> None:
        """End the program."""
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def answering(self, answer: RequestOutput) -> Iterator[Callable[[str], None]]:
        """Text as it comes, and a line's end after it."""
        del answer  # nothing is said about it
        yield lambda piece: print(piece, end="", flush=True)
        print(flush=True)

    def say(self, line: str) -> None:
        """On standard output."""
        print(line, flush=True)

    def note(self, line: str) -> None:
        """Beside the answers, not among them."""
        print(f"note: {line}", file=sys.stderr, flush=True)

    def fail(self, message: str, hint: str) -> None:
        """As commands end."""
        print(f"error: {message}", file=sys.stderr, flush=True)
        if hint:
            print(f"hint: {hint}", file=sys.stderr, flush=True)
