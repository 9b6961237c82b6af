"""openai: chat, streams, tools in a loop with its own objects, `.parse()`, Responses."""

from __future__ import annotations

import openai
from city import MAX_TOKENS, MODEL, OPENAI, RESULT, SCHEMA, TOOL, USER, City, require_city
from openai import pydantic_function_tool

client = openai.OpenAI(base_url=OPENAI, api_key="none", max_retries=0)
chat = client.chat.completions
own = {"model": MODEL, "max_completion_tokens": MAX_TOKENS, "temperature": 0}


def call(tools):
    """A forced call, and the second turn with the client's own objects in each form."""
    one = chat.create(
        messages=[USER], tools=tools, tool_choice="required", parallel_tool_calls=False, **own
    )
    message = one.choices[0].message
    (made,) = message.tool_calls
    require_city(made.function.arguments)
    result = {"role": "tool", "tool_call_id": made.id, "content": RESULT}
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        found = chat.create(messages=[USER, sent, result], tools=tools, **own)
        assert found.choices[0].finish_reason in ("stop", "length", "tool_calls")
    return message, result


message, result = call([TOOL])
call([pydantic_function_tool(City, name="weather")])

# A parsed call, and a parsed output, sent back as they come.
tools = [pydantic_function_tool(City, name="weather")]
parsed = chat.parse(messages=[USER], tools=tools, tool_choice="required", **own)
assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, City)
calls = parsed.choices[0].message.tool_calls
results = [{"role": "tool", "tool_call_id": each.id, "content": RESULT} for each in calls]
turns = [USER, parsed.choices[0].message, *results]
structured = chat.parse(messages=turns, response_format=City, **own)
assert isinstance(structured.choices[0].message.parsed, City)
turns += [structured.choices[0].message, USER]
assert chat.create(messages=turns, **own).choices[0].message.content is not None

# A stream of a call, accumulated by the client and sent back.
with chat.stream(messages=[USER], tools=tools, tool_choice="required", **own) as stream:
    events = [event.type for event in stream]
    streamed = stream.get_final_completion().choices[0].message
assert "tool_calls.function.arguments.done" in events
results = [
    {"role": "tool", "tool_call_id": each.id, "content": RESULT} for each in streamed.tool_calls
]
chunks = chat.create(
    messages=[USER, streamed, *results], stream=True, stream_options={"include_usage": True}, **own
)
assert [*chunks][-1].usage.completion_tokens > 0

# Responses: items of the client as they come.
tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
own = {"model": MODEL, "max_output_tokens": MAX_TOKENS, "temperature": 0, "tools": [tool]}
found = client.responses.create(input=[USER], tool_choice="required", **own)
made = found.output[0]
require_city(made.arguments)
output = {"type": "function_call_output", "call_id": made.call_id, "output": RESULT}
for sent in (made, made.model_dump(), made.model_dump(exclude_none=True)):
    again = client.responses.create(input=[USER, sent, output], **own)
    client.responses.create(input=[USER, sent, output, *again.output, USER], **own)
parsed = client.responses.parse(input=[USER], text_format=City, **own)
assert isinstance(parsed.output_parsed, City)
client.responses.create(input=[USER, *parsed.output, USER], **own)
with client.responses.stream(input=[USER], tool_choice="required", **own) as stream:
    final = stream.get_final_response()
assert final.output[0].type == "function_call"

# A part of the tools, in both protocols.
other = {"type": "function", "name": "other", "parameters": {"type": "object"}}
names = [{"type": "function", "name": "weather"}]
own |= {"tools": [other, tool], "parallel_tool_calls": False}
allowed = {"type": "allowed_tools", "mode": "required", "tools": names}
(made,) = client.responses.create(input=[USER], tool_choice=allowed, **own).output
require_city(made.arguments)
tools = [{"type": "function", "function": {"name": "other"}}, TOOL]
names = [{"type": "function", "function": {"name": "weather"}}]
choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
own = {"model": MODEL, "max_completion_tokens": MAX_TOKENS, "parallel_tool_calls": False}
one = chat.create(messages=[USER], tools=tools, tool_choice=choice, modalities=["text"], **own)
require_city(one.choices[0].message.tool_calls[0].function.arguments)
