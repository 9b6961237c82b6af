"""Commands as users run them, and the allowed ways to end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from adversary import forker
from adversary.attack import require

MAX_SECONDS = 60
MAX_BYTES = 6 << 30  # memory that a command may allocate
TESTS = Path(__file__).parent.parent
Send = Callable[[int], None]  # a signal


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    words: str
    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int
    timed_out: bool

    @property
    def reason(self) -> str:
        """The line of the error; empty where there is none."""
        found = re.search(r"^error: (.*)$", self.stderr, re.MULTILINE)
        return found[1] if found else ""

    def require_clear(self) -> str:
        """Success, or one line with an exit code; returns a word for it.

        Raises:
            Finding: a traceback, a crash, a hang, several lines, or success that complains.
        """
        said = f"{self.words}\nexit code {self.code}, stderr:\n{self.stderr[-3000:]}"
        require(not self.timed_out, f"a hang: {said}")
        require("Traceback" not in self.stderr, f"a traceback: {said}")
        require(self.code >= 0, f"a crash: {said}")
        errors = re.findall(r"^error: (.*)$", self.stderr, re.MULTILINE)
        if self.code == 0:
            require(not errors, f"an error with exit code 0: {said}")
            return "done"
        if self.code == 1 and not errors:  # some requests of a file failed, each with its reason
            return "some failed"
        require(len(errors) == 1, f"not one line: {said}")
        require(errors[0].strip(), f"an empty line: {said}")
        require(not errors[0].startswith("unexpected "), f"an error of an unknown kind: {said}")
        require(errors[0] != "out of memory", f"memory: {said}")
        return "rejected"


@dataclass(slots=True)
class Commands:
    """Starts commands in forks of one process, one at a time."""

    modules: Sequence[str] = forker.DEVICE
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)
    # Not in the command's folder, whose disk may be full
    _texts: tempfile.TemporaryDirectory[str] = field(
        default_factory=tempfile.TemporaryDirectory, repr=False
    )

    def run(
        self,
        folder: Path,
        command: str,
        *arguments: object,
        limits: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        strike: Callable[[Send], object] | None = None,
        seconds: float = MAX_SECONDS,
    ) -> Ended:
        """Run a command to its end.

        Args:
            folder: where it runs.
            command: the name of a script.
            arguments: of the command line.
            limits: of resources, by the name of the constant.
            environment: further variables.
            strike: is called in a thread, with what sends a signal while the command runs.
            seconds: until the command is killed.
        """
        (entry,) = metadata.entry_points(group="console_scripts", name=command)
        job = {
            "command": command,
            "module": entry.module,
            "function": entry.attr,
            "arguments": [*map(str, arguments)],
            "folder": str(folder),
            "stdout": f"{self._texts.name}/stdout",
            "stderr": f"{self._texts.name}/stderr",
            "environment": dict(environment or {}),
            "limits": {"RLIMIT_AS": MAX_BYTES, "RLIMIT_CORE": 0, **(limits or {})},
        }
        begin = time.monotonic()
        code, peak_bytes, is_late = self._watch(self._begin(job), strike, seconds)
        words = " ".join([command, *map(str, arguments)])
        texts = [_taken(Path(self._texts.name, name)) for name in ("stdout", "stderr")]
        return Ended(words, code, *texts, time.monotonic() - begin, peak_bytes, is_late)

    def _begin(self, job: dict[str, Any]) -> int:
        """The process id of a command."""
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        return int(self._line(process))

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def _watch(
        self, pid: int, strike: Callable[[Send], object] | None, seconds: float
    ) -> tuple[int, int, bool]:
        """Exit code, peak memory in bytes, and whether it was killed for its time."""
        late, over = threading.Event(), threading.Event()

        def send(number: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                if not over.is_set():
                    os.kill(pid, number)

        timer = threading.Timer(seconds, lambda: (late.set(), send(signal.SIGKILL)))
        timer.start()
        striker = threading.Thread(target=strike, args=(send,)) if strike else None
        if striker:
            striker.start()
        code, peak = json.loads(self._line(self._started()))
        over.set()
        timer.cancel()
        if striker:
            striker.join()
        return code, peak * 1024, late.is_set()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            # As a module: the script's folder on the path would hide packages of equal names
            command = [sys.executable, "-m", "adversary.forker", *self.modules]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            assert self._line(self._process) == "ready\n"
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None
        self._texts.cleanup()


def after(seconds: float, number: int) -> Callable[[Send], None]:
    """A strike: a signal some time after the start."""

    def strike(send: Send) -> None:
        time.sleep(seconds)
        send(number)

    return strike


def _taken(path: Path) -> str:
    text = path.read_text("utf-8", errors="replace")
    path.unlink()
    return text
