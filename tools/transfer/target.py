"""Where a transfer goes: a folder here or on another machine, and running scripts there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from edgellm.contract import EdgeLLMError
from edgellm.tools.transfer.faults import explain

_REMOTE = re.compile(r"(?P<host>(?:[^/:@\s]+@)?(?:\[[^\]\s]+\]|[^/:\[\]\s]+)):(?P<folder>.*)")
_CONNECT_S, _GRACE_S = 10, 10
_HINT = "give a folder for the bundle: user@host:models/bundle, or a local one"


@dataclass(frozen=True, slots=True)
class Target:
    """A folder, which becomes the bundle."""

    host: str  # user@host, "" for this machine
    folder: str
    ssh: tuple[str, ...] = ()  # the command that reaches the host

    @property
    def stage(self) -> str:
        """Where files arrive before they are checked and moved; it lasts through interrupts."""
        path = PurePosixPath(self.folder)
        return str(path.with_name(f".{path.name}.transfer"))

    def __str__(self) -> str:
        """As the user wrote it."""
        return f"{self.host}:{self.folder}" if self.host else self.folder


def parse(text: str) -> Target:
    """From user@host:DIR, or the path of a local folder.

    Raises:
        EdgeLLMError: no folder is named.
    """
    match = _REMOTE.fullmatch(text)
    host, folder = (match["host"], match["folder"]) if match else ("", text)
    folder = folder.removeprefix("~/").rstrip("/")  # a remote path begins at home
    if host.startswith("-") or PurePosixPath(folder).name in ("", ".", "..", "~"):
        raise EdgeLLMError(f"{text} names no folder of its own", hint=_HINT)
    return Target(host, folder)


@contextlib.contextmanager
def connected(target: Target) -> Iterator[Target]:
    """The target with a command that reaches it; one login serves all of its uses.

    Raises:
        EdgeLLMError: this machine has no ssh.
    """
    if not target.host:
        yield target
        return
    if shutil.which("ssh") is None:
        raise EdgeLLMError(
            "ssh is not installed here", hint="install it (apt install openssh-client)"
        )
    with tempfile.TemporaryDirectory(prefix="edgellm-") as folder:
        options = {
            "ConnectTimeout": _CONNECT_S, "ServerAliveInterval": 15, "ControlMaster": "auto",
            "ControlPath": f"{folder}/s", "ControlPersist": 60,
            **({} if sys.stdin.isatty() else {"BatchMode": "yes"}),
        }  # fmt: skip
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        ssh = ("ssh", *words)
        try:
            yield Target(target.host, target.folder, ssh)
        finally:
            goodbye = [*ssh, "-O", "exit", _plain(target.host)]
            subprocess.run(goodbye, capture_output=True, check=False)


def run_script(target: Target, script: str) -> str:
    """What a script prints on the target.

    Raises:
        EdgeLLMError: the target cannot be reached, or the script failed.
    """
    command = [*target.ssh, _plain(target.host), "sh -s"] if target.host else ["sh", "-s"]
    code, printed, errors = run(command, script)
    if code:
        raise explain(target, code, errors)
    return printed


def run(
    command: Sequence[str], given: str, show: Callable[[str], None] | None = None
) -> tuple[int, str, str]:
    """Exit code, standard output and errors of a command; an interrupt lets it end in order.

    Args:
        command: program and arguments.
        given: its standard input.
        show: told its output as it comes.
    """
    printed = ""
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as errors,
        _started(command, source, errors, given) as process,
    ):
        assert process.stdout is not None
        try:
            while piece := os.read(process.stdout.fileno(), 1 << 16).decode("utf-8", "replace"):
                printed += piece
                if show is not None:
                    show(piece)
            process.wait()
        except KeyboardInterrupt:
            process.terminate()  # rsync then keeps what has arrived of a file
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            raise
        errors.seek(0)
        return process.returncode, printed, errors.read().decode("utf-8", "replace")


def _started(
    command: Sequence[str], source: IO[bytes], errors: IO[bytes], given: str
) -> subprocess.Popen[bytes]:
    """A process whose input and errors are files, so that no pipe can fill up."""
    source.write(given.encode())
    source.seek(0)
    return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=errors, bufsize=0)


def _plain(host: str) -> str:
    """The host as ssh wants it: rsync needs brackets around an IPv6 address, ssh none."""
    return host.replace("[", "").replace("]", "")


def is_within(folder: Path, target: Target) -> bool:
    """Whether a local target is the source itself, or inside of it."""
    place = Path(target.folder).resolve()
    return not target.host and (place == folder.resolve() or folder.resolve() in place.parents)
