"""`/v2/models/{name}/infer`: tensors in JSON, or as bytes after it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from edgellm.core.errors import suggestion
from edgellm.tools.serve.http.errors import ApiError, fault_of
from edgellm.tools.serve.protocols.kserve.metadata import VERSION
from edgellm.tools.serve.protocols.kserve.tensors import (
    OUTPUTS,
    Tensor,
    read,
    read_bytes,
    request_of,
    text_bytes,
)
from edgellm.tools.serve.protocols.triton.generate import GenerateRequest
from edgellm.tools.serve.schemas.response_format import Body

HEADER_LENGTH = "Inference-Header-Content-Length"


class InputParameters(Body):
    """What a client may say about an input."""

    binary_data_size: int | None = None


class OutputParameters(Body):
    """What a client may say about an output."""

    binary_data: bool | None = None


class RequestParameters(Body):
    """What a client may say about a request.

    Triton's clients send sequence, priority and timeout, which change no output here. All options
    of sampling are tensors.
    """

    binary_data_output: bool = False
    triton_enable_empty_final_response: bool = False
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout: int = 0  # microseconds


class Input(Body):
    """An input tensor."""

    name: str
    datatype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]]
    data: list[Any] | None = None
    parameters: InputParameters = Field(default_factory=InputParameters)


class Output(Body):
    """A requested output tensor."""

    name: str
    parameters: OutputParameters = Field(default_factory=OutputParameters)


class InferBody(Body):
    """The JSON part of a request."""

    id: str = ""
    inputs: list[Input]
    outputs: list[Output] = Field(default_factory=list)
    parameters: RequestParameters = Field(default_factory=RequestParameters)


@dataclass(frozen=True, slots=True)
class Infer:
    """A request, and the form of its response."""

    body: GenerateRequest
    outputs: tuple[str, ...]  # in this order
    as_bytes: frozenset[str] = field(default_factory=frozenset)  # sent as bytes after the JSON


def parse(content: bytes, header_length: str | None) -> Infer:
    """Parse the body of a request.

    Args:
        content: JSON, followed by the bytes of tensors.
        header_length: size of the JSON in bytes, from the header; None: the whole body.

    Raises:
        ApiError: the body is invalid.
    """
    length = len(content) if header_length is None else _length(header_length, len(content))
    try:
        body = InferBody.model_validate_json(content[:length])
    except ValidationError as error:
        raise fault_of(error.errors(), InferBody) from None
    request = requested(_tensors(body.inputs, content[length:]), body.id)
    names = require_outputs([output.name for output in body.outputs])
    all_of_them = body.parameters.binary_data_output
    return Infer(
        with_reason(request, names),
        names,
        frozenset(
            {
                output.name
                for output in body.outputs
                if (all_of_them if (own := output.parameters.binary_data) is None else own)
            }
            or (names if all_of_them and not body.outputs else ())
        ),
    )


def requested(tensors: Sequence[Tensor], identity: str) -> GenerateRequest:
    """As `request_of`; raises `ApiError`."""
    try:
        return request_of(tensors, identity)
    except ValidationError as error:
        raise fault_of(error.errors(), GenerateRequest) from None


def require_parameters(names: Iterable[str], known: type[Body]) -> None:
    """Reject names that a message of gRPC may not have; raises `ApiError`."""
    for name in names:
        if name not in known.model_fields:
            all_of_them = ", ".join(known.model_fields) or "none"
            meant = suggestion(name, known.model_fields)
            raise ApiError(
                400,
                f"parameters.{name}: unknown; known are {all_of_them}"
                + (f" ({meant})" if meant else ""),
            )


def require_outputs(asked: Sequence[str]) -> tuple[str, ...]:
    """The requested outputs, or the default; raises `ApiError` for an unknown one."""
    for name in asked:
        if name not in OUTPUTS:
            raise ApiError(
                400, f"there is no output {name!r}; there are {', '.join(OUTPUTS)}", param="outputs"
            )
    return tuple(asked) or ("text_output",)


def with_reason(body: GenerateRequest, outputs: Sequence[str]) -> GenerateRequest:
    """The request, with the finish reason if it is a requested output."""
    wants = body.return_finish_reason or "finish_reason" in outputs
    return body.model_copy(update={"return_finish_reason": wants})


def answer(infer: Infer, found: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a response.

    Args:
        infer: the request.
        found: the result of `GenerateWriter.whole`.
    """
    outputs: list[dict[str, Any]] = []
    binary = b""
    for name in infer.outputs:
        tensor: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": [1]}
        text = str(found[name])
        if name in infer.as_bytes:
            raw = text_bytes(text)
            binary += raw
            tensor["parameters"] = {"binary_data_size": len(raw)}
        else:
            tensor["data"] = [text]
        outputs.append(tensor)
    head: dict[str, Any] = {"model_name": found["model_name"], "model_version": VERSION}
    if infer.body.id:
        head["id"] = infer.body.id
    content = json.dumps({**head, "outputs": outputs}).encode()
    if not binary:
        return content, {"content-type": "application/json"}
    return content + binary, {
        "content-type": "application/octet-stream",
        HEADER_LENGTH: str(len(content)),
    }


def _length(header: str, size: int) -> int:
    if not (header.isascii() and header.isdigit() and int(header) <= size):
        raise ApiError(400, f"{HEADER_LENGTH}: {header[:40]!r} of a body of {size} bytes")
    return int(header)


def _tensors(inputs: Sequence[Input], binary: bytes) -> list[Tensor]:
    found: list[Tensor] = []
    at = 0
    for one in inputs:
        size = one.parameters.binary_data_size
        if size is None:
            if one.data is None:
                raise ApiError(400, f"{one.name}: no data", param=one.name)
            found.append(read(one.name, one.datatype, one.shape, one.data))
            continue
        if size < 0 or at + size > len(binary) or one.data is not None:
            raise ApiError(400, f"{one.name}: binary_data_size {size!r} is not right")
        found.append(read_bytes(one.name, one.datatype, one.shape, binary[at : at + size]))
        at += size
    if at != len(binary):
        raise ApiError(400, f"{len(binary) - at} bytes are of no tensor")
    return found
