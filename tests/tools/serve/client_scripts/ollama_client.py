"""ollama: chat, streams, tools in a loop, structured output, the model API."""

from __future__ import annotations

import ollama
from city import MODEL, RESULT, TOOL, URL, USER, City, require_city

client = ollama.Client(URL)
options = {"num_predict": 40, "temperature": 0, "num_ctx": 4096}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"{city}: {RESULT}"


client.generate(MODEL, keep_alive="5m")
assert MODEL in client.list().models[0].model
assert "tools" in client.show(MODEL).capabilities
found = client.chat(MODEL, [USER], tools=[weather, TOOL], options=options)
turns = [USER, found.message, {"role": "tool", "tool_name": "weather", "content": RESULT}, USER]
pieces = [*client.chat(MODEL, turns, tools=[weather], stream=True, options=options)]
assert pieces[-1].done
called = ollama.Message(
    role="assistant",
    tool_calls=[{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
)
client.chat(MODEL, [USER, called, *turns[2:]], options=options)
options = {**options, "num_predict": 300}
formed = client.chat(MODEL, [USER], format=City.model_json_schema(), options=options)
require_city(formed.message.content)
