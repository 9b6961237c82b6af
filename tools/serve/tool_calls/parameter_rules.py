"""Grammar rules of calls whose arguments stand one by one, as text between tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.device_runtime.sampling.closed_schema import closed
from edgellm.device_runtime.sampling.free_text import expression, up_to
from edgellm.device_runtime.sampling.guidance import JSON_FORM
from edgellm.tools.serve.tool_calls.typed_values import target_of, types_of, value_of

_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_VALUE = {"type", "enum", "const"}
_KEY = r"/[^<>\n]+/"  # of an argument that the schema does not name
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterForm:
    """Format of a call whose arguments stand one by one; NAME and KEY are replaced."""

    before: str  # text before the arguments
    opening: str  # text before a value
    closing: str  # ends a value, which does not contain it
    between: str  # text after the end of a value
    after: str  # text after the arguments


def parameter_rules(
    form: ParameterForm, rule: str, schema: Mapping[str, Any], marks: Mapping[str, int]
) -> list[str] | None:
    """Return the lines of a rule for the arguments of a function.

    Arguments stand in the order of the schema. Strings are free text up to the closing tag.

    Args:
        form: format of the arguments.
        rule: name of the rule, and start of the names of those that it needs.
        schema: of the arguments.
        marks: token ids of the parts of the format that are special tokens.

    Returns:
        The lines, or None: text between tags cannot keep the schema, such as a string's pattern.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", "properties" not in schema)
    is_plain = isinstance(properties, dict) and isinstance(required, list)
    if not is_plain or not isinstance(others, bool) or schema.keys() - _OBJECT - _NOTES:
        return None
    if not {name for name in required if isinstance(name, str)} <= properties.keys():
        return None
    lines, parts = [], []
    for index, (key, own) in enumerate(properties.items()):
        name = f"{rule}_{index}"
        value = _value(form, name, own, schema, marks)
        if value is None or any(character in key for character in "<>\n"):
            return None
        opening = expression(form.opening.replace("KEY", key), marks)
        lines += [f"{name}: {opening} {value[0]} {expression(form.between, marks)}", *value[1:]]
        parts.append(name if key in required else f"{name}?")
    if others:
        parts.append(f"{rule}_other*")
        before, after = (expression(text, marks) for text in form.opening.split("KEY"))
        value = _text(form, f"{rule}_other", marks)
        opening = f"{before} {_KEY} {after}"
        lines += [
            f"{rule}_other: {opening} {value[0]} {expression(form.between, marks)}",
            *value[1:],
        ]
    return [f"{rule}: {' '.join(parts) or json.dumps('')}", *lines]


def _value(
    form: ParameterForm,
    rule: str,
    schema: Any,
    root: Mapping[str, Any],
    marks: Mapping[str, int],
) -> list[str] | None:
    """The expression of a value with its closing tag, and the lines that it needs."""
    types, closing = set(types_of(schema, root)), expression(form.closing, marks)
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        whole = {**closed({**schema, **definitions}), "x-guidance": JSON_FORM}
        return [f"{rule}_json {closing}", f"{rule}_json: %json {json.dumps(whole)}"]
    parts = [*_parts(schema, root)]
    constants = [_constants(part) for part in parts]
    if any(part.keys() - _VALUE - _NOTES for part in parts):
        return None
    if not any(constants):
        return _text(form, rule, marks)
    texts = []
    for value in (each for one in constants for each in one):
        text = value if isinstance(value, str) else json.dumps(value)
        if form.closing in text or value_of(text, schema, root) != value:
            return None
        texts.append(expression(text, {}))
    return [f"({' | '.join(texts)}) {closing}"] if all(constants) else None


def _text(form: ParameterForm, rule: str, marks: Mapping[str, int]) -> list[str]:
    """Free text up to the closing tag."""
    return [f"{rule}_value", *up_to(f"{rule}_value", form.closing, marks)]


def _parts(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema, without those that are objects of alternatives."""
    if not isinstance(schema, Mapping):
        return
    references = [target_of(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    inner = [*references, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    if not inner or depth > _MAX_DEPTH:
        yield schema
        return
    own = schema.keys() - _NOTES - {"$ref", "anyOf", "oneOf"}
    yield from ({key: schema[key] for key in own},) if own else ()
    for part in inner:
        yield from _parts(part, root, depth + 1)


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists; empty: it lists none."""
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "null":
        return [None]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else []
