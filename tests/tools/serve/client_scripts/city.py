"""What the scripts share: a question, a tool, its schema and its result. Argument: the server."""

from __future__ import annotations

import json
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict

URL = sys.argv[1]
OPENAI = f"{URL}/v1"
MODEL = "tiny"
USER = {"role": "user", "content": "Where is it sunny?"}
SYSTEM = "Use the tool."
RESULT = "sunny"
MAX_TOKENS = 150


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bonn", "Rome"]


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}


def require_city(given: str | dict) -> None:
    """Arguments of a call, or an output, are a city."""
    City.model_validate(json.loads(given) if isinstance(given, str) else given)
