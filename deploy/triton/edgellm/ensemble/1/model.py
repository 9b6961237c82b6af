"""edgellm as a model of Triton's Python backend: one engine, one request after the other."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # of Triton's process
from pydantic import ValidationError

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.tools.serve.engines import ask
from edgellm.tools.serve.http.errors import ApiError, as_api_error, fault_of
from edgellm.tools.serve.protocols.kserve.tensors import INPUTS, Tensor, read, request_of
from edgellm.tools.serve.protocols.triton.generate import GenerateWriter

_log = logging.getLogger(__name__)


class TritonPythonModel:
    """Triton makes one, and calls it from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine that config.pbtxt names."""
        given = json.loads(args["model_config"])["parameters"]
        how = SpecOptions() if given["speculates"]["string_value"] == "true" else None
        engine = Path(given["engine_dir"]["string_value"])
        self._llm: LLM = LLM(engine, spec=how, context_reuse=True)

    def execute(self, requests: list[Any]) -> None:
        """Answer requests; a fault ends one of them, not the model."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._answer(request, sender)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:  # noqa: BLE001 - the engine outlives every request
                fault = fault_of(error.errors()) if isinstance(error, ValidationError) else error
                if not isinstance(fault, (ApiError, EdgeLLMError)):
                    _log.exception("a request failed")
                response = pb_utils.InferenceResponse(
                    output_tensors=[], error=pb_utils.TritonError(str(as_api_error(fault)))
                )
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any, sender: Any) -> None:
        body = request_of(map(_tensor, request.inputs()), request.request_id())
        streams = bool(body.stream or body.streaming)
        writer = GenerateWriter(body, "", streams=streams)
        answer = ask.start(self._llm, body.ask(self._llm.defaults))
        pieces = writer.begin()
        for step in answer:
            if request.is_cancelled():
                return
            pieces += writer.step(step)
            if streams:
                for piece in pieces:
                    sender.send(_response(piece["text_output"]))
                pieces = []
        text = "".join(piece["text_output"] for piece in pieces)
        reason = str(answer.finish_reason)
        if not streams:
            sender.send(_response(text, reason))
        elif body.return_finish_reason:
            sender.send(_response("", reason))


def _tensor(tensor: Any) -> Tensor:
    """Of a tensor of Triton's, whose datatype its name says."""
    values = tensor.as_numpy()
    shape, name = values.shape, tensor.name()
    return read(name, INPUTS.get(name, "BYTES"), shape, values.reshape(-1).tolist())


def _response(text: str, finish_reason: str | None = None) -> Any:
    texts = {"text_output": text}
    if finish_reason is not None:
        texts["finish_reason"] = finish_reason
    made = [
        pb_utils.Tensor(name, np.array([value.encode()], dtype=np.object_))
        for name, value in texts.items()
    ]
    return pb_utils.InferenceResponse(output_tensors=made)
