"""Commands as users run them, and the allowed ways to end."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adversary import forker
from adversary.attack import require
from forks import Fork, Forker

MAX_SECONDS = 60
MAX_BYTES = 6 << 30  # memory that a command may allocate
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


class Commands:
    """Starts commands in forks of one process, one at a time."""

    def __init__(self, modules: Sequence[str] = forker.DEVICE) -> None:
        self._forker = Forker(modules, {"OMP_NUM_THREADS": "1"})

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
        begin = time.monotonic()
        fork = self._forker.start(
            command,
            *arguments,
            folder=folder,
            environment=environment,
            limits={"RLIMIT_AS": MAX_BYTES, "RLIMIT_CORE": 0, **(limits or {})},
        )
        is_late = self._watch(fork, strike, seconds)
        words = " ".join([command, *map(str, arguments)])
        texts = fork.communicate()
        code, seconds = fork.wait(), time.monotonic() - begin
        return Ended(words, code, *texts, seconds, fork.peak_bytes, is_late)

    @staticmethod
    def _watch(fork: Fork, strike: Callable[[Send], object] | None, seconds: float) -> bool:
        """Wait for the end of a command; whether it was killed for its time."""
        striker = threading.Thread(target=strike, args=(fork.send_signal,)) if strike else None
        if striker:
            striker.start()
        is_late = False
        try:
            fork.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
            fork.kill()
            fork.wait()
        if striker:
            striker.join()
        return is_late

    def close(self) -> None:
        self._forker.close()


def after(seconds: float, number: int) -> Callable[[Send], None]:
    """A strike: a signal some time after the start."""

    def strike(send: Send) -> None:
        time.sleep(seconds)
        send(number)

    return strike
