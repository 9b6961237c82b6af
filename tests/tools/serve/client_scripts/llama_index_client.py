"""llama-index: chat, streams, tools in a loop, structured output."""

from __future__ import annotations

from city import MAX_TOKENS, MODEL, OPENAI, RESULT, USER, City, require_city
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=OPENAI,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=MAX_TOKENS,
    max_retries=0,
    temperature=0.0,
)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: {RESULT}"


tool = FunctionTool.from_defaults(weather, fn_schema=City)
ask = ChatMessage(role="user", content=USER["content"])
first = model.chat([ask])
assert [*model.stream_chat([ask, first.message, ask])]
called = model.chat_with_tools([tool], chat_history=[ask], tool_required=True, strict=True)
calls = model.get_tool_calls_from_response(called)
require_city(calls[0].tool_kwargs)
results = [
    ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": each.tool_id})
    for each in calls
]
model.chat_with_tools([tool], chat_history=[ask, called.message, *results])
assert model.complete("Hi").text is not None
found = model.as_structured_llm(City).chat([ask]).raw
assert isinstance(found, City)
