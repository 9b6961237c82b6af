"""Tool calls in Python syntax, which is parsed and never executed."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from edgellm.tools.serve.tool_calls.parser import Call, NoCall, Tools
from edgellm.tools.serve.tool_calls.python_repair import repaired
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_LONGEST = 1 << 16  # characters
_JSON_NAMES = {"true": True, "false": False, "null": None}


class TaggedPythonParser(TaggedParser):
    """Calls in Python syntax between tags; JSON works there, too."""

    def _calls(self, text: str) -> tuple[list[Call], str]:
        if text.lstrip().startswith(("[{", "{")):
            return json_calls(text, self._tools)
        calls, others = some_python_calls(text, self._tools)
        if others and not calls:
            raise ValueError("no call can be read")
        return calls, ", ".join(others)


def python_calls(text: str, tools: Tools) -> list[Call]:
    """The calls of a text: one a line or a list, with or without `print(...)`.

    Raises one of `NoCall`.
    """
    calls, others = some_python_calls(text, tools)
    if others:
        raise ValueError("a call cannot be read")
    return calls


def some_python_calls(text: str, tools: Tools) -> tuple[list[Call], list[str]]:
    """The calls of a text, and the source of those that have no values or no function here.

    Raises one of `NoCall`.
    """
    if len(text) > _LONGEST:
        raise ValueError("too long to be read")
    text = text.strip()
    try:
        nodes = _nodes(text)
    except (SyntaxError, ValueError):
        text = repaired(text)
        nodes = _nodes(text)
    found = [(node, _call_or_none(node, tools)) for node in nodes]
    others = [ast.get_source_segment(text, node) or text for node, call in found if call is None]
    return [call for _, call in found if call is not None], others


def _call_or_none(node: ast.Call, tools: Tools) -> Call | None:
    try:
        return _call(node, tools)
    except NoCall:
        return None


def _nodes(text: str) -> list[ast.Call]:
    found: list[ast.Call] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntaxWarning)  # of escapes that Python does not have
        warnings.simplefilter("error", DeprecationWarning)  # the same before Python 3.12
        statements = ast.parse(text).body
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            raise TypeError("no call")
        listed = isinstance(statement.value, (ast.List, ast.Tuple))
        for node in statement.value.elts if listed else [statement.value]:  # type: ignore[attr-defined]
            if not isinstance(node, ast.Call):
                raise TypeError("no call")
            found.append(node)
    return found


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
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
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
