"""Ways to break a file: its bytes, its JSON, its place in the file system."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEPTH = 100_000
_HUGE = (2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    *_HUGE,
    "",
    "x",
    "4",
    "\0",
    "\ud800",
    "é" * 3000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    ["x", 1],
    [0] * 5000,
)


# ------------------------------------------------------------------------------------ bytes
def _cut(data: bytearray, rng: random.Random) -> None:
    del data[
        rng.choice([0, 1, 7, 8, len(data) // 2, max(len(data) - 1, 0), rng.randrange(len(data))]) :
    ]


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 4, 32])):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _zero(data: bytearray, rng: random.Random) -> None:
    at, length = _place(data, rng), rng.choice([1, 8, 64, 4096])
    data[at : at + length] = bytes(min(length, len(data) - at))


def _insert(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    data[at:at] = rng.randbytes(rng.choice([1, 8, 1000]))


def _remove(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice([1, 8, 1000])]


def _number(data: bytearray, rng: random.Random) -> None:
    """An invalid length or offset."""
    value, form = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]), rng.choice("IQ")
    size = struct.calcsize(form)
    at = min(_place(data, rng), max(len(data) - size, 0))
    data[at : at + size] = struct.pack(f"<{form}", value % 2 ** (8 * size))


def _junk(data: bytearray, rng: random.Random) -> None:
    data[:] = rng.choice(
        [
            bytes(4096),
            rng.randbytes(4096),
            b"\xff" * 100,
            b"null",
            b"[]",
            b"{}",
            b'""',
            b"\xef\xbb\xbf{}",
        ]
    )


def _nest(data: bytearray, rng: random.Random) -> None:
    data[:] = rng.choice([b"[", b'{"a":']) * DEPTH


def _append(data: bytearray, rng: random.Random) -> None:
    data += rng.choice([b"\0", b"\n", b"}", rng.randbytes(100)])


def _place(data: bytearray, rng: random.Random) -> int:
    """A random position; in every second case one in the header."""
    maximum = len(data) if rng.random() < 0.5 else min(len(data), 1500)
    return rng.randrange(maximum) if maximum else 0


BYTES = {
    "cut": _cut,
    "flip": _flip,
    "zero": _zero,
    "insert": _insert,
    "remove": _remove,
    "number": _number,
    "junk": _junk,
    "nest": _nest,
    "append": _append,
}


def break_bytes(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Break bytes; return the name of the mutation, and the bytes."""
    name = rng.choice(sorted(BYTES))
    changed = bytearray(data)
    if changed:
        BYTES[name](changed, rng)
    return name, bytes(changed)


# ------------------------------------------------------------------------------------ JSON
def break_json(content: Any, rng: random.Random) -> tuple[str, str]:
    """The name of a change, and the text with it."""
    content = json.loads(json.dumps(content))
    places = list(_places(content))
    if not places:
        return "junk", json.dumps(rng.choice(_VALUES))
    parent, key = rng.choice(places)
    kind = rng.choice(["value", "value", "absent", "unknown", "renamed", "deep", "twice", "list"])
    name = f"{kind} {key}" if isinstance(key, str) else kind
    if kind == "absent":
        del parent[key]
    elif kind == "unknown" and isinstance(parent, dict):
        parent[rng.choice(["", "x", "\0", "__class__", "é" * 200])] = rng.choice(_VALUES)
    elif kind == "renamed" and isinstance(parent, dict):
        parent[f"{key} "] = parent.pop(key)
    elif kind == "list":
        parent[key] = [parent[key]]
    elif kind == "deep":
        parent[key] = "@deep@"
    elif kind == "twice" and isinstance(parent, dict):
        parent[f"{key}@twice@"] = rng.choice(_VALUES)
    else:
        value = rng.choice(_VALUES)
        name += f" = {str(value)[:20]!r}"
        parent[key] = value
    text = json.dumps(content).replace("@twice@", "")
    return name, text.replace('"@deep@"', "[" * DEPTH + "]" * DEPTH)


def _places(content: Any, depth: int = 0) -> Any:
    """Every container with a key of it; of long lists the first."""
    pairs = []
    if isinstance(content, dict):
        pairs = list(content.items())[:400]
    elif isinstance(content, list):
        pairs = list(enumerate(content))[:20]
    for key, value in pairs:
        yield content, key
        if depth < 6:
            yield from _places(value, depth + 1)


def break_safetensors(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A changed header before the same tensors."""
    size = struct.unpack("<Q", data[:8])[0]
    name, text = break_json(json.loads(data[8 : 8 + size]), rng)
    header = text.encode("utf-8", "surrogatepass")
    return f"header: {name}", struct.pack("<Q", len(header)) + header + data[8 + size :]


# ----------------------------------------------------------------------------- file system
def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _parent(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent, target_is_directory=True)


def _other(path: Path) -> None:
    """The content of another file of the folder."""
    others = [one for one in path.parent.iterdir() if one.is_file() and one != path]
    if others:
        shutil.copyfile(max(others, key=lambda one: one.stat().st_size), path)


PLACES: dict[str, Callable[[Path], None]] = {
    "absent": Path.unlink,
    "folder": _folder,
    "loop": _loop,
    "pipe": _pipe,
    "nowhere": _nowhere,
    "endless": _endless,
    "parent": _parent,
    "other": _other,
}


def break_file(path: Path, rng: random.Random) -> str:
    """Break a file in place; return how."""
    ways = ["bytes", "bytes", "bytes", "place"]
    if path.suffix == ".json":
        ways += ["json"] * 4
    elif path.suffix == ".safetensors":
        ways += ["header"] * 3
    way = rng.choice(ways)
    if way == "place":
        name = rng.choice(sorted(PLACES))
        PLACES[name](path)
        return name
    if way == "json":
        name, text = break_json(json.loads(path.read_text("utf-8")), rng)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return name
    breaker = break_safetensors if way == "header" else break_bytes
    name, data = breaker(path.read_bytes(), rng)
    path.write_bytes(data)
    return name
