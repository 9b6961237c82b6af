"""A checkpoint's pooling, with the weights of the layers after it, and their file in bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.model_spec import POOLER_FILE, PoolerSpec
from edgellm.export.checkpoints.checkpoint import (
    TensorInfo,
    TensorSource,
    read_whole,
    write_safetensors,
)

_REMEDY = "download or copy the checkpoint again"

F32 = NDArray[np.float32]
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # as NumPy reads them


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """Pooling of hidden states, and what follows it; see `PoolerSpec`."""

    pooling: str  # one of `POOLINGS`
    spec: PoolerSpec
    tensors: dict[str, F32] = field(default_factory=dict, repr=False)  # by name in `POOLER_FILE`


def read_floats(source: TensorSource, name: str, shape: tuple[int, ...], owner: str) -> F32:
    """A float tensor as float32.

    Args:
        source: of the tensor.
        name: of the tensor.
        shape: that it must have.
        owner: for errors.

    Raises:
        BrokenArtifactError: it is absent, has another shape, or is not finite.
        UnsupportedModelError: it is not stored as floats.
    """
    info = source.infos().get(name)
    if info is None:
        raise BrokenArtifactError(f"{owner} has no tensor {name}", hint="copy the model again")
    if info.shape != shape:
        raise BrokenArtifactError(
            f"{owner}: {name} has the shape {list(info.shape)}, its config says {list(shape)}",
            hint="the config and the weights are of different saves",
        )
    return _as_floats(bytes(read_whole(source, name)), info.dtype, f"{owner}: {name}").reshape(
        shape
    )


def read_rows(source: TensorSource, name: str, rows: Sequence[int], width: int) -> list[F32]:
    """Rows of a float matrix [..., width], as float32; raises as `read_floats`."""
    info = source.infos().get(name)
    if info is None:
        raise BrokenArtifactError(f"the checkpoint has no tensor {name}", hint=_REMEDY)
    if len(info.shape) != 2 or info.shape[1] != width or info.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{name} has type {info.dtype} and shape {list(info.shape)}, not floats [..., {width}]",
            hint="give the checkpoint with a float head",
        )
    size, begin, found = info.num_bytes // info.shape[0], 0, dict[int, bytearray]()
    for piece in source.stream(name):
        for row in rows:
            first, end = max(row * size - begin, 0), min((row + 1) * size - begin, len(piece))
            if first < end:
                found.setdefault(row, bytearray()).extend(piece[first:end])
        begin += len(piece)
    return [_as_floats(bytes(found[row]), info.dtype, name) for row in rows]


def _as_floats(data: bytes, dtype: str, name: str) -> F32:
    if dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{name} has type {dtype}", hint=f"convert it to {', '.join(_FLOATS)}"
        )
    stored = np.frombuffer(data, _FLOATS[dtype])
    if dtype == "BF16":
        array = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        array = stored.astype(np.float32)
    if not np.isfinite(array).all():
        raise BrokenArtifactError(f"{name} has numbers that are not finite", hint=_REMEDY)
    return array


def write_pooler(folder: Path, tensors: Mapping[str, F32]) -> None:
    """Write the weights of a pooler's layers into a bundle; none: no file."""
    if tensors:
        write_safetensors(folder / POOLER_FILE, _Arrays(tensors), sorted(tensors))


class _Arrays:
    """Arrays as a `TensorSource`."""

    def __init__(self, arrays: Mapping[str, F32]) -> None:
        self._arrays = arrays

    def infos(self) -> dict[str, TensorInfo]:
        """All tensors by name."""
        return {name: TensorInfo("F32", each.shape) for name, each in self._arrays.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource`."""
        yield memoryview(np.ascontiguousarray(self._arrays[name], "<f4").tobytes())
