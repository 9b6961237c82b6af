"""Triton's generate extension, with the inputs and outputs of TensorRT-LLM's models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.device_runtime.engine.llm import Step
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.tools.serve.engine import Ask
from edgellm.tools.serve.events import Finished
from edgellm.tools.serve.schemas import Body, Stop
from edgellm.tools.serve.seeds import seed_or_any
from edgellm.tools.serve.usage import acceptance

DEFAULT_TOKENS = 32


class GenerateRequest(Body):
    """`/v2/models/{name}/generate` and `generate_stream`: a text without a template."""

    text_input: str
    id: Annotated[str, Field(pattern="^[ -~]*$", max_length=256)] | None = None
    streaming: bool | None = None  # the path decides; a value that contradicts it is refused
    sampling_param_max_tokens: Annotated[int, Field(ge=1)] = DEFAULT_TOKENS
    sampling_param_temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    sampling_param_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    sampling_param_top_k: Annotated[int, Field(ge=0)] = 0
    sampling_param_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    sampling_param_stop: Stop | None = None
    sampling_param_exclude_input_from_output: Literal[True] = True
    sampling_param_return_perf_metrics: bool = False

    def ask(self) -> Ask:
        """What the engine is asked."""
        sampling = SamplingParams(
            self.sampling_param_temperature,
            self.sampling_param_top_p,
            self.sampling_param_top_k,
            seed_or_any(self.sampling_param_seed),
        )
        stop = self.sampling_param_stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return Ask(self.text_input, sampling, self.sampling_param_max_tokens, stops)


class GenerateWriter:
    """A generated text as it grows."""

    last = b""

    def __init__(self, body: GenerateRequest, model: str) -> None:
        self._head: dict[str, Any] = {"model_name": model, "model_version": "1"}
        if body.id is not None:
            self._head["id"] = body.id
        self._wants_metrics = body.sampling_param_return_perf_metrics
        self._text = ""

    def begin(self) -> list[dict[str, Any]]:
        """Nothing comes before the first token."""
        return []

    def step(self, step: Step) -> list[dict[str, Any]]:
        """One event with the text of a step."""
        self._text += step.text
        return [{**self._head, "text_output": step.text}] if step.text else []

    def end(self, figures: Finished) -> list[dict[str, Any]]:
        """An empty text with the figures."""
        return [{**self._head, "text_output": "", **self._figures(figures)}]

    def whole(self, figures: Finished) -> dict[str, Any]:
        """The text in one piece."""
        return {**self._head, "text_output": self._text, **self._figures(figures)}

    def _figures(self, figures: Finished) -> dict[str, Any]:
        found: dict[str, Any] = {"finish_reason": figures.finish_reason}
        return found | (acceptance(figures) if self._wants_metrics else {})
