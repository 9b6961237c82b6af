"""The grammar of an answer that must be a call, for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.closed_schema import closed
from edgellm.device_runtime.sampling.guidance import JSON_FORM


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes calls; NAME stands for the function's name."""

    before: str  # a call's arguments
    behind: str
    between: str | None  # two calls; None: an answer has one
    opening: str = ""  # of an answer
    closing: str = ""
    marks: tuple[str, ...] = ()  # parts of these texts that may be tokens of their own

    @classmethod
    def json_list(cls, opening: str, closing: str) -> CallForm:
        """A JSON list of objects of name and arguments between two marks."""
        before = '{"name": "NAME", "arguments": '
        marks = (opening, closing)
        return cls(before, "}", ", ", f"{opening}[", f"]{closing}", marks)


def forced_calls(
    form: CallForm,
    schemas: Mapping[str, dict[str, Any] | None],
    *,
    marks: Mapping[str, int],
    several: bool,
) -> str:
    """A Lark grammar of one call, or of several.

    Args:
        form: of the model's family.
        schemas: the schemas of the arguments by the functions' names.
        marks: the token ids of those of `form.marks` that are tokens.
        several: whether more than one call may be made.

    Raises:
        RequestError: the arguments of a function are no object.
    """
    more = ""
    if several and form.between is not None:
        more = f" ({_expression(form.between, marks)} call)*"
    opening, closing = (_expression(text, marks) for text in (form.opening, form.closing))
    lines = [
        f"start: {opening} call{more} {closing}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(schemas))),
    ]
    behind = _expression(form.behind, marks)
    for index, (name, schema) in enumerate(schemas.items()):
        before = _expression(form.before.replace("NAME", name), marks)
        lines.append(f"call_{index}: {before} arguments_{index} {behind}")
        lines.append(f"arguments_{index}: %json {json.dumps(_arguments(name, schema))}")
    return "\n".join(lines)


def _expression(text: str, marks: Mapping[str, int]) -> str:
    """A text in Lark's syntax; llguidance takes a token of its own for no text."""
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts)


def _arguments(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of an object that has no more than its named properties, unless it says so."""
    if not schema:
        schema = {"properties": {}}
    if schema.get("type", "object") != "object":
        raise RequestError(f"tools: the parameters of {name} must be an object")
    return {**closed({"type": "object", **schema}), "x-guidance": JSON_FORM}
