"""The form that a request wants of its answer, in OpenAI's words and in vLLM's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from edgellm.device_runtime.sampling.guidance import Guide
from edgellm.tools.serve.http.errors import ApiError


class Body(BaseModel):
    """JSON with known fields of the right types only."""

    model_config = ConfigDict(strict=True, extra="forbid")


class FreeText(Body):
    """Any text."""

    type: Literal["text"]

    def guide(self) -> Guide | None:
        """Nothing guides."""
        return None


class AnyJson(Body):
    """A JSON object."""

    type: Literal["json_object"]

    def guide(self) -> Guide:
        """What guides."""
        return Guide("json_object")


class NamedSchema(Body):
    """A JSON schema with the name that OpenAI asks for."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the schema is always kept


class JsonBySchema(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def guide(self) -> Guide:
        """What guides."""
        return Guide.of_schema(self.json_schema.schema_)


class ByRegex(Body):
    """A text that a regular expression matches, an extension."""

    type: Literal["regex"]
    regex: str

    def guide(self) -> Guide:
        """What guides."""
        return Guide("regex", self.regex)


ResponseFormat = Annotated[FreeText | AnyJson | JsonBySchema | ByRegex, Field(discriminator="type")]
_Schema = dict[str, Any] | str  # JSON, or a text of JSON
_Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(Body):
    """vLLM's form of an answer, one of the first five."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: Literal[True] | None = None
    # Without effect here: white space is fixed, and there is one backend.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # declared properties are all there are
    whitespace_pattern: None = None
    structural_tag: None = None

    def guides(self) -> list[Guide]:
        """What is given."""
        found = _guides(self.json_, self.regex, self.choice, self.grammar)
        return [*found, Guide("json_object")] if self.json_object else found


class Formed(Body):
    """A request whose answer may have a form."""

    response_format: ResponseFormat | None = None
    # vLLM's, until version 0.12 and since.
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def form(self) -> Guide | None:
        """The one form that is asked for.

        Raises:
            ApiError: there are several, or `structured_outputs` names none.
            RequestError: a form is too long.
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
