r"""Character classes of regular expressions: `\d`, `\w` and `\s` are ASCII, as with re.ASCII.

llguidance reads regular expressions as Rust's regex crate does, where these classes are Unicode.
The pattern of a JSON schema needs no rewriting: llguidance reads it by ECMA-262.
"""

from __future__ import annotations

import re

from edgellm.core.errors import RequestError

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0b\x0c\r\x20"}
# An escape, and the brackets of classes; a ] that begins a class is a character of it.
_PART = re.compile(r"\\(?P<escaped>.?)|(?P<open>\[\^?\]?)|(?P<close>\])", re.DOTALL)
# Strings, comments, special tokens and regular expressions of Lark, as llguidance's lexer reads it.
_LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|<[^<>\s]+>|/(?P<regex>(?:\\.|[^/\\])+)/', re.DOTALL
)


def with_ascii_classes(regex: str) -> str:
    r"""A regular expression whose \d, \w, \s and their complements are ASCII, at any place.

    Raises:
        RequestError: it has a word boundary, which cannot be guided, or ends with a backslash.
    """
    depth = 0

    def rewritten(part: re.Match[str]) -> str:
        nonlocal depth
        depth = max(0, depth + (part["open"] is not None) - (part["close"] is not None))
        escaped = part["escaped"]
        if escaped is None:
            return part[0]
        if not escaped:  # llguidance reads it as nothing
            raise RequestError(
                "the regex of the answer is faulty: it ends with a backslash",
                hint=r"write \\ for a backslash",
            )
        if escaped == "b" and depth:
            return r"\x08"
        if escaped in ("b", "B"):
            raise RequestError(
                f"the regex of the answer is faulty: \\{escaped} at character {part.start()}: "
                "word boundaries are not supported",
                hint="leave it out: the regex always matches the whole output",
            )
        ranges = _CLASSES.get(escaped.lower())
        if ranges is None:
            return part[0]
        return f"[{ranges}]" if escaped.islower() else f"[^{ranges}]"

    return _PART.sub(rewritten, regex)


def with_ascii_lark(grammar: str) -> str:
    """A Lark grammar with its regular expressions rewritten likewise; raises `RequestError`."""

    def rewritten(part: re.Match[str]) -> str:
        if part["regex"] is None:
            return part[0]
        flags = part.end("regex")
        return f"/{with_ascii_classes(part['regex'])}{part.string[flags : part.end()]}"

    return _LARK.sub(rewritten, grammar)
