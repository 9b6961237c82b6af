"""langchain-openai: chat, streams, tools in a loop, structured output; both OpenAI protocols."""

from __future__ import annotations

from city import MAX_TOKENS, MODEL, OPENAI, RESULT, USER, City, require_city
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool(args_schema=City)
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: {RESULT}"


for uses_responses in (False, True):
    model = ChatOpenAI(
        base_url=OPENAI,
        api_key="none",
        model=MODEL,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        temperature=0,
        use_responses_api=uses_responses,
    )
    ask = HumanMessage(USER["content"])
    first = model.invoke([ask])
    assert "".join(str(chunk.content) for chunk in model.stream([ask, first, ask]))
    forced = model.bind_tools([weather], tool_choice="required", strict=True)
    called = forced.invoke([ask])
    require_city(called.tool_calls[0]["args"])
    results = [weather.invoke(each) for each in called.tool_calls]
    assert all(isinstance(each, ToolMessage) for each in results)
    model.bind_tools([weather], strict=True).invoke([ask, called, *results])
    chunks = [*forced.stream([ask])]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    require_city(whole.tool_calls[0]["args"])
    results = [weather.invoke(each) for each in whole.tool_calls]
    model.bind_tools([weather]).invoke([ask, whole, *results])
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(City, method=method).invoke([ask])
        assert isinstance(found, City)
