"""Merges a LoRA adapter into a checkpoint's linear layers while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.peft_adapter import HEAD, Adapter, LowRank, read_adapter
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo, TensorSource, read_whole
from edgellm.export.checkpoints.weights import ONNX_TYPES, as_bytes

_FLOATS = "F32", "F16", "BF16"
_HEAD, _EMBEDDING = f"{HEAD}.weight", "model.embed_tokens.weight"


def merged(tower: Checkpoint, lora_dir: str) -> Checkpoint:
    """A language model with W + scale * B A instead of W, in the stored type of W.

    A tied head that the adapter changes becomes a weight of its own: the embedding stays.

    Args:
        tower: a language model alone.
        lora_dir: a folder of PEFT.

    Raises:
        UnsupportedModelError: the weights are quantized, or the model lacks layers.
        BrokenArtifactError: a damaged adapter, or wrong sizes.
        EdgeLLMError: the folder has no adapter.
    """
    adapter = read_adapter(Path(lora_dir).expanduser())
    if tower.quantization != "none" or tower.blocks is not None:
        kind = "GGUF" if tower.blocks is not None else tower.quantization
        raise UnsupportedModelError(
            f"--lora_dir {lora_dir}: the weights of {tower.label} are quantized ({kind}), and sums "
            "with an adapter would have to be rounded anew",
            hint="export the float checkpoint with --lora_dir and round it with llm_build "
            "--quantize, or keep the adapter apart: llm_build --maxLoraRank",
        )
    infos = tower.tensors.infos()
    changes = {f"{name}.weight": change for name, change in adapter.layers.items()}
    if _HEAD in changes and _EMBEDDING in infos:
        infos = {_HEAD: infos[_EMBEDDING], **infos}
    for name, change in changes.items():
        _check(adapter, name, change, infos)
    tensors = _Merged(source=tower.tensors, infos=infos, adapter=adapter, changes=changes)
    return replace(tower, tensors=tensors)


def _check(adapter: Adapter, name: str, change: LowRank, infos: Mapping[str, TensorInfo]) -> None:
    info, shape = infos.get(name), (change.out_features, change.in_features)
    if info is None:
        raise UnsupportedModelError(
            f"{adapter.folder} changes {name}, which the language model does not have"
        )
    if info.dtype not in _FLOATS:
        raise UnsupportedModelError(f"{adapter.folder} changes {name}, which is {info.dtype}")
    if info.shape != shape:
        raise BrokenArtifactError(
            f"{adapter.folder} was made for another model: its change of {name} is {list(shape)}, "
            f"the weight {list(info.shape)}"
        )


def floats(tensors: TensorSource, name: str) -> NDArray[np.float32]:
    """A float tensor as float32."""
    info = tensors.infos()[name]
    values = np.frombuffer(read_whole(tensors, name), ONNX_TYPES[info.dtype].numpy())
    return values.astype(np.float32).reshape(info.shape)


class _Merged:
    """See `TensorSource`; merges changed weights some rows at a time."""

    def __init__(
        self,
        *,
        source: TensorSource,
        infos: Mapping[str, TensorInfo],
        adapter: Adapter,
        changes: Mapping[str, LowRank],
    ) -> None:
        """`infos`: of the source, and perhaps of a head that it has as the embedding only."""
        self._source, self._infos, self._adapter, self._changes = source, infos, adapter, changes

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        if name not in self._changes:
            yield from self._source.stream(name)
            return
        change, dtype = self._changes[name], ONNX_TYPES[self.infos()[name].dtype].numpy()
        a = floats(self._adapter.tensors, change.a)
        b = floats(self._adapter.tensors, change.b) * np.float32(change.scale)
        row_bytes, row, waiting = change.in_features * dtype.itemsize, 0, bytearray()
        for piece in self._source.stream(name if name in self._source.infos() else _EMBEDDING):
            waiting += piece
            rows = len(waiting) // row_bytes
            weight = np.frombuffer(bytes(waiting[: rows * row_bytes]), dtype).reshape(rows, -1)
            del waiting[: rows * row_bytes]
            yield as_bytes((weight.astype(np.float32) + b[row : row + rows] @ a).astype(dtype))
            row += rows
        if waiting:
            raise BrokenArtifactError(f"tensor {name} ends within a row")
