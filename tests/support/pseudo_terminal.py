"""A user at a pseudo-terminal: types, and waits for output of the program."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest


class Person:
    """Types into a terminal and reads it."""

    def __init__(self, side: int, process: subprocess.Popen) -> None:
        self.process, self.seen = process, ""
        self._side = side

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Return the output up to a match; later waits search after it."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            if not select.select([self._side], [], [], 1)[0]:
                continue
            try:
                self.seen += os.read(self._side, 1 << 16).decode("utf-8", "replace")
            except OSError:  # the other side has ended
                pytest.fail(f"ended before {pattern!r}: {self.seen}")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before


@contextlib.contextmanager
def person(*command: object, **environment: str) -> Iterator[Person]:
    """Start a command as a user; it ends with the block."""
    side, inner = pty.openpty()
    known = {"TERM": "xterm", "COLUMNS": "100", "LINES": "30", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        list(map(str, command)),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env={**os.environ, **known, **environment},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(inner)
    try:
        yield Person(side, process)
    finally:
        process.kill()
        process.wait()
        os.close(side)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
