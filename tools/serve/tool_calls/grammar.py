"""Grammars of forced tool calls, for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.closed_schema import closed
from edgellm.device_runtime.sampling.guidance import JSON_FORM


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Format of a model family's calls; NAME is replaced by the function's name."""

    before: str  # text before the arguments
    after: str  # text after the arguments
    between: str | None  # text between two calls; None: one call only
    opening: str = ""  # start of the output
    closing: str = ""  # end of the output
    marks: tuple[str, ...] = ()  # parts of these texts that may be special tokens

    @classmethod
    def json_list(cls, opening: str, closing: str) -> CallForm:
        """A JSON list of objects with name and arguments between two tags."""
        before = '{"name": "NAME", "arguments": '
        marks = (opening, closing)
        return cls(
            before=before,
            after="}",
            between=", ",
            opening=f"{opening}[",
            closing=f"]{closing}",
            marks=marks,
        )


def forced_calls(
    form: CallForm,
    schemas: Mapping[str, dict[str, Any] | None],
    *,
    marks: Mapping[str, int],
    several: bool,
) -> str:
    """Create a Lark grammar of one call or several.

    Args:
        form: format of the model family.
        schemas: argument schemas by function name.
        marks: token ids of the `form.marks` that are special tokens.
        several: whether more than one call is allowed.

    Raises:
        RequestError: the arguments of a function are not an object.
    """
    more = ""
    if several and form.between is not None:
        more = f" ({_expression(form.between, marks)} call)*"
    opening, closing = (_expression(text, marks) for text in (form.opening, form.closing))
    lines = [
        f"start: {opening} call{more} {closing}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(schemas))),
    ]
    after = _expression(form.after, marks)
    for index, (name, schema) in enumerate(schemas.items()):
        before = _expression(form.before.replace("NAME", name), marks)
        lines.append(f"call_{index}: {before} arguments_{index} {after}")
        lines.append(f"arguments_{index}: %json {json.dumps(_arguments(name, schema))}")
    return "\n".join(lines)


def _expression(text: str, marks: Mapping[str, int]) -> str:
    """A text in Lark's syntax; llguidance needs special tokens as ids."""
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts)


def _arguments(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of the arguments, closed: no additional properties by default."""
    if not schema:
        schema = {"properties": {}}
    if schema.get("type", "object") != "object":
        raise RequestError(f"tools: the parameters of {name} must be an object")
    return {**closed({"type": "object", **schema}), "x-guidance": JSON_FORM}
