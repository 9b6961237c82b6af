"""Chat through a pipe or file: plain text, errors on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from edgellm.device_runtime.api.llm import RequestOutput


class Pipe:
    """A `Screen` without a terminal; Ctrl-C ends the program."""

    stops_replies = False

    def read(self) -> str:
        """Return the next line of standard input; raise `EOFError` at its end."""
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line

    def interrupt(self) -> None:
        """End the program."""
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def streaming(self, output: RequestOutput) -> Iterator[Callable[[str], None]]:
        """Print text as it comes, then a newline."""
        del output
        yield lambda piece: print(piece, end="", flush=True)
        print(flush=True)

    def show(self, line: str) -> None:
        """Print to standard output."""
        print(line, flush=True)

    def note(self, line: str) -> None:
        """Print to standard error, so that standard output has only replies."""
        print(f"note: {line}", file=sys.stderr, flush=True)

    def fail(self, message: str, hint: str) -> None:
        """Print to standard error in the format of all commands."""
        print(f"error: {message}", file=sys.stderr, flush=True)
        if hint:
            print(f"hint: {hint}", file=sys.stderr, flush=True)
