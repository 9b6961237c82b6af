"""The errors of all commands, with cause and remedy, from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm.tools.tables import Table, markdown

_CLASSES = (
    *("EdgeLLMError", "UnsupportedModelError", "BrokenArtifactError", "LimitError"),
    *("RequestError", "UnexpectedError"),
)
# Packages of the wheel, in the order of a model's way to a device
_PACKAGES = ("quantize", "export", "build", "device_runtime", "multimodal", "tools", "core")
_OMITTED = "…"  # what only the running program knows

_HEAD = f"""# Errors

An error is one line: `error:` with the cause, and perhaps `hint:` with the remedy. `--debug` shows
where it was raised. Braces are values of the case, and {_OMITTED} is a text that depends on it. The
exit code is 2, for requests of a file 1.

| class in Python | meaning |
|---|---|
| `UnsupportedModelError` | the checkpoint is valid, but edgellm does not support it |
| `BrokenArtifactError` | a checkpoint, bundle or engine is damaged, incomplete or old |
| `LimitError` | memory, disk space, the prompt's length or the KV cache do not suffice |
| `RequestError` | a request is malformed; other requests of the file still run |
| `EdgeLLMError` | all others, and the base of these classes |

Errors without a remedy say in their text what to change.
"""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class ErrorText:
    """An error that the source raises."""

    package: str  # "export", "tools/serve"
    message: str
    hint: str  # "": none
    kind: str  # its class


def error_page(root: Path) -> str:
    """Return Markdown of all errors whose texts are in the source below `root`."""
    found = sorted({*error_texts(root)})
    packages = dict.fromkeys(each.package for each in found)
    parts = [_HEAD]
    for package in sorted(packages, key=lambda name: _PACKAGES.index(name.partition("/")[0])):
        rows = tuple(
            (_code(each.message), _code(each.hint), f"`{each.kind}`")
            for each in found
            if each.package == package
        )
        table = Table(title="", columns=("error", "hint", "class"), rows=rows, is_numeric=False)
        parts.append(f"## {package}\n\n{markdown(table).partition(chr(10) * 2)[2]}")
    return "\n".join(parts)


def error_texts(root: Path) -> Iterator[ErrorText]:
    """Yield the errors of all packages whose message is written where they are made."""
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            folders = path.relative_to(root).parts[:-1]
            name = "/".join(folders[:2]) if package == "tools" else package
            module = ast.parse(path.read_text("utf-8"))
            texts = _Texts(module)
            for call in ast.walk(module):
                if isinstance(call, ast.Call) and (found := texts.error(call, name)) is not None:
                    yield found


class _Texts:
    """The texts of a module's errors, with its constants."""

    def __init__(self, module: ast.Module) -> None:
        self._constants = {
            target.id: each.value.value
            for each in module.body
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)
            for target in each.targets
            if isinstance(target, ast.Name) and isinstance(each.value.value, str)
        }

    def error(self, call: ast.Call, package: str) -> ErrorText | None:
        """The error that a call makes; None for other calls and for texts made elsewhere."""
        kind = call.func.id if isinstance(call.func, ast.Name) else ""
        message = self._text(call.args[0]) if kind in _CLASSES and call.args else _OMITTED
        if not any(letter.isalpha() for letter in message):
            return None
        hint = next((each.value for each in call.keywords if each.arg == "hint"), None)
        remedy = "" if hint is None else self._text(hint)
        return ErrorText(package=package, message=message, hint=remedy, kind=kind)

    def _text(self, node: ast.expr) -> str:
        """A text of the source, with names in braces for values."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.Name):
            return self._constants.get(node.id, _OMITTED)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.FormattedValue):
            return self._value(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self._text(node.value)  # cut where it is too long
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        if isinstance(node, ast.IfExp):
            known = [self._text(node.body), self._text(node.orelse)]
            return _OMITTED if _OMITTED in known or "" in known else " or ".join(known)
        return _OMITTED

    def _value(self, node: ast.expr) -> str:
        """A value in a text: its name, or what is known of it."""
        if isinstance(node, ast.Name) and node.id not in self._constants:
            return f"{{{node.id}}}"
        return f"{{{node.attr}}}" if isinstance(node, ast.Attribute) else self._text(node)


def _code(text: str) -> str:
    """A text as code, in which Markdown and HTML have no meaning."""
    line = " ".join(text.split())
    if "`" in line:
        return f"`` {line} ``"
    return f"`{line}`" if line else ""
