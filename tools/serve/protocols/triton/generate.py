"""Triton's generate extension: inputs and outputs of TensorRT-LLM's and vLLM's backends.

Defaults that the engine does not give are the backends': TensorRT-LLM is greedy unless temperature,
top-p or top-k is given, vLLM samples. An output starts with its prompt, except in vLLM's streams.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.serve.engines.ask import EngineRequest
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.output.streams import EVENTS, OneText
from edgellm.tools.serve.output.usage import acceptance
from edgellm.tools.serve.protocols.triton.ensemble import EnsembleParameters
from edgellm.tools.serve.schemas.openai import Stop, words
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.sampling import GREEDY, NEUTRAL, SamplingForm, Temperature, TopK

TENSORRT_TOKENS, VLLM_TOKENS = 32, 16
_Maximum = Annotated[int, Field(ge=1)]


_VLLM = SamplingForm(types={"temperature": Temperature, "top_k": TopK})
_TENSORRT = SamplingForm(prefix="sampling_param_", types={"temperature": Temperature})
_VllmSampling, _TensorRTSampling = _VLLM.model(Body), _TENSORRT.model(EnsembleParameters)


class VllmParameters(_VllmSampling):
    """`parameters` of Triton's vLLM backend."""

    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    max_tokens: _Maximum | None = None
    stop: Stop | None = None

    def sampling(self, engine: GenerationDefaults) -> SamplingParams:
        """The sampling options; `engine`: defaults of the engine and the server."""
        return _VLLM.params(self, engine, NEUTRAL)


class GenerateRequest(_TensorRTSampling):
    """`/v2/models/{name}/generate` and `generate_stream`: a prompt without a chat template."""

    text_input: str
    id: Annotated[str, Field(pattern="^[ -~]*$", max_length=256)] | None = None
    # The path decides; a contradicting value is rejected.
    streaming: bool | None = None
    return_finish_reason: bool = False
    parameters: VllmParameters | None = None
    sampling_param_best_of: Literal[1] | None = None
    sampling_param_max_tokens: _Maximum | None = None
    sampling_param_stop: Stop | None = None
    sampling_param_exclude_input_from_output: bool | None = None
    sampling_param_return_perf_metrics: bool = False

    @property
    def is_vllms(self) -> bool:
        """Whether the request uses fields of vLLM's backend."""
        given = {"stream", "parameters", "exclude_input_in_output"} & self.model_fields_set
        return bool(given) and not self.of_ensemble()

    def ask(self, defaults: GenerationDefaults, lora: str | None = None) -> EngineRequest:
        """The engine request.

        Args:
            defaults: of the engine and the server.
            lora: name of the LoRA adapter.

        Raises:
            ApiError: parameters of several backends are mixed.
        """
        of_tensorrt = [name for name in self.model_fields_set if name.startswith("sampling_param")]
        of_ensemble = self.of_ensemble()
        of_vllm = ["parameters"] if self.parameters is not None else []
        forms = [names for names in (of_tensorrt, of_ensemble, of_vllm) if names]
        if len(forms) > 1:
            raise ApiError(
                400,
                f"{min(forms[0])}, {min(forms[1])}: give parameters, sampling_param_... or "
                "max_tokens and the like, not both",
                param=min(forms[0]),
            )
        if of_ensemble:
            maximum = self.max_tokens or defaults.max_generate_length or TENSORRT_TOKENS
            stops = words(self.stop_words)
            return EngineRequest(
                prompt=self.text_input,
                sampling=self.ensemble_sampling(defaults),
                max_tokens=maximum,
                stop=stops,
                lora=lora,
            )
        if self.is_vllms and not of_tensorrt:
            given = self.parameters or VllmParameters()
            maximum = given.max_tokens or defaults.max_generate_length or VLLM_TOKENS
            stops = words(given.stop)
            return EngineRequest(
                prompt=self.text_input,
                sampling=given.sampling(defaults),
                max_tokens=maximum,
                stop=stops,
                lora=lora,
            )
        maximum = self.sampling_param_max_tokens or defaults.max_generate_length
        maximum = maximum or TENSORRT_TOKENS
        stops = words(self.sampling_param_stop)
        return EngineRequest(
            prompt=self.text_input,
            sampling=self._sampling(defaults),
            max_tokens=maximum,
            stop=stops,
            lora=lora,
        )

    def _sampling(self, engine: GenerationDefaults) -> SamplingParams:
        samples = {"temperature", "top_p", "top_k"} & _TENSORRT.given(self).keys()
        return _TENSORRT.params(self, engine, NEUTRAL if samples else GREEDY)

    def require_path(self, *, streams: bool) -> None:
        """Raise `ApiError` if the body's stream fields contradict the path."""
        own = self.parameters.stream if self.parameters is not None else None
        for name, value in (
            ("streaming", self.streaming),
            ("stream", self.stream),
            ("parameters.stream", own),
        ):
            if value not in (None, streams):
                path = "generate_stream" if value else "generate"
                raise ApiError(400, f"{name}: this is what {path} is for", param=name)

    def prefix(self, *, streams: bool) -> str:
        """Text before the output: the prompt, unless it is excluded."""
        own = self.parameters.exclude_input_in_output if self.parameters is not None else None
        given = (self.sampling_param_exclude_input_from_output, self.exclude_input_in_output, own)
        default = streams and (self.is_vllms or bool(self.of_ensemble()))
        excluded = next((value for value in given if value is not None), default)
        return "" if excluded else self.text_input


class GenerateWriter(OneText):
    """Writes a generated text."""

    framing, last = EVENTS, b""

    def __init__(self, body: GenerateRequest, model: str, *, streams: bool) -> None:
        self._head: dict[str, Any] = {"model_name": model, "model_version": "1"}
        if body.id is not None:
            self._head["id"] = body.id
        self._body = body
        self._text = body.prefix(streams=streams)

    def begin(self, started: Started | None = None) -> list[dict[str, Any]]:
        """The event of the prompt, if the output includes it."""
        del started
        return [{**self._head, "text_output": self._text}] if self._text else []

    def step(self, step: Step) -> list[dict[str, Any]]:
        """The event with the text of a step."""
        self._text += step.text
        return [{**self._head, "text_output": step.text}] if step.text else []

    def end(self, figures: Finished) -> list[dict[str, Any]]:
        """The last event: an empty text with the statistics."""
        return [{**self._head, "text_output": "", **self._figures(figures)}]

    def whole(self, figures: Finished) -> dict[str, Any]:
        """The whole body."""
        return {**self._head, "text_output": self._text, **self._figures(figures)}

    def _figures(self, figures: Finished) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._body.return_finish_reason:
            found["finish_reason"] = figures.finish_reason
        if self._body.sampling_param_return_perf_metrics:
            found |= acceptance(figures)
        return found
