"""anthropic: messages, streams, tools in a loop with its own objects, structured output."""

from __future__ import annotations

from typing import Literal

import anthropic
from city import MAX_TOKENS, MODEL, RESULT, SCHEMA, URL, USER, City, require_city

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
tool = {"name": "weather", "input_schema": SCHEMA, "strict": True}
own = {"model": MODEL, "max_tokens": MAX_TOKENS, "tools": [tool]}
system = [{"type": "text", "text": "w", "cache_control": {"type": "ephemeral"}}]

found = client.messages.create(
    messages=[USER], system=system, tool_choice={"type": "any"}, metadata={"user_id": "u"}, **own
)
made = found.content[0]
require_city(made.input)
for content in (found.content, [block.model_dump() for block in found.content]):
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
        for block in found.content
        if block.type == "tool_use"
    ]
    turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    again = client.messages.create(messages=turns, **own)
    assert again.usage.output_tokens > 0

with client.messages.stream(messages=turns, **own) as stream:
    last = stream.get_final_message()
client.messages.create(
    messages=[*turns, {"role": "assistant", "content": last.content or "w"}, USER], **own
)
beta = client.beta.messages.create(
    messages=[USER],
    betas=["context-management-2025-06-27"],
    context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    thinking={"type": "adaptive"},
    **own,
)
assert beta.usage.output_tokens > 0
form = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
structured = client.messages.create(
    model=MODEL, max_tokens=MAX_TOKENS, messages=[USER], output_config=form
)
require_city(structured.content[0].text)


@anthropic.beta_tool
def weather(city: Literal["Bonn", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"{city}: {RESULT}"


# The runner asks for a thread, and goes on without one.
own |= {"tools": [weather], "max_iterations": 2, "messages": [USER]}
own["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
reasons = [message.stop_reason for message in client.beta.messages.tool_runner(**own)]
assert reasons == ["tool_use", "tool_use"]
for stream in client.beta.messages.tool_runner(stream=True, **own):
    assert stream.get_final_message().stop_reason == "tool_use"
