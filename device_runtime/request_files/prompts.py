"""Requests of `llm_inference --prompt`, with the text of standard input."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence
from typing import Any

import typer

from edgellm.core.errors import RequestError

STDIN = "-"  # the prompt that is standard input
_NOTE_AFTER_S = 2.0


def requests_of(prompts: Sequence[str]) -> list[Any]:
    """One raw request for each prompt; piped text follows each after an empty line.

    Raises:
        RequestError: a prompt is empty, or standard input is not UTF-8.
    """
    piped = _piped_text(is_asked=STDIN in prompts)
    texts = [piped if one == STDIN else _joined(one, piped) for one in prompts]
    if not all(texts):
        raise RequestError("the prompt is empty", hint="give a text to --prompt, or pipe one")
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def _joined(prompt: str, piped: str) -> str:
    return f"{prompt}\n\n{piped}" if prompt and piped else prompt or piped


def _piped_text(*, is_asked: bool) -> str:
    """The text of standard input if it is a pipe or file, or asked for; "" otherwise."""
    number = sys.stdin.fileno()
    mode = os.fstat(number).st_mode
    is_piped = stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    if not (is_piped or is_asked):
        return ""
    if not select.select([number], [], [], _NOTE_AFTER_S)[0]:
        typer.echo("note: reading standard input to its end; < /dev/null skips it", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: byte {error.start}") from None
