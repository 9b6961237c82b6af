"""JSON schemas whose objects have no keys but the declared ones, unless the schema says otherwise.

A schema without `additionalProperties` allows any further key, and a model then invents keys up to
`max_tokens`. As in llama.cpp, objects that declare `properties` are closed. Parts that describe
one object (`allOf`, `$ref` or `anyOf` with siblings) are closed together: closed one by one, each
would forbid the properties of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from edgellm.core.errors import RequestError

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ALTERNATIVES = ("anyOf", "oneOf")
_COMPOSED = ("$ref", "allOf", *_ALTERNATIVES)
_DATA = ("const", "enum", "default", "examples", "example", "required", "type", "x-guidance")
_CONDITIONS = ("not", "if", "then", "else")  # schemas that an output need not match
_RESTRICTIONS = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
)
_MAX_WORK = 1 << 22  # characters of names that are gathered: 1 MB of schema can ask for 100 GB


@dataclass(slots=True)
class _Facts:
    """Properties of one object, gathered from the parts of a schema."""

    names: dict[str, None] = field(default_factory=dict)  # in order
    declares: bool = False  # whether a part has `properties`
    is_restricted: bool = False  # whether a part restricts other keys

    def add(self, other: _Facts) -> None:
        """Merge the properties of another part."""
        self.names |= other.names
        self.declares |= other.declares
        self.is_restricted |= other.is_restricted


def closed(schema: Any) -> Any:
    """A copy of a schema, which is parsed JSON, with its objects closed.

    Raises:
        RequestError: it is nested too deeply, or its alternatives have too many properties.
    """
    try:
        return _Closer(schema).whole()
    except RecursionError:
        raise RequestError("the schema of the answer is nested too deeply") from None


class _Closer:
    """Closes one schema."""

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, _MAX_WORK
        self._opened: dict[str, str] = {}  # by reference the definition of its target, not closed
        self._definitions: dict[str, Any] = {}
        self._named = {name: node for node in _objects(root) for name in _names_of(node)}

    def whole(self) -> Any:
        """The root, with definitions for the references to targets that are not closed."""
        found = self._close(self._root, _Facts())
        if self._definitions:
            found["$defs"] = {**(found.get("$defs") or {}), **self._definitions}
        return found

    def _close(self, node: Any, outer: _Facts) -> Any:
        """A closed copy; `outer` are the properties of the same object in other parts."""
        if not isinstance(node, dict):
            return node
        node = self._without_one_of(node)
        found = self._children(node)
        if _is_wrapper(node) and not outer.names:
            return found | self._members(node, _ALTERNATIVES, outer) | self._wrapped(node)
        facts = _Facts({**outer.names}, outer.declares, outer.is_restricted)
        facts.add(self._facts(node, set(), but=_ALTERNATIVES))
        found |= self._open_parts(node)
        kinds = [kind for kind in _ALTERNATIVES if isinstance(node.get(kind), list)]
        if len(kinds) == 1:
            return found | self._members(node, kinds, facts)
        for kind in kinds:
            found[kind] = [self._open(each) for each in node[kind]]
            for each in node[kind]:
                facts.add(self._facts(each, set()))
        return self._with_end(found, facts)

    def _without_one_of(self, node: dict[str, Any]) -> dict[str, Any]:
        """A discriminated union as `anyOf`: llguidance cannot see that references exclude."""
        parts, tag = node.get("oneOf"), node.get("discriminator")
        if not isinstance(parts, list) or not parts or "anyOf" in node:
            return node
        targets = [self._part(each) for each in parts]
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        names = [name] if isinstance(name, str) else _required(targets[0])
        if not (common := next((one for one in names if _are_tagged(targets, one)), None)):
            return node
        parts = [{**each, "required": [*_required(each), common]} for each in parts]
        return {key: value for key, value in node.items() if key != "oneOf"} | {"anyOf": parts}

    def _part(self, node: Any) -> dict[str, Any]:
        """A part of a union, or the target of its reference."""
        found = self._target(node["$ref"]) if isinstance(node, dict) and "$ref" in node else node
        return found if isinstance(found, dict) else {}

    def _with_end(self, node: dict[str, Any], facts: _Facts) -> dict[str, Any]:
        """A schema that allows only the known properties, unless it allows others."""
        fewest = node.get("minProperties", 0)
        if not facts.declares or facts.is_restricted or not _may_be_object(node):
            return node
        if isinstance(fewest, (int, float)) and fewest > len(facts.names):
            return node
        own = node.get("properties", {})
        self._pay(facts.names)
        known = {**own, **{name: True for name in facts.names if name not in own}}
        return {**node, "properties": known, "additionalProperties": False}

    def _open(self, node: Any) -> Any:
        """A copy that is not closed itself, while the objects inside are."""
        if not isinstance(node, dict):
            return node
        found = self._children(node) | self._open_parts(node)
        for kind in _ALTERNATIVES:
            if isinstance(node.get(kind), list):
                found[kind] = [self._open(each) for each in node[kind]]
        return found

    def _open_parts(self, node: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "allOf" in node:
            parts = node["allOf"]
            found["allOf"] = [*map(self._open, parts)] if isinstance(parts, list) else parts
        if "$ref" in node:
            found["$ref"] = self._opened_reference(node["$ref"])
        return found

    def _opened_reference(self, reference: Any) -> Any:
        target = self._target(reference)
        if not isinstance(target, dict):
            return reference
        if reference not in self._opened:
            name = self._opened[reference] = f"edgellm.open.{len(self._opened)}"
            self._definitions[name] = self._open(target)  # which may refer to itself
        return f"#/$defs/{self._opened[reference]}"

    def _wrapped(self, node: dict[str, Any]) -> dict[str, Any]:
        """The single part of a schema without other properties of the object."""
        found = {"$ref": node["$ref"]} if "$ref" in node else {}
        if "allOf" in node:
            found["allOf"] = [self._close(each, _Facts()) for each in node["allOf"]]
        return found

    def _members(
        self, node: dict[str, Any], kinds: tuple[str, ...] | list[str], facts: _Facts
    ) -> dict[str, Any]:
        return {
            kind: [self._close(each, facts) for each in node[kind]]
            for kind in kinds
            if isinstance(node.get(kind), list)
        }

    def _children(self, node: dict[str, Any]) -> dict[str, Any]:
        """A copy in which schemas of other values than the object itself are closed."""
        return {key: self._child(key, value) for key, value in node.items()}

    def _child(self, key: str, value: Any) -> Any:
        if key in _DATA or key in _COMPOSED or key in _CONDITIONS:
            return value
        if key in _MAPS and isinstance(value, dict):
            return {name: self._close(each, _Facts()) for name, each in value.items()}
        if isinstance(value, list):
            return [self._close(each, _Facts()) for each in value]
        return self._close(value, _Facts())

    def _facts(self, node: Any, seen: set[str], but: tuple[str, ...] = ()) -> _Facts:
        """Properties of one object in a schema and its parts; `but` are parts to leave out."""
        found = _Facts()
        if not isinstance(node, dict):
            return found
        for key in ("properties", "required"):
            if isinstance(node.get(key), (dict, list)):
                found.names |= {name: None for name in node[key] if isinstance(name, str)}
        self._pay(found.names)
        found.declares = isinstance(node.get("properties"), dict)
        found.is_restricted = any(key in node for key in _RESTRICTIONS)
        for kind in ("allOf", *_ALTERNATIVES):
            if kind not in but and isinstance(node.get(kind), list):
                for each in node[kind]:
                    found.add(self._facts(each, seen))
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            target = self._target(reference)
            found.is_restricted |= target is None  # external schemas are unknown
            found.add(self._facts(target, seen | {reference}))
        return found

    def _pay(self, names: dict[str, None]) -> None:
        self._left -= 1 + sum(map(len, names))
        if self._left < 0:
            raise RequestError(
                "the schema of the answer has too many properties in too many alternatives",
                hint='say "additionalProperties": false in each of its objects',
            )

    def _target(self, reference: Any) -> Any:
        """The target of a reference inside the schema; None if it is missing."""
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            return self._named.get(reference) if isinstance(reference, str) else None
        node = self._root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                return None
        return node


def _are_tagged(parts: list[dict[str, Any]], name: str) -> bool:
    """Whether each part requires a property with its own values, or a tag."""
    found: list[str] = []
    for part in parts:
        properties = part.get("properties")
        values = properties.get(name) if isinstance(properties, dict) else None
        if not isinstance(values, dict) or not {"const", "enum"} & values.keys():
            return False
        listed = values["enum"] if "enum" in values else [values["const"]]
        found += map(json.dumps, listed if isinstance(listed, list) else [])
    return len(set(found)) == len(found)


def _required(node: dict[str, Any]) -> list[str]:
    names = node.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _is_wrapper(node: dict[str, Any]) -> bool:
    """Whether at most one part of a schema describes the object."""
    if any(key in node for key in ("properties", "required", "minProperties", *_RESTRICTIONS)):
        return False
    parts = node.get("allOf", [])
    if not isinstance(parts, list):
        return False
    alternatives = [node[kind] for kind in _ALTERNATIVES if kind in node]
    return len(parts) + ("$ref" in node) + len(alternatives) <= 1


def _may_be_object(node: dict[str, Any]) -> bool:
    kinds = node.get("type", "object")
    is_listed = "enum" in node or "const" in node
    return not is_listed and "object" in ([kinds] if isinstance(kinds, str) else kinds)


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _names_of(node: dict[str, Any]) -> Iterator[str]:
    """References to a schema, besides its path."""
    for key, prefix in (("$anchor", "#"), ("$id", "")):
        if isinstance(node.get(key), str):
            yield prefix + node[key]
