"""Commands in forks of one process that has imported their modules.

Half of the time of a short command is the start of Python. A fork has streams, memory, signals
and an exit code of its own, as a process that a user starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from adversary import forker

TESTS = Path(__file__).parent.parent
# Only the tests' own module may come from their folder: others there have names of packages.
START = """
import sys
sys.path.insert(0, {tests!r})
from adversary import forker
sys.path[:2] = [{scripts!r}]
forker.serve(sys.argv[1:])
"""
# What short commands and a server import
MODULES = (
    *(name for name in forker.DEVICE if name != "torch"),
    "edgellm.build.cli",
    "edgellm.build.visual_cli",
    "edgellm.device_runtime.cli",
    "edgellm.export.cli",
    "edgellm.tools.command.cli",
    "edgellm.tools.serve.app",
    "edgellm.tools.serve.cli",
    "edgellm.tools.serve.server",
)
_before: dict[str, str] = {}  # the environment before a test


class Fork:
    """A running command, with the interface of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], texts: Path) -> None:
        """Wait for the start of a command.

        Args:
            words: of the command line.
            texts: the folder of what it writes, which `communicate` removes.
        """
        self.args, self._texts = words, texts
        self.stdout: IO[str] = (texts / "stdout").open(encoding="utf-8", errors="replace")
        self._ended = (texts / "ended").open()
        self.pid = int(self._ended.readline())
        self.returncode: int | None = None
        self.peak_bytes = 0
        self._printed = "", ""

    def poll(self) -> int | None:
        """The exit code; None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            code, peak = json.loads(self._ended.readline())
            self._ended.close()
            self.returncode, self.peak_bytes = code, peak * 1024
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what is left of stdout, and stderr; again the same."""
        self.wait(timeout)
        if not self.stdout.closed:
            errors = (self._texts / "stderr").read_text("utf-8", errors="replace")
            self._printed = self.stdout.read(), errors
            self.stdout.close()
            shutil.rmtree(self._texts)
        return self._printed


class Forker:
    """Starts commands in forks of one process, several at a time."""

    def __init__(
        self, modules: Sequence[str] = MODULES, environment: Mapping[str, str] | None = None
    ) -> None:
        self._modules = modules
        self._more = {**(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()  # the disk of a test's folder may be full
        self._number = 0
        self._lock = threading.Lock()

    def start(
        self,
        command: str,
        *arguments: object,
        folder: Path | None = None,
        is_read: bool = False,
        limits: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Fork:
        """Start a command.

        Args:
            command: the name of a script.
            arguments: of the command line.
            folder: where it runs. Default: the current folder.
            is_read: whether stdout is read while the command runs.
            limits: of resources, by the name of the constant.
            environment: further variables.
        """
        with self._lock:
            self._number += 1
            texts = Path(self._folder.name, str(self._number))
            texts.mkdir()
            os.mkfifo(texts / "ended")
            os.mkfifo(texts / "stdout") if is_read else (texts / "stdout").touch()
            job = {
                "command": command,
                "module": "edgellm.core.commands.entry_points",
                "function": command.replace("-", "_"),
                "arguments": [*map(str, arguments)],
                "folder": str(folder or Path.cwd()),
                **{name: str(texts / name) for name in ("stdout", "stderr", "ended")},
                "environment": {**os.environ, **self._more, **(environment or {})},
                "limits": {**(limits or {})},
            }
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        return Fork([command, *map(str, arguments)], texts)

    def run(self, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in the current folder."""
        fork = self.start(command, *arguments)
        printed, errors = fork.communicate()
        return subprocess.CompletedProcess(fork.args, fork.wait(), printed, errors)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            code = START.format(tests=str(TESTS), scripts=str(Path(sys.executable).parent))
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **self._more},
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
        return self._process

    def close(self) -> None:
        """End the process; commands that run go on."""
        if self._process is not None:
            self._process.communicate()
            self._process = None
        self._folder.cleanup()


def begin_test() -> None:
    """Note the environment of a test, in which other tests have changed nothing."""
    _before.clear()
    _before.update(os.environ)


def is_usual() -> bool:
    """Whether the test has left the environment alone: libraries read it when they load."""
    names = {name for name in _before.keys() | os.environ.keys() if not name.startswith("PYTEST_")}
    return all(_before.get(name) == os.environ.get(name) for name in names)


@functools.cache
def shared() -> Forker:
    """The forks of a worker, whose process starts on first use."""
    found = Forker()
    atexit.register(found.close)
    return found
