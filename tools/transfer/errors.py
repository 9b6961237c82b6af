"""Errors of ssh, rsync and shell commands, with remedies."""

from __future__ import annotations

from typing import Protocol

from edgellm.core.errors import EdgeLLMError

_NO_CONNECTION = 255  # of ssh
# Messages of ssh, rsync and the shell: pattern, fault, remedy; the first match counts.
_KNOWN = (
    ("could not resolve", "is not known", "check the name, or give an IP address"),
    ("no route to host", "cannot be reached", "check the network, and that the device is on"),
    ("network is unreachable", "cannot be reached", "check the network of this machine"),
    ("connection refused", "refuses connections", "start its ssh server, or check the port"),
    ("timed out", "does not respond", "check the network, and that the device is on"),
    ("host key verification failed", "has a changed or unknown host key",
     "connect once with ssh and check its key"),
    ("permission denied (13)", "cannot be written",
     "give a folder that your user may write there"),
    ("permission denied (", "refuses the login", "check user and key: ssh must work by itself"),
    ("no space left on device", "is full",
     "free some space there and run it again: it resumes"),
    ("disk quota exceeded", "is full",
     "free some space there and run it again: it resumes"),
    ("read-only file system", "cannot be written", "give a folder on a disk that can be written"),
    ("permission denied", "cannot be written", "give a folder that your user may write there"),
    ("is a file", "is a file", "give the name of a folder"),
)  # fmt: skip


class _Target(Protocol):
    @property
    def host(self) -> str: ...


def explain(target: _Target, code: int, errors: str, *, hint: str = "") -> EdgeLLMError:
    """Return the error of a failed command.

    Args:
        target: the target of the command.
        code: its exit code.
        errors: its standard error.
        hint: default remedy.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for pattern, fault, remedy in _KNOWN:
        found = [line for line in lines if pattern in line.lower()]
        if found:
            place = target.host if code == _NO_CONNECTION else target
            detail = "" if found[0].lower() == pattern else f" ({found[0]})"
            return EdgeLLMError(f"{place} {fault}{detail}", hint=remedy)
    first = lines[0] if lines else f"exit code {code}"
    if code == _NO_CONNECTION:
        return EdgeLLMError(
            f"{target.host} cannot be reached ({first})", hint=hint or "ssh must work by itself"
        )
    return EdgeLLMError(f"{target}: {first}", hint=hint)
