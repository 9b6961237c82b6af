"""Strict JSON parser for files of users: a duplicate key in an object is an error.

Python silently takes the last of them, which may be the wrong one. Standard
library only.
"""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """A key is given twice in one object."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

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

    try:
        value = json.loads(text, object_pairs_hook=collect)
    except RecursionError:
        raise ValueError("objects and lists are nested too deeply") from None
    if twice:
        raise DuplicateKeyError(f"the key {_find(value, twice)} is there twice")
    return value


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


def _step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"
