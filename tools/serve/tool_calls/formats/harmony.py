"""Output of gpt-oss in channels: reasoning, tool calls and the final text.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`, and
calls as `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
Commentary without a recipient is for the user. Source: OpenAI's description of Harmony.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from edgellm.device_runtime.text.reasoning_marks import (
    CHANNEL_MARKS,
    MESSAGE,
    MESSAGE_ENDS,
    has_channels,
)
from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import (
    Call,
    Item,
    NoCall,
    ReasoningText,
    Tools,
    longest_begun,
)

_END = re.compile("|".join(map(re.escape, MESSAGE_ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_PREFIXES = ("<|", "to=")  # starts of the first header


class HarmonyParser:
    """See `ToolParser`; without tools it separates reasoning from text."""

    shown: ClassVar[tuple[str, ...]] = CHANNEL_MARKS
    form: ClassVar = CallForm(
        before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        after="",
        between=None,
        marks=CHANNEL_MARKS,
        has_channels=True,
    )

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held = tools, ""
        self._is_header, self._is_first = True, True
        self._kind: type[str] | type[ReasoningText] = str
        self._recipient = ""
        self._shown: set[type] = set()  # kinds of items that were returned
        self._gap = ""  # newline before the next message of a kind

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the marks of channels and messages."""
        return has_channels(template)

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`."""
        self._held += text
        found: list[Item] = []
        while True:
            if self._is_header:
                if not self._open():
                    return found
            elif (end := _END.search(self._held)) is not None:
                found += self._close(self._held[: end.start()])
                is_next = end[0] in ("<|start|>", "<|channel|>")
                self._held = self._held[end.start() if is_next else end.end() :]
            else:
                return found if self._recipient else found + self._pass_on()

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `CallReader.finish`; drops a header without a message."""
        held, self._held = self._held, ""
        if self._is_header:
            return [held] if self._is_first and "<|" not in held and held else []
        is_call = bool(self._recipient)
        if is_cut and is_call and not held.strip():  # its arguments would have come
            return []
        items = self._close(held)
        return (
            [] if is_cut and is_call and not any(isinstance(one, Call) for one in items) else items
        )

    def _open(self) -> bool:
        """Parse a header; return False if it is incomplete."""
        header, mark, rest = self._held.partition(MESSAGE)
        if self._is_first and not _may_be_header(header):
            self._is_header = self._is_first = False  # text without a channel
            return True
        if not mark:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._held, self._is_header, self._is_first = rest, False, False
        self._recipient = recipient[1] if recipient is not None else ""
        self._kind = ReasoningText if channel is not None and channel[1] == "analysis" else str
        self._gap = "\n" if self._kind in self._shown else ""
        return True

    def _pass_on(self) -> list[Item]:
        """Take the held text, except a possible start of a mark."""
        cut = len(self._held) - longest_begun(self._held, MESSAGE_ENDS)
        text, self._held = self._held[:cut], self._held[cut:]
        return self._piece(text)

    def _close(self, text: str) -> list[Item]:
        """The end of a message."""
        recipient, self._recipient, self._is_header = self._recipient, "", True
        if recipient:
            try:
                name = recipient.removeprefix("functions.")
                return [Call.to(self._tools, name, json.loads(text or "{}"))]
            except NoCall:
                pass
        return self._piece(text)

    def _piece(self, text: str) -> list[Item]:
        if not text:
            return []
        text, self._gap = self._gap + text, ""
        self._shown.add(self._kind)
        return [self._kind(text)]


def _may_be_header(text: str) -> bool:
    """Whether the start of the output is a header, or may become one."""
    begun = text.lstrip()
    return any(begun.startswith(prefix) or prefix.startswith(begun) for prefix in _PREFIXES)
