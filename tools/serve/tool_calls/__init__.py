"""Tool calls in model output; `formats` has one module for each format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.tools.serve.tool_calls.formats import gemma, phi4
from edgellm.tools.serve.tool_calls.formats.command import CommandParser
from edgellm.tools.serve.tool_calls.formats.gemma import GemmaParser
from edgellm.tools.serve.tool_calls.formats.gemma4 import Gemma4Parser
from edgellm.tools.serve.tool_calls.formats.glm4 import Glm4Parser
from edgellm.tools.serve.tool_calls.formats.glm45 import Glm45Parser
from edgellm.tools.serve.tool_calls.formats.granite import GraniteParser
from edgellm.tools.serve.tool_calls.formats.harmony import HarmonyParser
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.formats.hunyuan import HunyuanParser
from edgellm.tools.serve.tool_calls.formats.lfm2 import Lfm2Parser
from edgellm.tools.serve.tool_calls.formats.llama3 import Llama3Parser
from edgellm.tools.serve.tool_calls.formats.ministral import MinistralParser
from edgellm.tools.serve.tool_calls.formats.mistral import MistralParser
from edgellm.tools.serve.tool_calls.formats.olmo3 import Olmo3Parser
from edgellm.tools.serve.tool_calls.formats.phi4 import Phi4Parser
from edgellm.tools.serve.tool_calls.formats.qwen3_coder import Qwen3CoderParser
from edgellm.tools.serve.tool_calls.json_fallback import JsonFallbackParser
from edgellm.tools.serve.tool_calls.parser import CallReader, ToolParser, Tools

# The first parser that recognises a template is used; the least specific ones come last.
PARSERS: tuple[type[ToolParser], ...] = (
    HarmonyParser, CommandParser, GraniteParser, Phi4Parser, HunyuanParser, Glm45Parser,
    Qwen3CoderParser, Gemma4Parser, Lfm2Parser, HermesParser, Llama3Parser, MistralParser,
    MinistralParser, Olmo3Parser, Glm4Parser, GemmaParser,
)  # fmt: skip


def find(template: str) -> type[ToolParser] | None:
    """The parser for a chat template; None if its tool format is missing or unknown."""
    shown = template.replace('\\"', '"')  # templates quote the formats in strings
    return next((parser for parser in PARSERS if parser.recognises(shown)), None)


def reader(parser: type[ToolParser], tools: Tools) -> CallReader:
    """A parser of one output; it also accepts plain JSON, except with Harmony's channels."""
    inner = parser(tools)
    return inner if isinstance(inner, HarmonyParser) else JsonFallbackParser(inner, tools)


def placed(
    template: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Move tools and calls into the messages for templates that do not take `tools`."""
    if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return [*messages]
    if "message['tools']" in template and Phi4Parser.recognises(template):
        return phi4.placed(messages, tools)
    if "tools" not in template and GemmaParser.recognises(template):
        return gemma.placed(messages, tools)
    return [*messages]
