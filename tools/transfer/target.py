"""Target of a transfer: a local or remote folder, and scripts that run there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer.errors import explain

_REMOTE = re.compile(r"(?P<host>(?:[^/:@\s]+@)?(?:\[[^\]\s]+\]|[^/:\[\]\s]+)):(?P<folder>.*)")
_CONNECT_S, _GRACE_S = 10, 10
_HINT = "give a folder for the bundle: user@host:models/bundle, or a local one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Destination folder of a bundle."""

    host: str  # user@host, "" for this machine
    folder: str
    ssh: tuple[str, ...] = field(default=(), compare=False)  # command that connects to the host

    @property
    def stage(self) -> str:
        """Folder of received files before they are verified and moved; survives interrupts."""
        path = PurePosixPath(self.folder)
        return str(path.with_name(f".{path.name}.transfer"))

    def __str__(self) -> str:
        """Return the target as the user wrote it."""
        return f"{self.host}:{self.folder}" if self.host else self.folder


def parse(text: str) -> Target:
    """Parse user@host:DIR, or the path of a local folder.

    Raises:
        EdgeLLMError: the text names no folder.
    """
    match = _REMOTE.fullmatch(text)
    host, folder = (match["host"], match["folder"]) if match else ("", text)
    folder = folder.removeprefix("~/").rstrip("/")  # remote paths are relative to the home folder
    if host.startswith("-") or PurePosixPath(folder).name in ("", ".", "..", "~"):
        raise EdgeLLMError(f"{text} names no folder for the bundle", hint=_HINT)
    return Target(host=host, folder=folder)


@contextlib.contextmanager
def connected(target: Target) -> Iterator[Target]:
    """Yield the target with an ssh command that connects to it; all uses share one login.

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
            "ConnectTimeout": _CONNECT_S,
            "ServerAliveInterval": 15,
            "ControlMaster": "auto",
            "ControlPath": f"{folder}/s",
            "ControlPersist": 60,
            **({} if sys.stdin.isatty() else {"BatchMode": "yes"}),
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        ssh = ("ssh", *words)
        try:
            yield replace(target, ssh=ssh)
        finally:
            goodbye = [*ssh, "-O", "exit", _plain(target.host)]
            subprocess.run(goodbye, capture_output=True, check=False)


def run_script(target: Target, script: str) -> str:
    """Run a script on the target; return its standard output.

    Raises:
        EdgeLLMError: the target cannot be reached, or the script failed.
    """
    command = [*target.ssh, _plain(target.host), "sh -s"] if target.host else ["sh", "-s"]
    code, printed, errors = run(command, script)
    if code:  # 255 may be ssh's
        raise explain(target, code, errors)
    return printed


def run(
    command: Sequence[str],
    given: str,
    show: Callable[[str], None] | None = None,
) -> tuple[int, str, str]:
    """Run a command; return exit code, output and errors. An interrupt terminates it.

    Its input and errors are files, so that no pipe can fill up.

    Args:
        command: program and arguments.
        given: its standard input.
        show: gets its output as it comes.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as errors:
        source.write(given.encode())
        source.seek(0)
        with subprocess.Popen(
            command, stdin=source, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        ) as process:
            printed = _output(process, show)
        errors.seek(0)
        return process.returncode, printed, errors.read().decode("utf-8", "replace")


def _output(process: subprocess.Popen[bytes], show: Callable[[str], None] | None) -> str:
    assert process.stdout is not None
    printed = ""
    try:
        while piece := os.read(process.stdout.fileno(), 1 << 16).decode("utf-8", "replace"):
            printed += piece
            if show is not None:
                show(piece)
        process.wait()
    except KeyboardInterrupt:
        process.terminate()  # rsync then keeps partial files
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        raise
    return printed


def _plain(host: str) -> str:
    """Return the host for ssh, without the brackets that rsync needs around an IPv6 address."""
    return host.replace("[", "").replace("]", "")


def is_within(folder: Path, target: Target) -> bool:
    """Return whether a local target is the source folder or inside it."""
    place = Path(target.folder).resolve()
    return not target.host and (place == folder.resolve() or folder.resolve() in place.parents)
