"""Tensors of the KServe protocol: inputs, outputs, binary encoding.

Sources: the KServe Open Inference Protocol (REST and gRPC), and its extension for binary data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.device_runtime.sampling.params import OPTIONS
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.protocols.triton.ensemble import FORM
from edgellm.tools.serve.protocols.triton.generate import GenerateRequest

Value = bool | int | float | str

# Datatype -> number in a ModelConfig, format of `struct` ("" for texts)
DATATYPES = {
    "BOOL": (1, "?"), "UINT8": (2, "B"), "UINT16": (3, "H"), "UINT32": (4, "I"),
    "UINT64": (5, "Q"), "INT8": (6, "b"), "INT16": (7, "h"), "INT32": (8, "i"), "INT64": (9, "q"),
    "FP32": (11, "f"), "FP64": (12, "d"), "BYTES": (13, ""),
}  # fmt: skip
_INTEGERS = {name for name, (_, form) in DATATYPES.items() if form and form in "BHIQbhiq"}
_FLOATS = {"FP32", "FP64"}

_KINDS = {bool: "BOOL", int: "INT32", float: "FP32"}
# Names of TensorRT-LLM's ensemble and vLLM's backend; only the first is required.
INPUTS = {
    "text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL",
    **{FORM.name(one.name): _KINDS[one.kind] for one in OPTIONS.values()}, "random_seed": "UINT64",
    "stop_words": "BYTES", "bad_words": "BYTES", "stop_token_ids": "INT32", "logit_bias": "BYTES",
    "end_id": "INT32", "pad_id": "INT32",
    "beam_width": "INT32", "return_log_probs": "BOOL", "exclude_input_in_output": "BOOL",
    "sampling_parameters": "BYTES", "return_finish_reason": "BOOL",
}  # fmt: skip
OUTPUTS = {"text_output": "BYTES", "finish_reason": "BYTES"}
_PREFIX = "sampling_param_"
_LISTS = ("stop_words", "bad_words", "stop_token_ids", "stop")
_OBJECTS = ("logit_bias",)  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor with flat values."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Value, ...]


def read(name: str, datatype: str, shape: Sequence[int], values: Iterable[Any]) -> Tensor:
    """A tensor from JSON values, flat or nested.

    Raises:
        ApiError: they do not fit the datatype or the shape.
    """
    flat = tuple(_value(name, datatype, value) for value in _flat(values))
    return _shaped(name, datatype, shape, flat)


def read_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """A tensor from bytes: little-endian numbers, or texts with a 4-byte length prefix.

    Raises:
        ApiError: they do not fit the datatype or the shape.
    """
    form = _form(name, datatype)
    if not form:
        return _shaped(name, datatype, shape, _texts(name, raw))
    size = struct.calcsize("<" + form)
    if len(raw) % size:
        raise ApiError(400, f"{name}: {len(raw)} bytes are no {datatype}", param=name)
    return _shaped(name, datatype, shape, struct.unpack(f"<{len(raw) // size}{form}", raw))


def text_bytes(text: str) -> bytes:
    """Encode one element of a BYTES tensor."""
    raw = text.encode("utf-8", "replace")
    return struct.pack("<I", len(raw)) + raw


def request_of(tensors: Iterable[Tensor], request_id: str) -> GenerateRequest:
    """Convert input tensors to a request.

    Raises:
        ApiError: a tensor is unknown, duplicate, or has more than its one value.
        ValidationError: a value is out of its range, or `text_input` is missing.
    """
    body: dict[str, Any] = {"id": request_id} if request_id else {}
    for tensor in tensors:
        if tensor.name not in INPUTS and tensor.name not in GenerateRequest.model_fields:
            raise ApiError(
                400,
                f"there is no input {tensor.name!r}; there are {', '.join(INPUTS)}",
                param="inputs",
            )
        if tensor.name in body:
            raise ApiError(400, f"the input {tensor.name!r} is there twice", param="inputs")
        body[tensor.name] = _plain(tensor)
    if (text := body.pop("sampling_parameters", None)) is not None:
        body["parameters"] = _object("sampling_parameters", text)
    return GenerateRequest.model_validate(body)


def _plain(tensor: Tensor) -> Any:
    name = tensor.name.removeprefix(_PREFIX)
    if name in _LISTS:
        return list(tensor.values)
    if len(tensor.values) != 1:
        raise ApiError(
            400, f"{tensor.name}: one value, not {len(tensor.values)}", param=tensor.name
        )
    if name in _OBJECTS:
        return _object(tensor.name, tensor.values[0])
    return tensor.values[0]


def _object(name: str, text: Any) -> dict[str, Any]:
    """An object from a JSON string; numbers may be strings."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(400, f"{name}: not JSON: {error}", param=name) from None
    if not isinstance(found, dict):
        raise ApiError(400, f"{name}: not an object of JSON", param=name)
    return {key: _number(value) for key, value in found.items()}


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value not in ("NaN", "Infinity", "-Infinity") else value
    except (ValueError, RecursionError):
        return value


def _form(name: str, datatype: str) -> str:
    try:
        return DATATYPES[datatype][1]
    except KeyError:
        known = ", ".join(DATATYPES)
        raise ApiError(400, f"{name}: no datatype {datatype!r}; {known}", param=name) from None


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    left = [iter(values)]
    while left:
        for value in left[-1]:
            if isinstance(value, list):
                left.append(iter(value))
                break
            yield value
        else:
            left.pop()


def _value(name: str, datatype: str, value: Any) -> Value:
    _form(name, datatype)
    if isinstance(value, bytes):
        value = _text(name, value)
    fits = (
        isinstance(value, bool)
        if datatype == "BOOL"
        else isinstance(value, str)
        if datatype == "BYTES"
        else isinstance(value, int) and not isinstance(value, bool)
        if datatype in _INTEGERS
        else isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    if not fits:
        raise ApiError(400, f"{name}: {value!r:.40} is no {datatype}", param=name)
    return float(value) if datatype in _FLOATS else value


def _texts(name: str, raw: bytes) -> tuple[str, ...]:
    found: list[str] = []
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        if at + 4 + size > len(raw):
            raise ApiError(400, f"{name}: a text ends after its tensor", param=name)
        found.append(_text(name, raw[at + 4 : at + 4 + size]))
        at += 4 + size
    return tuple(found)


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, f"{name}: not UTF-8", param=name) from None


def _shaped(name: str, datatype: str, shape: Sequence[int], values: tuple[Value, ...]) -> Tensor:
    size = 1
    for side in shape:
        size *= side
    if min(shape, default=1) < 0 or size != len(values):
        raise ApiError(
            400, f"{name}: {len(values)} values, but the shape {list(shape)}", param=name
        )
    return Tensor(name=name, datatype=datatype, shape=tuple(shape), values=values)
