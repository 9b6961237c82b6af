"""Mends calls in Python syntax that a model wrote with slips, so that Python can parse them.

Models write shell commands and files into strings as they are: with line breaks, and with quotes of
the string's own kind. They also write integers with leading zeros.
"""

from __future__ import annotations

import re

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_PIECE = re.compile(
    r"(?P<escape>\\(?:[\\'\"abfnrtv]|[0-7]{1,3}|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}))|(?s:.)"
)
_ITEM = re.compile(
    r"\s*(?:[A-Za-z_][\w.-]*\s*[=(]|['\"\[{(\-\d]|True|False|None|true|false|null|$)"
)
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d+(?![\w.]))")
_SPACE = re.compile(r"\s*")


def repaired(text: str) -> str:
    """Return the text with escaped strings and plain integers.

    A quote ends its string if what follows fits the open brackets: closing brackets in their order,
    then a comma with another item, or the end; after a key, a colon. Raises ValueError for a string
    without an end.
    """
    parts: list[str] = []
    stack: list[str] = []
    at = 0
    while at < len(text):
        character = text[at]
        if character in "'\"":
            end = _end_of_string(text, at, stack)
            parts.append(f"{character}{_escaped(text[at + 1 : end], character)}{character}")
            at = end + 1
            continue
        if character in _CLOSING:
            stack.append(_CLOSING[character])
        elif stack and character == stack[-1]:
            stack.pop()
        begin = at
        while at < len(text) and text[at] not in "'\"()[]{}":
            at += 1
        at = max(at, begin + 1)
        parts.append(_LEADING_ZEROS.sub("", text[begin:at]))
    return "".join(parts)


def _end_of_string(text: str, begin: int, stack: list[str]) -> int:
    """Return the offset of the quote that ends the string that begins at an offset."""
    at = begin + 1
    while at < len(text):
        if text[at] == text[begin] and _fits(text, at + 1, stack):
            return at
        at += 2 if text[at] == "\\" else 1
    raise ValueError("a string without an end")


def _fits(text: str, at: int, stack: list[str]) -> bool:
    """Whether the text at an offset may follow a string inside the open brackets."""
    at, is_closed = _after_space(text, at), False
    for closing in reversed(stack):
        if not text.startswith(closing, at):
            break
        at, is_closed = _after_space(text, at + 1), True
    if at == len(text):
        return True
    if text[at] == ",":
        return _ITEM.match(text, at + 1) is not None
    if text[at] == ":":
        return not is_closed and bool(stack) and stack[-1] == "}"
    return False


def _escaped(text: str, quote: str) -> str:
    """Return the content of a string in Python's notation; valid escapes stay."""
    parts: list[str] = []
    for piece in _PIECE.finditer(text):
        character = piece[0]
        if piece["escape"] is None and character in ("\\", quote):
            character = "\\" + character
        elif piece["escape"] is None and not character.isprintable():
            character = repr(character)[1:-1]
        parts.append(character)
    return "".join(parts)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
