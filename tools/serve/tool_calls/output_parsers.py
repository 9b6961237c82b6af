"""What parts an answer into reasoning, calls and text, by the model's chat template."""

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
    """How a model writes answers."""

    parser: type[ToolParser] | None  # of calls, where there are tools; of channels
    thinking: ThinkForm | None

    @classmethod
    def of(cls, template: str, *, has_tools: bool) -> OutputFormat:
        """The form of a chat template's answers; its calls are read where there are tools."""
        parser = tool_calls.find(template)
        if parser is HarmonyParser:
            return cls(parser, None)
        return cls(parser if has_tools else None, reasoning_marks.find(template))

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that must be seen in an answer's text."""
        forms = (self.parser, self.thinking)
        return tuple(mark for form in forms if form is not None for mark in form.shown)

    def reader(self, tools: Tools, prompt_end: str, *, is_guided: bool) -> CallReader | None:
        """A reader of one answer; None: all of it is text.

        Args:
            tools: that may be called.
            prompt_end: the last of the formatted messages, where reasoning may have begun; of a
                message that is continued in its reasoning what is there from the mark on.
            is_guided: the answer has a wanted form from its first token on: it does not reason.
        """
        calls = tool_calls.reader(self.parser, tools) if self.parser is not None else None
        if self.thinking is None or is_guided:
            return calls
        opening = self.thinking.opening
        is_new = prompt_end.rstrip().endswith(opening)
        is_begun = not is_new and prompt_end.startswith(opening)
        is_inside = is_new or is_begun
        return ThinkReader(self.thinking, calls, is_inside=is_inside, is_begun=is_begun)
