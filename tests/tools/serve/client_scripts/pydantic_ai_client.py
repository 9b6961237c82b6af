"""pydantic-ai: agents with tools, outputs by a tool and by a schema, and a second turn."""

from __future__ import annotations

from city import MAX_TOKENS, MODEL, OPENAI, SYSTEM, USER, City
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=OPENAI, api_key="none")
settings = {"max_tokens": MAX_TOKENS, "temperature": 0, "parallel_tool_calls": False}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=provider)
    for output in (ToolOutput(City, strict=True), NativeOutput(City, strict=True)):
        agent = Agent(model, output_type=output, system_prompt=SYSTEM, model_settings=settings)
        first = agent.run_sync(USER["content"])
        assert isinstance(first.output, City)
        second = agent.run_sync(USER["content"], message_history=first.all_messages())
        assert isinstance(second.output, City)
    agent = Agent(model, output_type=ToolOutput(City), model_settings=settings)
    with agent.run_stream_sync(USER["content"]) as stream:
        assert isinstance(stream.get_output(), City)
