"""Parameters of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` models in Triton."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.tools.serve.schemas.openai import Penalty, Repetition, Stop, TokenId
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.seeds import seed_or_any

_SHARED = ("stream", "exclude_input_in_output")  # also fields of vLLM's backend


class EnsembleParameters(Body):
    """Inputs other than `text_input`; greedy unless temperature, top-p or top-k is given."""

    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_length: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None  # 0: no limit
    top_k: Annotated[int, Field(ge=0)] | None = None
    random_seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop_words: Stop | None = None
    bad_words: Literal[""] | Annotated[list[Literal[""]], Field(max_length=1)] | None = None
    end_id: TokenId | None = None
    pad_id: TokenId | None = None  # without effect: batches have no padding
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Only the default values are supported.
    beam_width: Literal[1] | None = None
    num_return_sequences: Literal[1] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    return_log_probs: Literal[False] | None = None
    return_context_logits: Literal[False] | None = None
    return_generation_logits: Literal[False] | None = None

    @field_validator("stop_words")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        """Remove empty stop words; `""` means none."""
        given = [value] if isinstance(value, str) else list(value or ())
        return [word for word in given if word] or None

    def of_ensemble(self) -> list[str]:
        """The given fields that only the ensemble has."""
        own = EnsembleParameters.model_fields.keys() - {*_SHARED}
        return sorted(own & self.model_fields_set)

    def ensemble_sampling(self) -> SamplingParams:
        """The sampling options."""
        temperature = self.temperature
        if temperature is None:
            temperature = 1.0 if self.top_p or (self.top_k or 0) > 1 else 0.0
        seed = self.random_seed if self.random_seed is not None else self.seed
        return SamplingParams(
            temperature=temperature,
            top_p=self.top_p or 1.0,
            top_k=self.top_k or 0,
            seed=seed_or_any(None if seed is None else seed % 2**63),
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            min_tokens=self.min_length or 0,
            stop_token_ids=() if self.end_id is None else (self.end_id,),
        )
