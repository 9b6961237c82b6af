"""Strict JSON parser for files of users: a duplicate key in an object is an error.

Python silently takes the last of them, which may be the wrong one. Standard
library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")
_SPACE, _NEXT = re.compile(r"\s*"), re.compile(r"[\s:,]*")
BOM = "\ufeff"
_MAX_DEPTH = 256  # of objects and lists; newer releases of Python parse thousands
_DECODER = json.JSONDecoder()


class DuplicateKeyError(ValueError):
    """A key is given twice in one object."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; a byte order mark before it, as Windows writes it, is ignored.

    Raises:
        DuplicateKeyError: with the key's path from the top, $.
        ValueError: as `json.loads`, or objects and lists are nested too deeply.
    """
    twice: dict[int, str] = {}  # by the identity of the object; all of them live until the end
    kept: list[dict[str, Any]] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice[id(found)] = next(key for key, _ in pairs if key in seen or seen.add(key))
            kept.append(found)
        return found

    if isinstance(text, str):
        text = text.removeprefix(BOM)
    try:
        value = json.loads(text, object_pairs_hook=collect)
        _require_depth(value)
    except RecursionError:
        raise ValueError("objects and lists are nested too deeply") from None
    if twice:
        raise DuplicateKeyError(f"the key {_find(value, twice)} is there twice")
    return value


def _require_depth(value: Any) -> None:
    """Raise RecursionError for a value that code would not walk through."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        level = [
            below
            for one in level
            for below in (one.values() if isinstance(one, dict) else one)
            if isinstance(below, (dict, list))
        ]
        if not level:
            return
    raise RecursionError


def _find(value: Any, twice: dict[int, str]) -> str:
    """The path of the first key; for one in a replaced value, the path of the key above it."""
    left: list[tuple[str, Any]] = [("$", value)]
    while left:
        path, found = left.pop()
        if isinstance(found, dict):
            if id(found) in twice:
                return path + _step(twice[id(found)])
            left += [(path + _step(key), below) for key, below in reversed(found.items())]
        elif isinstance(found, list):
            left += [(f"{path}[{at}]", below) for at, below in reversed([*enumerate(found)])]
    raise AssertionError("every object with such a key is below the top or displaced by another")


def line_of(text: str, path: str) -> int:
    """The line, from 1, of a value in a JSON text, or of the last step of its path that exists.

    Args:
        text: the JSON, which parses.
        path: from the top, as in "$.requests[0].messages".
    """
    text = text.removeprefix(BOM)
    begin, at = 0, _SPACE.match(text).end()  # type: ignore[union-attr]  # it matches anything
    for key, index in _STEPS.findall(path):
        found = _entries(text, at)
        wanted = key if key else int(index)
        place = next((one for one in found if one[0] == wanted), None)
        if place is None:
            break
        _, begin, at = place
    return text.count("\n", 0, begin) + 1


def _entries(text: str, at: int) -> Iterator[tuple[str | int, int, int]]:
    """Keys or indices of an object or list at `at`: each with its begin, and its value's."""
    is_object, count = text[at : at + 1] == "{", 0
    if not is_object and text[at : at + 1] != "[":
        return
    at = _NEXT.match(text, at + 1).end()  # type: ignore[union-attr]
    while at < len(text) and text[at] not in "}]":
        begin, key = at, count
        if is_object:
            key, at = _DECODER.raw_decode(text, at)
            at = _NEXT.match(text, at).end()  # type: ignore[union-attr]
        yield key, begin, at
        at = _NEXT.match(text, _DECODER.raw_decode(text, at)[1]).end()  # type: ignore[union-attr]
        count += 1


def _step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"
