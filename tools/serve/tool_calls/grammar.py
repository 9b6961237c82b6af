"""The grammar of an answer that must be a call, for llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.contract import RequestError
from edgellm.device_runtime.guidance import JSON_FORM


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes calls; NAME stands for the function's name."""

    before: str  # a call's arguments
    behind: str
    between: str  # two calls
    opening: str = ""
    closing: str = ""
    mark: str = ""  # what opens an answer of calls, if it is a special token


def forced_calls(
    form: CallForm,
    schemas: Mapping[str, dict[str, Any] | None],
    *,
    mark_id: int | None,
    several: bool,
) -> str:
    """A Lark grammar of one call, or of several.

    Args:
        form: of the model's family.
        schemas: the schemas of the arguments by the functions' names.
        mark_id: the token id of `form.mark`.
        several: whether more than one call may be made.

    Raises:
        RequestError: the arguments of a function are no object.
    """
    more = f" ({_quoted(form.between)} call)*" if several else ""
    start = f"{_quoted(form.opening)} call{more} {_quoted(form.closing)}"
    if mark_id is not None:
        start = f'<[{mark_id}]> " "? {start}'
    lines = [
        f"start: {start}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(schemas))),
    ]
    for index, (name, schema) in enumerate(schemas.items()):
        before = _quoted(form.before.replace("NAME", name))
        lines.append(f"call_{index}: {before} arguments_{index} {_quoted(form.behind)}")
        lines.append(f"arguments_{index}: %json {json.dumps(_arguments(name, schema))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _arguments(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of an object that has no more than its named properties, unless it says so."""
    if not schema:
        schema = {"properties": {}}
    if schema.get("type", "object") != "object":
        raise RequestError(f"tools: the parameters of {name} must be an object")
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closed, **schema, "x-guidance": JSON_FORM}
