"""Argument values that a model writes as bare text: their schema says what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}
# Names of other languages, which JSON Schema does not have but clients send.
_OTHER_NAMES = {
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "str": "string",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}
_MAX_DEPTH = 32  # references and alternatives inside each other


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument's text.

    The first type that fits is chosen; any text is a string. Text of the other types is JSON, or a
    constant of Python, since templates write `True` and `None`. Text that fits no type, or has no
    schema, stays a string.

    Args:
        text: what stands between the argument's tags.
        schema: of the argument; None: unknown.
        root: schema of all arguments, which `$ref` refers to.
    """
    types = list(types_of(schema, root))
    found = _parsed(text.strip())
    if found is None and "null" in types:
        return None
    for name in types:
        if name == "string":
            return text
        if name == "integer" and isinstance(found, float) and found.is_integer():
            return int(found)
        if type(found) in _TYPES.get(name, ()):
            return found
    return text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the types that a schema allows, through references and alternatives."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    reference, named = schema.get("$ref"), schema.get("type")
    if isinstance(reference, str):
        yield from types_of(target_of(reference, root), root, depth + 1)
    if isinstance(named, (str, list)):
        names = [named] if isinstance(named, str) else named
        yield from (_OTHER_NAMES.get(name, name) for name in names if isinstance(name, str))
    else:
        constants = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        yield from (
            name for one in constants for name, kinds in _TYPES.items() if type(one) in kinds
        )
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            yield from types_of(part, root, depth + 1)


def target_of(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference inside a document names; None if it names none."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for name in reference[1:].split("/")[1:]:
        if not isinstance(node, Mapping):
            return None
        node = node.get(name.replace("~1", "/").replace("~0", "~"))
    return node


def _parsed(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(found, float) and not math.isfinite(found) else found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
