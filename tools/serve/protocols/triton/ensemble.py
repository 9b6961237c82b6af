"""Parameters of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` models in Triton."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.serve.schemas.openai import Stop
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.sampling import (
    GREEDY,
    NEUTRAL,
    BadWords,
    SamplingForm,
    Temperature,
    TokenId,
)

_SHARED = ("stream", "exclude_input_in_output")  # also fields of vLLM's backend


_Seed = Annotated[int, Field(ge=0, lt=2**64)]
FORM = SamplingForm(
    names={"seed": "random_seed", "min_tokens": "min_length"},
    types={
        "temperature": Temperature,
        "top_p": Annotated[float, Field(ge=0, le=1)],  # 0: no limit
        "seed": _Seed,
        "bad_words": str | BadWords,
    },
)
_Sampling = FORM.model(Body)


class EnsembleParameters(_Sampling):
    """Inputs other than `text_input`; greedy unless temperature, top-p or top-k is given."""

    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: _Seed | None = None  # also `random_seed`
    stop_words: Stop | None = None
    end_id: TokenId | None = None
    pad_id: TokenId | None = None  # without effect: batches have no padding
    # Only the default values are supported.
    beam_width: Literal[1] | None = None
    num_return_sequences: Literal[1] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    return_log_probs: Literal[False] | None = None
    return_context_logits: Literal[False] | None = None
    return_generation_logits: Literal[False] | None = None

    @field_validator("stop_words", FORM.name("bad_words"))
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        """Remove empty words; `""` means none."""
        given = [value] if isinstance(value, str) else list(value or ())
        return [word for word in given if word] or None

    def of_ensemble(self) -> list[str]:
        """The given fields that only the ensemble has."""
        own = EnsembleParameters.model_fields.keys() - {*_SHARED}
        return sorted(own & self.model_fields_set)

    def ensemble_sampling(self, engine: GenerationDefaults) -> SamplingParams:
        """The sampling options; `engine`: defaults of the engine and the server."""
        given = FORM.given(self)
        more: dict[str, Any] = {"top_p": given["top_p"] or 1.0} if "top_p" in given else {}
        samples = given.get("top_p") or given.get("top_k", 0) > 1 or "temperature" in given
        if "seed" not in given and self.seed is not None:
            more["seed"] = self.seed
        if self.end_id is not None:
            more["stop_token_ids"] = [*given.get("stop_token_ids", ()), self.end_id]
        return FORM.params(self, engine, NEUTRAL if samples else GREEDY, **more)
