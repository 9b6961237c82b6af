"""Tool calls in Python syntax, which is parsed and never executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from edgellm.tools.serve.tool_calls.parser import Call, Tools
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_LONGEST = 1 << 16  # characters
_JSON_NAMES = {"true": True, "false": False, "null": None}


class TaggedPythonParser(TaggedParser):
    """Calls in Python syntax between tags; JSON works there, too."""

    def _calls(self, text: str) -> tuple[list[Call], str]:
        if text.lstrip().startswith(("[{", "{")):
            return json_calls(text, self._tools)
        return python_calls(text, self._tools), ""


def python_calls(text: str, tools: Tools) -> list[Call]:
    """The calls of a text: one a line or a list, with or without `print(...)`.

    Raises one of `NoCall`.
    """
    if len(text) > _LONGEST:
        raise ValueError("too long to be read")
    return [_call(node, tools) for node in _nodes(ast.parse(text.strip()))]


def _nodes(tree: ast.Module) -> Iterator[ast.Call]:
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise TypeError("no call")
        listed = isinstance(statement.value, (ast.List, ast.Tuple))
        for node in statement.value.elts if listed else [statement.value]:  # type: ignore[attr-defined]
            if not isinstance(node, ast.Call):
                raise TypeError("no call")
            yield node


def _call(node: ast.Call, tools: Tools) -> Call:
    name = ast.unparse(node.func)
    if name == "print" and name not in tools and len(node.args) == 1:
        inner = node.args[0]
        if isinstance(inner, ast.Call):
            return _call(inner, tools)
    arguments = {}
    properties = list((tools[name] or {}).get("properties", {}))
    for place, value in zip(properties[: len(node.args)], node.args, strict=True):
        arguments[place] = _value(value)
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = _value(keyword.value)
    return Call.to(tools, name, arguments)


def _value(node: ast.expr) -> Any:
    """A literal, with Python's or JSON's constants."""
    if isinstance(node, ast.Name):
        return _JSON_NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys if key is not None]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys are strings")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise TypeError("no value of JSON")
    return value
