"""Graphs of bundles and engines, read without their weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from edgellm.core.errors import BrokenArtifactError
from edgellm.tools.inspection.report import Graph, Port
from edgellm.tools.inspection.sources.tensors import (
    Contents,
    Tensor,
    contents_at,
    layer_of,
    part_of,
)

_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")
_OWN_DOMAINS = ("edgellm", "edgellm.kernels")
_READS_ROWS = ("Gather", "GroupQueryAttention")  # of the embedding and RoPE tables


def read_graph(path: Path, float_bytes: int | None = None, *, is_encoder: bool = False) -> Graph:
    """Read inputs, outputs, operators and headers of weights of an ONNX file.

    Args:
        path: the graph; other files than .onnx, such as compiled plans, give an empty one.
        float_bytes: bytes of a float once it is loaded; None: as stored.
        is_encoder: whether it is a visual encoder.

    Raises:
        BrokenArtifactError: the file is not an ONNX file.
    """
    if path.suffix != ".onnx":
        return Graph(name=path.name, tensors=())
    try:
        model = onnx.load_model(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise BrokenArtifactError(
            f"{path} is not an ONNX graph ({error})", hint="copy the folder again, or rebuild it"
        ) from None
    whole, shares = _read_whole(model.graph), _expert_shares(model.graph)
    tensors = [
        dataclasses.replace(
            _tensor(proto, path.parent, float_bytes, whole, is_encoder=is_encoder),
            token_share=shares.get(proto.name, 1.0),
        )
        for proto in model.graph.initializer
    ]
    return Graph(
        name=path.name,
        tensors=tuple(tensors),
        inputs=tuple(_port(value) for value in model.graph.input),
        outputs=tuple(_port(value) for value in model.graph.output),
        operators=dict(Counter(_operator(node) for node in model.graph.node).most_common()),
        opset=next((item.version for item in model.opset_import if not item.domain), 0),
    )


def _read_whole(graph: onnx.GraphProto) -> set[str]:
    """Return the values that a node reads as a whole."""
    return {name for node in graph.node if node.op_type not in _READS_ROWS for name in node.input}


def _expert_shares(graph: onnx.GraphProto) -> dict[str, float]:
    """Return the share of each expert weight that one token reads."""
    counts = {proto.name: proto.dims[0] for proto in graph.initializer if proto.dims}
    shares = {}
    for node in graph.node:
        given = {each.name: each.i for each in node.attribute}
        if node.domain in _OWN_DOMAINS and node.op_type.endswith("Experts") and "top_k" in given:
            for name in node.input[3:]:
                if name in counts:
                    shares[name] = given["top_k"] / given.get("experts", counts[name])
    return shares


def _operator(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _port(value: onnx.ValueInfoProto) -> Port:
    kind = value.type.tensor_type
    dims = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return Port(value.name, _type_name(kind.elem_type), dims)


def _type_name(number: int) -> str:
    return onnx.TensorProto.DataType.Name(number)  # type: ignore[arg-type]  # of a known range


def _tensor(
    proto: onnx.TensorProto,
    folder: Path,
    float_bytes: int | None,
    whole: set[str],
    *,
    is_encoder: bool,
) -> Tensor:
    dtype, shape = _type_name(proto.data_type), tuple(proto.dims)
    outside = {entry.key: entry.value for entry in proto.external_data}
    if outside:
        size, offset = int(outside["length"]), int(outside.get("offset", 0))
        contents = contents_at(folder / outside["location"], offset, size)
    else:
        size, contents = numpy_helper.to_array(proto).nbytes, _inline(proto)
    is_float = dtype in _FLOATS and float_bytes is not None
    return Tensor(
        name=proto.name,
        dtype=dtype,
        shape=shape,
        num_bytes=size,
        loaded_bytes=int(np.prod(shape)) * (float_bytes or 0) if is_float else size,
        part=part_of(proto.name, is_encoder=is_encoder),
        layer=layer_of(proto.name),
        is_read_whole=proto.name in whole,
        contents=contents,
    )


def _inline(proto: onnx.TensorProto) -> Contents:
    def stream() -> Iterator[memoryview]:
        yield memoryview(numpy_helper.to_array(proto).tobytes())

    return stream
