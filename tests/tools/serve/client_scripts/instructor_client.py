"""instructor: its modes of structured output."""

from __future__ import annotations

import instructor
import openai
from city import MAX_TOKENS, MODEL, OPENAI, USER, City

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=OPENAI, api_key="none"), mode=mode)
    asked = {"messages": [USER], "model": MODEL, "max_tokens": MAX_TOKENS, "max_retries": 0}
    found = client.chat.completions.create(response_model=City, **asked)
    assert isinstance(found, City)
# It sends a forced call and a format of texts.
client = instructor.from_openai(
    openai.OpenAI(base_url=OPENAI, api_key="none"), mode=instructor.Mode.RESPONSES_TOOLS
)
found = client.responses.create(
    response_model=City, input=[USER], model=MODEL, max_output_tokens=MAX_TOKENS, max_retries=0
)
assert isinstance(found, City)
