"""Writers of outputs with separate parts for reasoning, text and tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from edgellm.tools.serve.output.chat_output import CallDelta, OutputItem
from edgellm.tools.serve.output.streams import OneText
from edgellm.tools.serve.tool_calls.parser import ReasoningText


class PartWriter(OneText, ABC):
    """Sorts parsed items into the parts of a protocol."""

    thought_kind: ClassVar[str]  # kind of a reasoning part
    text_kind: ClassVar[str]

    def _added(self, items: Sequence[OutputItem]) -> list[dict[str, Any]]:
        """The events of items."""
        found: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, CallDelta):
                found += self._call(item)
            elif isinstance(item, ReasoningText):
                found += self._text(self.thought_kind, item.text)
            else:
                found += self._text(self.text_kind, item)
        return found

    @abstractmethod
    def _call(self, call: CallDelta) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _text(self, kind: str, text: str) -> list[dict[str, Any]]: ...
