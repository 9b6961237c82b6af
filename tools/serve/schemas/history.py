"""Parts of a conversation that clients send back: outputs of this server, or of another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from edgellm.tools.serve.schemas.response_format import Body

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # what a header may contain
_MAX_NAMES = 32


class Earlier(Body):
    """A part of a conversation: unknown fields are ignored.

    Client libraries send their own objects back, with fields of other servers and of later
    versions. `ignored_fields` names them.
    """

    model_config = ConfigDict(strict=True, extra="allow")


def ignored_fields(body: BaseModel) -> list[str]:
    """Paths of the unknown fields in a conversation, without indices, each once."""
    found: dict[str, None] = {}
    for path in _unknown(body, ""):
        found[path] = None
        if len(found) == _MAX_NAMES:
            break
    return [*found]


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _unknown(each, path)
    elif isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield path + (name if _NAME.fullmatch(name) else "?")
        for name, field in type(value).model_fields.items():
            yield from _unknown(getattr(value, name), f"{path}{field.alias or name}.")
