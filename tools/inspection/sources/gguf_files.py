"""Reports of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.model_spec import KVCacheSpec
from edgellm.export.checkpoints.checkpoint import CHUNK_BYTES
from edgellm.export.checkpoints.gguf.reader import GGUFTensor, read_gguf
from edgellm.tools.inspection.report import Graph, Report
from edgellm.tools.inspection.sources.checkpoints import FLOAT_BYTES
from edgellm.tools.inspection.sources.provenance import of_checkpoint
from edgellm.tools.inspection.sources.tensors import Tensor, layer_of, part_of

_MAX_LIST = 16  # for longer lists, only the length is reported


def inspect_gguf(path: Path) -> Report:
    """Return the report of a GGUF file.

    Raises:
        BrokenArtifactError: the file is not a GGUF file, or truncated.
    """
    try:
        file = read_gguf(path)
    except ValueError as error:
        raise BrokenArtifactError(
            f"{path} is not a whole GGUF file ({error})", hint="download or copy it again"
        ) from None
    metadata = {key: _short(value) for key, value in file.metadata.items()}
    has_head = any(tensor.name == "output.weight" for tensor in file.tensors)
    tensors = tuple(_tensor(tensor, has_head=has_head) for tensor in file.tensors)
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
        graphs=(Graph(name="weights", tensors=tensors),),
        origins=of_checkpoint(str(path)),
        loads_as="two bytes a number: edgellm-export --dtype fp16 dequantizes blocks",
        kv=kv,
        capacity=context if isinstance(context, int) else 0,
        is_decoder=kv is not None,
    )


def _short(value: Any) -> Any:
    is_long = isinstance(value, list) and len(value) > _MAX_LIST
    return f"{len(value)} values" if is_long else value


def _tensor(stored: GGUFTensor, *, has_head: bool) -> Tensor:
    part = part_of(stored.name)

    def contents() -> Iterator[memoryview]:
        data = stored.data.reshape(-1)
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES].data

    return Tensor(
        name=stored.name,
        dtype=stored.kind,
        shape=stored.shape,
        num_bytes=stored.data.nbytes,
        loaded_bytes=math.prod(stored.shape) * FLOAT_BYTES,
        part=part,
        layer=layer_of(stored.name),
        is_read_whole=part != "embedding" or not has_head,
        contents=contents,
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
