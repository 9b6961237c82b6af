"""Chooses the parser of reasoning, tool calls and text by the chat template."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.device_runtime.text import reasoning_marks
from edgellm.device_runtime.text.reasoning_marks import ThinkForm
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.harmony import HarmonyParser
from edgellm.tools.serve.tool_calls.parser import CallReader, ToolParser, Tools
from edgellm.tools.serve.tool_calls.reasoning import ThinkReader


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Output format of a model."""

    parser: type[ToolParser] | None  # for tool calls or Harmony's channels
    thinking: ThinkForm | None

    @classmethod
    def of(cls, template: str, *, has_tools: bool) -> OutputFormat:
        """The output format of a chat template; calls are parsed only with tools."""
        parser = tool_calls.find(template)
        if parser is HarmonyParser:
            return cls(parser, None)
        return cls(parser if has_tools else None, reasoning_marks.find(template))

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that must stay in the decoded text."""
        forms = (self.parser, self.thinking)
        return tuple(mark for form in forms if form is not None for mark in form.shown)

    def reader(self, tools: Tools, prompt_end: str) -> CallReader | None:
        """A parser of one output; None: all of it is text.

        Args:
            tools: the callable functions.
            prompt_end: end of the formatted messages, which may open the reasoning; of a message
                continued in its reasoning, the text from the opening tag on.
        """
        calls = tool_calls.reader(self.parser, tools) if self.parser is not None else None
        if self.thinking is None:
            return calls
        opening = self.thinking.opening
        is_new = prompt_end.rstrip().endswith(opening)
        is_begun = not is_new and prompt_end.startswith(opening)
        is_inside = is_new or is_begun
        return ThinkReader(form=self.thinking, inner=calls, is_inside=is_inside, is_begun=is_begun)
