"""litellm: through OpenAI's, Anthropic's and Ollama's protocols; tools in a loop."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no request to another server

import litellm
from city import MAX_TOKENS, MODEL, OPENAI, RESULT, TOOL, URL, USER, City, require_city

litellm.suppress_debug_info = True
PROVIDERS = {
    f"openai/{MODEL}": {"api_base": OPENAI},
    f"hosted_vllm/{MODEL}": {"api_base": OPENAI},
    f"anthropic/{MODEL}": {"api_base": URL},
    f"ollama_chat/{MODEL}": {"api_base": URL},
}
for model, more in PROVIDERS.items():
    own = {"model": model, "api_key": "none", "max_tokens": MAX_TOKENS, "num_retries": 0, **more}
    found = litellm.completion(messages=[USER], **own)
    assert found.choices[0].finish_reason in ("stop", "length")
    turns = [USER, found.choices[0].message, USER]
    chunks = [*litellm.completion(messages=turns, stream=True, **own)]
    rebuilt = litellm.stream_chunk_builder(chunks, messages=turns)
    litellm.completion(messages=[*turns, rebuilt.choices[0].message, USER], **own)
    if model.startswith("ollama"):
        continue  # its protocol has no forced calls
    found = litellm.completion(messages=[USER], tools=[TOOL], tool_choice="required", **own)
    message = found.choices[0].message
    require_city(message.tool_calls[0].function.arguments)
    results = [
        {"role": "tool", "tool_call_id": each.id, "name": "weather", "content": RESULT}
        for each in message.tool_calls
    ]
    litellm.completion(messages=[USER, message, *results], tools=[TOOL], **own)
    if not model.startswith("anthropic"):
        found = litellm.completion(messages=[USER], response_format=City, **own)
        require_city(found.choices[0].message.content)
