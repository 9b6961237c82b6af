"""Tool calls in answers: one module for each way in which models write them."""

from __future__ import annotations

from edgellm.tools.serve.tool_calls.call import ToolParser
from edgellm.tools.serve.tool_calls.hermes import HermesParser
from edgellm.tools.serve.tool_calls.llama3 import Llama3Parser
from edgellm.tools.serve.tool_calls.mistral import MistralParser

PARSERS: tuple[type[ToolParser], ...] = (HermesParser, Llama3Parser, MistralParser)


def find(template: str) -> type[ToolParser] | None:
    """The parser for a model's chat template; None if it knows no tools, or others."""
    shown = template.replace('\\"', '"')  # forms stand in strings of the template's language
    return next((parser for parser in PARSERS if parser.recognises(shown)), None)
