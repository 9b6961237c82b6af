"""Tools and `tool_choice` of chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.params import Guide
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.tool_calls.grammar import calls_in_text, forced_calls
from edgellm.tools.serve.tool_calls.output_format import OutputFormat
from edgellm.tools.serve.tool_calls.parser import ToolParser, Tools

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class Function(Body):
    """A function that the model can call."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Tools by name, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    """A part of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_Choice = Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


class Tooled(Body):
    """A request with tools."""

    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def choice(self) -> str | NamedTool | None:
        """How the model chooses among `usable_tools`."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice

    def usable_tools(self) -> list[Tool]:
        """The tools in the model's prompt.

        Raises:
            ApiError: an allowed tool is missing.
        """
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedChoice):
            allowed = [one.function.name for one in self.tool_choice.allowed_tools.tools]
            for name in allowed:
                if name not in [tool.function.name for tool in tools]:
                    raise _missing(name)
            return [tool for tool in tools if tool.function.name in allowed]
        return [] if self.tool_choice == "none" else tools

    def must_call(self) -> list[Function]:
        """The functions to choose from in a forced call; empty: the model decides.

        Raises:
            ApiError: `tool_choice` needs tools that are missing.
        """
        functions = [tool.function for tool in self.usable_tools()]
        choice = self.choice
        if isinstance(choice, NamedTool):
            functions = [one for one in functions if one.name == choice.function.name]
            if not functions:
                raise _missing(choice.function.name)
        elif choice == "required":
            if not functions:
                raise _refusal('"required" needs tools')
        else:
            functions = []
        return functions

    def has_strict_choice(self) -> bool:
        """Whether the model chooses among tools of which one is strict."""
        is_strict = any(tool.function.strict for tool in self.usable_tools())
        return is_strict and self.choice in (None, "auto")

    def ignores_strict(self, template: str) -> bool:
        """Whether strict arguments cannot be guided in free text, for lack of a tag before calls.

        Args:
            template: the model's chat template.
        """
        parser = tool_calls.find(template)
        return self.has_strict_choice() and (parser is None or not parser.form.tag)

    def strict_form(self, llm: LLM) -> Guide | None:
        """The guide of free text in which strict calls have the form of their schemas.

        Raises:
            ApiError: the template has no known tool format.
            RequestError: the parameters of a strict tool are not an object.
        """
        if not self.has_strict_choice() or not (form := _parser(llm).form).tag:
            return None
        tokenizer = llm.tokenizer
        thinking = self.answer_form(llm).thinking
        others = tokenizer.added_ids(thinking.shown if thinking is not None else ())
        functions = [tool.function for tool in self.usable_tools()]
        schemas = {
            one.name: (one.parameters or {"properties": {}}) if one.strict else {"type": "object"}
            for one in functions
        }
        marks = tokenizer.added_ids(form.marks)
        grammar = calls_in_text(form, schemas, marks=marks, other_marks=others.values())
        return Guide("lark_with_thinking", grammar)

    def calls_form(self, llm: LLM) -> Guide | None:
        """The guide of a forced call, in the format of the model's chat template.

        Raises:
            ApiError: see `must_call`; the template has no known tool format.
        """
        functions = self.must_call()
        if not functions:
            return None
        several = self.choice == "required" and self.parallel_tool_calls is not False
        form = _parser(llm).form
        marks = llm.tokenizer.added_ids(form.marks)
        schemas = {one.name: one.parameters for one in functions}
        after_messages = form.has_channels
        grammar = forced_calls(
            form, schemas, marks=marks, several=several, after_messages=after_messages
        )
        return Guide("lark_with_thinking" if after_messages else "lark", grammar)

    def schemas(self) -> Tools:
        """Argument schemas of the usable tools by name."""
        return {one.function.name: one.function.parameters for one in self.usable_tools()}

    def answer_form(self, llm: LLM) -> OutputFormat:
        """The format of the model's output.

        Raises:
            ApiError: there are tools, and the chat template has no known tool format.
        """
        if has_tools := bool(self.usable_tools()):
            _parser(llm)
        return OutputFormat.of(llm.tokenizer.chat_template or "", has_tools=has_tools)


def _parser(llm: LLM) -> type[ToolParser]:
    parser = tool_calls.find(llm.tokenizer.chat_template or "")
    if parser is None:
        raise ApiError(
            400,
            "tools: this model's chat template knows no tools; for JSON by a schema give "
            "response_format",
            param="tools",
        )
    return parser


def _missing(name: str) -> ApiError:
    return _refusal(f"there is no tool {name!r} among the tools")


def _refusal(message: str) -> ApiError:
    return ApiError(400, f"tool_choice: {message}", param="tool_choice")
