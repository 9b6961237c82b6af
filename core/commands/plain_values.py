"""Values of flags that are read without pydantic, which takes longer to import than most commands.

Typer reads every value with pydantic, defaults and absent ones as well. Values whose meaning is
plain are read here; all others, wrong ones in particular, are left to typer and its messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

_LEFT = object()  # to typer
_INTEGER, _NUMBER = re.compile(r"-?[0-9]{1,15}"), re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")


def read_plainly(parameters: list[Any]) -> list[Any]:
    """Let typer's parameters read plain values alone; versions without pydantic are unchanged."""
    for one in parameters:
        if hasattr(one, "type_descriptor") and not isinstance(one.get_runtime_param, _Reader):
            one.get_runtime_param = _Reader(one.get_runtime_param)
    return parameters


class _Reader:
    """Stands for typer's reader of one parameter, which is made once a value needs it."""

    def __init__(self, typers: Callable[[], Any]) -> None:
        self._typers = typers

    def __call__(self) -> _Reader:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of the flag, from a text or a default."""
        found = _read(value, param)
        if found is _LEFT:
            return self._typers().coerce(value, param=param, ctx=ctx)
        return found


def _read(value: Any, parameter: Any) -> Any:
    kind, info = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if info.parser is not None:
        return _LEFT
    takes_several = parameter.multiple or parameter.nargs == -1
    if value is None:
        return () if takes_several else None
    if not takes_several:
        return _one(value, kind, info)
    if get_origin(kind) is not list or not isinstance(value, list | tuple):
        return _LEFT
    found = [_one(each, get_args(kind)[0], info) for each in value]
    return _LEFT if _LEFT in found else found


def _one(value: Any, kind: Any, info: Any) -> Any:
    """One value; `_LEFT` if it is not plain."""
    if kind is Path:
        return _path(value, info)
    if kind is str:
        return value if isinstance(value, str) and _is_utf8(value) else _LEFT
    if kind is int or kind is float:
        form = _INTEGER if kind is int else _NUMBER
        if isinstance(value, str) and form.fullmatch(value):
            value = kind(value)
        low, high = info.min, info.max
        is_plain = type(value) is kind and (low is None or value >= low)
        return value if is_plain and (high is None or value <= high) else _LEFT
    return _LEFT


def _path(value: Any, info: Any) -> Any:
    checks = info.exists, info.writable, info.resolve_path, info.allow_dash, info.path_type
    if any(checks) or not (info.file_okay and info.dir_okay):
        return _LEFT
    if not isinstance(value, str | Path) or not _is_utf8(str(value)):
        return _LEFT
    readable = os.access(value, os.R_OK) or not os.path.exists(value)
    return Path(value) if readable else _LEFT


def _is_utf8(text: str) -> bool:
    """Whether a text has no bytes of the command line that are no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
