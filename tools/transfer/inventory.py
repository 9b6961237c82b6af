"""The inventory file of a fleet: one device a line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer.target import Commands, Target, parse

_FORM = "write one device a line: user@host:models/bundle; # begins a comment"


def read(path: Path, commands: Commands) -> tuple[Target, ...]:
    """Return the targets of an inventory, in its order.

    Args:
        path: text file with one `user@host:DIR` a line; # begins a comment.
        commands: shared by all targets, so that an interrupt ends their commands.

    Raises:
        EdgeLLMError: the file is missing or has no device, a line is invalid, or a device is
            listed twice.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise EdgeLLMError(f"{path} is not text", hint=_FORM) from None
    except OSError as error:
        raise EdgeLLMError(f"--fleet {path}: {error.strerror}", hint=_FORM) from None
    found: dict[Target, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        target = _target(text, f"{path}, line {number}")
        if target in found:
            raise EdgeLLMError(
                f"{path}, line {number}: {text} is listed already, in line {found[target]}",
                hint="write one line per device",
            )
        found[target] = number
    if not found:
        raise EdgeLLMError(f"{path} lists no device", hint=_FORM)
    return tuple(
        dataclasses.replace(target, is_one_of_many=True, commands=commands) for target in found
    )


def _target(text: str, place: str) -> Target:
    if len(text.split()) > 1:
        raise EdgeLLMError(f"{place}: {text} is more than one word", hint=_FORM)
    try:
        return parse(text)
    except EdgeLLMError as error:
        raise EdgeLLMError(f"{place}: {error}", hint=_FORM) from None


def share(text: str, total: int) -> int:
    """Return the number of devices for "3" or "10%" of `total`: at least one, at most all.

    Raises:
        EdgeLLMError: `text` is neither.
    """
    digits = text.removesuffix("%")
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise EdgeLLMError(f"--canary {text}", hint="give a number of devices, or a share: 10%")
    number = int(digits)
    if text.endswith("%"):
        number = -(-total * number // 100)
    return min(number, total)
