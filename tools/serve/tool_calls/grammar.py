"""Grammars of tool calls, for llguidance: forced calls, and calls in free text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.closed_schema import closed
from edgellm.device_runtime.sampling.free_text import TEXT, earlier_messages, expression, up_to
from edgellm.device_runtime.sampling.guidance import JSON_FORM
from edgellm.tools.serve.tool_calls.parameter_rules import ParameterForm, parameter_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Format of a model family's calls; NAME is replaced by the function's name."""

    before: str  # text before the arguments
    after: str  # text after the arguments
    between: str | None  # text between two calls; None: one call only
    opening: str = ""  # start of the output
    closing: str = ""  # end of the output
    marks: tuple[str, ...] = ()  # parts of these texts that may be special tokens
    tag: str = ""  # begins each block of calls, and nothing else; empty: the format has none
    parameters: ParameterForm | None = None  # of calls whose schema it can keep; None: JSON
    has_channels: bool = False  # a call is a message, and messages of reasoning may precede it

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
            tag=opening,
        )

    def inside_tag(self) -> CallForm:
        """The form of one call whose tag is written."""
        parameters = self.parameters
        if parameters is not None:
            parameters = replace(parameters, before=parameters.before.removeprefix(self.tag))
        before = self.before.removeprefix(self.tag)
        return replace(self, before=before, between=None, parameters=parameters)


def forced_calls(
    form: CallForm,
    schemas: Mapping[str, dict[str, Any] | None],
    *,
    marks: Mapping[str, int],
    several: bool,
    after_messages: bool = False,
) -> str:
    """Create a Lark grammar of one call or several.

    Args:
        form: format of the model family.
        schemas: argument schemas by function name.
        marks: token ids of the `form.marks` that are special tokens.
        several: whether more than one call is allowed.
        after_messages: whether messages in other channels may precede the call.

    Raises:
        RequestError: the arguments of a function are not an object.
    """
    opening, closing = (expression(text, marks) for text in (form.opening, form.closing))
    lines = [f"start: {opening} calls {closing}", TEXT]
    if after_messages:
        lines = [f"start: earlier {opening} calls {closing}", *earlier_messages(marks)]
    return "\n".join(lines + _calls(form, schemas, marks, several=several))


def calls_in_text(
    form: CallForm,
    schemas: Mapping[str, dict[str, Any] | None],
    *,
    marks: Mapping[str, int],
    other_marks: Iterable[int],
) -> str:
    """Create a Lark grammar of free text, in which each call has the form of its schema.

    Args:
        form: format of the model family, with a tag.
        schemas: argument schemas by function name; None: any object.
        marks: token ids of the `form.marks` that are special tokens.
        other_marks: token ids of other special tokens in the text, such as those of reasoning.

    Raises:
        RequestError: the arguments of a function are not an object.
    """
    others = [f"TEXT <[{token_id}]>" for token_id in sorted({*other_marks})]
    block = form.opening.removeprefix(form.tag)
    if not form.opening:  # each call has its own tag
        form = form.inside_tag()
    parts = [expression(text, marks) for text in (block, form.closing)]
    lines = [
        f"start: ({' | '.join(['block', *others])})* TEXT",
        f"block: head {parts[0]} calls {parts[1]}",
        *up_to("head", form.tag, marks),
        TEXT,
    ]
    return "\n".join(lines + _calls(form, schemas, marks, several=True))


def _calls(
    form: CallForm,
    schemas: Mapping[str, dict[str, Any] | None],
    marks: Mapping[str, int],
    *,
    several: bool,
) -> list[str]:
    """Lines of the rule `calls`: one call or several of any function."""
    more = ""
    if several and form.between is not None:
        more = f" ({expression(form.between, marks)} call)*"
    lines = [
        f"calls: call{more}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(schemas))),
    ]
    for index, (name, schema) in enumerate(schemas.items()):
        rule, whole = f"arguments_{index}", _arguments(name, schema)
        inner = None
        if form.parameters is not None and not any(character in name for character in "<>\n"):
            inner = parameter_rules(form.parameters, rule, whole, marks)
        if form.parameters is None or inner is None:
            before, after = form.before, form.after
            inner = [f"{rule}: %json {json.dumps(closed(whole) | {'x-guidance': JSON_FORM})}"]
        else:
            before, after = form.parameters.before, form.parameters.after
        texts = [expression(text.replace("NAME", name), marks) for text in (before, after)]
        lines += [f"call_{index}: {texts[0]} {rule} {texts[1]}", *inner]
    return lines


def _arguments(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of the arguments, an object."""
    if not schema:
        schema = {"properties": {}}
    if schema.get("type", "object") != "object":
        raise RequestError(f"tools: the parameters of {name} must be an object")
    return {"type": "object", **schema}
