"""Structured output: OpenAI's and vLLM's fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgellm.device_runtime.sampling.params import Guide
from edgellm.tools.serve.http.errors import ApiError


class Body(BaseModel):
    """Strict JSON schema: unknown fields and wrong types are rejected.

    Null is "not given": clients send it for each optional field, known here or not.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        fields = cls.model_fields.items()
        needed = {field.alias or name for name, field in fields if field.is_required()}
        return {key: value for key, value in given.items() if value is not None or key in needed}


class FreeText(Body):
    """Any text."""

    type: Literal["text"]

    def guide(self) -> Guide | None:
        """None: the output is free."""
        return None


class AnyJson(Body):
    """A JSON object."""

    type: Literal["json_object"]

    def guide(self) -> Guide:
        """The guide of the output."""
        return Guide("json_object")


class NamedSchema(Body):
    """A JSON schema with OpenAI's name and description."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the schema is always enforced


class JsonBySchema(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def guide(self) -> Guide:
        """The guide of the output."""
        return Guide.of_schema(self.json_schema.schema_)


class ByRegex(Body):
    """A text that matches a regular expression; an extension."""

    type: Literal["regex"]
    regex: str

    def guide(self) -> Guide:
        """The guide of the output."""
        return Guide("regex", self.regex)


ResponseFormat = Annotated[FreeText | AnyJson | JsonBySchema | ByRegex, Field(discriminator="type")]
_Schema = dict[str, Any] | str  # JSON, or a text of JSON
_Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(Body):
    """vLLM's structured output: one of the first five fields."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: Literal[True] | None = None
    # Without effect: white space is fixed, and there is one backend.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # undeclared properties are never generated
    whitespace_pattern: None = None
    structural_tag: None = None

    def guides(self) -> list[Guide]:
        """The guides of all fields that are set."""
        found = _guides(self.json_, self.regex, self.choice, self.grammar)
        return [*found, Guide("json_object")] if self.json_object else found


class Formed(Body):
    """Base of requests with structured output."""

    response_format: ResponseFormat | None = None
    # vLLM's fields, up to version 0.12 and later.
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def form(self) -> Guide | None:
        """The requested guide, or None.

        Raises:
            ApiError: several are given, or `structured_outputs` is empty.
            RequestError: a schema or grammar is too long.
        """
        found = _guides(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        if self.structured_outputs is not None:
            given = self.structured_outputs.guides()
            if not given:
                raise ApiError(
                    400,
                    "structured_outputs: give json, regex, choice, grammar or json_object",
                    param="structured_outputs",
                )
            found += given
        own = self.response_format.guide() if self.response_format is not None else None
        found += [own] if own is not None else []
        if len(found) > 1:
            raise ApiError(
                400,
                "one form of the answer at a time: response_format, one guided_ field, "
                "or one field of structured_outputs",
            )
        return found[0] if found else None


def _guides(
    schema: _Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Guide]:
    found: list[Guide] = []
    if isinstance(schema, str):
        found.append(Guide("json_schema", schema))
    elif schema is not None:
        found.append(Guide.of_schema(schema))
    if regex is not None:
        found.append(Guide("regex", regex))
    if choice is not None:
        found.append(Guide("choice", json.dumps(choice)))
    if grammar is not None:
        found.append(Guide("ebnf", grammar))
    return found
