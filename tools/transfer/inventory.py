"""The devices of a fleet, from a file of lines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.transfer.target import Commands, Target, parse

_FORM = "write one device in a line: user@host:models/bundle; # begins a comment"


def read(path: Path, commands: Commands) -> tuple[Target, ...]:
    """The targets of an inventory, in its order.

    Args:
        path: a text file with one `user@host:DIR` in a line; empty lines and what follows a #
            are left out.
        commands: what the targets share, so that an interrupt ends all of them.

    Raises:
        EdgeLLMError: no such file, no device in it, a line that names no folder, a device that is
            there twice.
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
                f"{path}, line {number}: {text} is there already, in line {found[target]}",
                hint="one line for each device",
            )
        found[target] = number
    if not found:
        raise EdgeLLMError(f"{path} names no device", hint=_FORM)
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
    """How many of `total` devices "3" or "10%" are: at least one, at most all.

    Raises:
        EdgeLLMError: it is neither.
    """
    digits = text.removesuffix("%")
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise EdgeLLMError(f"--canary {text}", hint="give a number of devices, or a share: 10%")
    number = int(digits)
    if text.endswith("%"):
        number = -(-total * number // 100)
    return min(number, total)
