"""Sampling options in requests: each protocol derives its fields from `OPTIONS`, and `LISTS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, create_model

from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.sampling.params import (
    LARGEST_BIAS,
    MAX_STOPS,
    OPTIONS,
    SamplingParams,
)

Temperature = Annotated[float, Field(ge=0, le=2)]
TopK = Annotated[int, Field(ge=-1)]  # vLLM's; -1 and 0 keep all tokens
AnySeed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BadWords = Annotated[list[str], Field(max_length=MAX_STOPS)]
_IdName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
# Options of `SamplingParams` that are lists or objects: type in JSON, description.
LISTS: Mapping[str, tuple[Any, str]] = {
    "logit_bias": (dict[_IdName, _Bias], "Is added to the logits, by token id."),
    "stop_token_ids": (
        Annotated[list[TokenId], Field(max_length=MAX_STOPS)],
        "Further tokens that end the output.",
    ),
    "bad_words": (BadWords, "Texts that the output does not contain."),
}
ModelT = TypeVar("ModelT", bound=BaseModel)
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}  # samples from the model's distribution
GREEDY = {**NEUTRAL, "temperature": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingForm:
    """How a protocol names and types the sampling options; null is the default.

    `defaults` are the protocol's, for options that neither the engine nor the server gives.
    """

    prefix: str = ""  # of all names
    names: Mapping[str, str] = field(default_factory=dict)  # the protocol's own, by option
    types: Mapping[str, Any] = field(default_factory=dict)  # the protocol's own, by option
    defaults: Mapping[str, Any] = field(default_factory=lambda: NEUTRAL)

    def name(self, option: str) -> str:
        """The protocol's name of an option."""
        return self.prefix + self.names.get(option, option)

    def model(self, base: type[ModelT]) -> type[ModelT]:
        """A subclass of a model, with a field for each option."""
        fields: dict[str, Any] = {}
        for one in OPTIONS.values():
            bounds: dict[str, Any] = {**one.bounds}
            if one.kind is float:
                bounds["allow_inf_nan"] = False
            kind = self.types.get(one.name, Annotated[one.kind, Field(**bounds)])
            fields[self.name(one.name)] = (kind | None, Field(None, description=one.doc))
        for option, (kind, doc) in LISTS.items():
            kind = self.types.get(option, kind)
            fields[self.name(option)] = (kind | None, Field(None, description=doc))
        return create_model(f"{base.__name__}Sampling", __base__=base, **fields)

    def given(self, body: BaseModel) -> dict[str, Any]:
        """Options of a request that are not null, by their names in `SamplingParams`."""
        values = {option: getattr(body, self.name(option)) for option in (*OPTIONS, *LISTS)}
        return {option: value for option, value in values.items() if value is not None}

    def params(
        self, body: BaseModel, engine: GenerationDefaults, own: Mapping[str, Any], **more: Any
    ) -> SamplingParams:
        """Sampling parameters of a request; without a seed, a random one.

        Args:
            body: the request.
            engine: defaults of the engine and the server.
            own: the protocol's defaults.
            more: values that take precedence, and other parameters.
        """
        values = {**self.given(body), **more}
        if "top_k" in values:
            values["top_k"] = max(values["top_k"], 0)
        if "seed" in values:
            values["seed"] %= 2**63
        biases = values.get("logit_bias", {})
        values["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        for option in ("stop_token_ids", "bad_words"):
            values[option] = tuple(values.get(option, ()))
        return engine.params(values, own)
