"""The header of a GGUF file, without its weights.

Source: the GGUF specification, version 3. The reader of the package gguf creates an array for each
string of the vocabulary, which takes seconds; this reader skips them.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.model_spec import KVCacheSpec
from edgellm.tools.inspection.report import Graph, Report
from edgellm.tools.inspection.sources.checkpoints import FLOAT_BYTES
from edgellm.tools.inspection.sources.provenance import of_checkpoint
from edgellm.tools.inspection.sources.tensors import Tensor, contents_at, layer_of, part_of

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_LIST = 16  # for longer lists, only the length is reported
_VERSIONS = (2, 3)


class _Header:
    """Reader of consecutive little-endian values."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.place = data, 0

    def number(self, code: str) -> Any:
        """Read a value of a `struct` type."""
        (value,) = struct.unpack_from(f"<{code}", self._data, self.place)
        self.place += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        """Read a string, which begins with its length."""
        length = self.number("Q")
        begin, self.place = self.place, self.place + length
        if self.place > len(self._data):
            raise struct.error("a string reaches beyond the end")
        return self._data[begin : self.place].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Read a value of a GGUF type; long lists are only counted."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        if count <= _MAX_LIST:
            return [self.value(item) for _ in range(count)]
        if item in _SCALARS:
            self.place += count * struct.calcsize(f"<{_SCALARS[item]}")
        else:
            for _ in range(count):
                self.value(item)
        return f"{count} values"


def inspect_gguf(path: Path) -> Report:
    """Return the report of a GGUF file.

    Raises:
        BrokenArtifactError: the file is not a GGUF file, or truncated.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _read(path, _Header(data), len(data))
    except (ValueError, KeyError, struct.error) as error:
        raise BrokenArtifactError(
            f"{path} is not a whole GGUF file ({error})", hint="download or copy it again"
        ) from None
    architecture = str(metadata.get("general.architecture"))
    prefix = f"{architecture}."
    facts = {"architecture": architecture, "name": str(metadata.get("general.name", ""))}
    weights = (tensor for tensor in tensors if not tensor.name.startswith("rope_f"))
    facts["parameters"] = f"{sum(math.prod(tensor.shape) for tensor in weights):,}"
    facts |= {
        key.removeprefix(prefix): str(value)
        for key, value in metadata.items()
        if key.startswith(prefix) and not isinstance(value, list)
    }
    kv = _cache(metadata, prefix)
    context = metadata.get(f"{prefix}context_length")
    return Report(
        path=str(path),
        kind="gguf_file",
        title=f"GGUF file: {architecture}, {kv.num_layers if kv else '?'} layers",
        facts={name: value for name, value in facts.items() if value},
        description=metadata,
        graphs=(Graph("weights", tensors),),
        origins=of_checkpoint(str(path)),
        loads_as="two bytes a number: edgellm-export --dtype fp16 dequantizes blocks",
        kv=kv,
        capacity=context if isinstance(context, int) else 0,
        is_decoder=kv is not None,
    )


def _read(path: Path, header: _Header, size: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    if header.number("4s") != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := header.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version}")
    num_tensors, num_keys = header.number("Q"), header.number("Q")
    metadata = {header.text(): header.value(header.number("I")) for _ in range(num_keys)}
    entries = [_entry(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    data = -(-header.place // alignment) * alignment
    has_head = any(name == "output.weight" for name, *_ in entries)
    tensors = tuple(_tensor(path, data, *entry, has_head=has_head) for entry in entries)
    ends = [
        data + offset + tensor.num_bytes
        for tensor, (*_, offset) in zip(tensors, entries, strict=True)
    ]
    if max(ends, default=0) > size:
        raise ValueError(f"{size} of {max(ends)} bytes")
    return metadata, tensors


def _entry(header: _Header) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Read name, shape (in Hugging Face's order), type and offset of one tensor."""
    name = header.text()
    dims = [header.number("Q") for _ in range(header.number("I"))]
    return name, tuple(dims[::-1]), GGMLQuantizationType(header.number("I")), header.number("Q")


def _tensor(
    path: Path,
    data: int,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    offset: int,
    *,
    has_head: bool,
) -> Tensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = math.prod(shape) // block * block_bytes
    part = part_of(name)
    return Tensor(
        name=name,
        dtype=kind.name,
        shape=shape,
        num_bytes=size,
        loaded_bytes=math.prod(shape) * FLOAT_BYTES,
        part=part,
        layer=layer_of(name),
        is_read_whole=part != "embedding" or not has_head,
        contents=contents_at(path, data + offset, size),
    )


def _cache(metadata: dict[str, Any], prefix: str) -> KVCacheSpec | None:
    """Return the KV cache in float16; None if sizes are missing or differ by layer."""

    def size(key: str, default: int = 0) -> int:
        value = metadata.get(prefix + key, default)
        return value if isinstance(value, int) else 0

    layers, heads = size("block_count"), size("attention.head_count")
    kv_heads = size("attention.head_count_kv", heads)
    head_dim = size("attention.key_length", size("embedding_length") // max(heads, 1))
    if not (layers and kv_heads and head_dim):
        return None
    return KVCacheSpec(num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, dtype="float16")
