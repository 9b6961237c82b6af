"""Test programs from answers to HumanEval."""

from __future__ import annotations

import re
import textwrap

_FENCE = re.compile(r"```[ \t]*(?:[\w+-]*)[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


def program(prompt: str, answer: str, entry_point: str, test: str) -> str:
    """Join prompt, answer and test to a program that fails if the answer is wrong.

    The code is the first fenced block that defines the function, else the first block, else the
    whole answer. Code that defines the function is appended to the prompt, for its imports. Other
    code becomes the function's body: it is indented if needed, and ends before the first
    unindented line.
    """
    code = _code(answer, entry_point)
    if not _defines(code, entry_point):
        code = _body(code)
    return f"{prompt.rstrip()}\n{code}\n\n{test}\n\ncheck({entry_point})\n"


def _defines(code: str, entry_point: str) -> bool:
    return re.search(rf"^def\s+{re.escape(entry_point)}\s*\(", code, re.MULTILINE) is not None


def _code(answer: str, entry_point: str) -> str:
    blocks = _FENCE.findall(answer)
    defining = [block for block in blocks if _defines(block, entry_point)]
    return next(iter((*defining, *blocks)), answer)


def _body(code: str) -> str:
    lines = code.strip("\n").splitlines()
    if not lines or not lines[0][:1].isspace():
        return textwrap.indent("\n".join(lines), "    ")
    inside = [not line.strip() or line[0].isspace() for line in lines]
    end = inside.index(False) if False in inside else len(lines)
    return "\n".join(lines[:end])
