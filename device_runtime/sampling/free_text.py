"""Lark grammars of free text before a guided part, for llguidance.

A tag that is a token of the tokenizer matches by its id, special or not; other tags match as text.
A rule with `lazy` ends where its text first does, so that a tag ends the free text before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from edgellm.device_runtime.sampling.params import Channels, Thinking
from edgellm.device_runtime.text.reasoning_marks import CHANNEL, END, MESSAGE, START

TEXT = r"TEXT: /(.|\n)*/"
_GAP = r"GAP: /[ \t\n]*/"


def expression(text: str, marks: Mapping[str, int]) -> str:
    """A text in Lark's syntax.

    Args:
        text: literal text.
        marks: token ids of the parts of it that are special tokens.
    """
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts)


def up_to(rule: str, tag: str, marks: Mapping[str, int]) -> list[str]:
    """Lines of a rule for free text that ends with a tag; they need `TEXT`."""
    lazy = f"{rule}_text[lazy]: TEXT {json.dumps(tag)}"
    if tag not in marks:
        return [f"{rule}: {rule}_text", lazy]
    return [f"{rule}: {rule}_text | TEXT <[{marks[tag]}]>", lazy]


def earlier_messages(marks: Mapping[str, int]) -> list[str]:
    """Lines of the rule `earlier`: messages of gpt-oss for reasoning or the user.

    The rule ends where the channel of another message begins.
    """
    channel, message = (expression(mark, marks) for mark in (CHANNEL, MESSAGE))
    return [
        "earlier: (note)*",
        f'note: {channel} ("analysis" | "commentary") {message} body {expression(START, marks)} '
        '"assistant"',
        *up_to("body", END, marks),
        TEXT,
    ]


def _in_final_channel(grammar: str, channels: Channels) -> str:
    """The grammar of earlier messages and a last one, which a grammar describes."""
    marks = dict(channels.ids)
    channel, message = (expression(mark, marks) for mark in (CHANNEL, MESSAGE))
    start = f'start: earlier {channel} "final" {message} @form'
    return _with_form([start, *earlier_messages(marks)], grammar)


def _with_form(lines: list[str], grammar: str) -> str:
    """The grammar of lines that refer to another as `@form`."""
    text = "\n".join([*lines, '%llguidance {"no_forcing": true}'])
    parts = [{"lark_grammar": text}, {"name": "form", "lark_grammar": grammar}]
    return json.dumps({"grammars": parts})


def after_thinking(grammar: str, thinking: Thinking | Channels) -> str:
    """The grammar of reasoning and the output that a grammar describes after it.

    Where the prompt does not open the reasoning, the model chooses whether it reasons.
    """
    if isinstance(thinking, Channels):
        return _in_final_channel(grammar, thinking)
    marks = dict(thinking.ids)
    opening = json.dumps(thinking.opening)
    if any(mark in thinking.opening for mark in marks):
        opening += f" | {expression(thinking.opening, marks)}"
    lines = [
        "start: thought GAP @form" if thinking.is_inside else "start: (opening thought GAP)? @form",
        f"opening: {opening}",
        *up_to("thought", thinking.closing, marks),
        TEXT,
        _GAP,
    ]
    return _with_form(lines, grammar)
