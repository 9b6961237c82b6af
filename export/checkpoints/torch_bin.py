"""Reader of torch checkpoints, `pytorch_model.bin`; the only reader here that needs torch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import CHUNK_BYTES, TensorInfo

_TYPES = {
    "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.float64": "F64", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
    "torch.bool": "BOOL",
    "torch.int8": "I8", "torch.uint8": "U8", "torch.int16": "I16", "torch.int32": "I32",
    "torch.int64": "I64",
}  # fmt: skip


class TorchFiles:
    """The tensors of one or several files that `torch.save` wrote, mapped into memory."""

    def __init__(self, paths: list[Path]) -> None:
        """Open all files without executing their code.

        Raises:
            EdgeLLMError: torch is not installed.
            BrokenArtifactError: a file is missing, damaged, has more than tensors, or a tensor that
                differs from that of an earlier file.
        """
        self._tensors: dict[str, Any] = {}
        places: dict[str, Path] = {}
        for path in paths:
            for name, tensor in _load(path).items():
                if name in places and not _are_equal(self._tensors[name], tensor):
                    raise BrokenArtifactError(
                        f"{places[name]} and {path} hold different tensors {name}",
                        hint="one of these files is from another save; copy the checkpoint again",
                    )
                self._tensors[name], places[name] = tensor, path
        self._infos = {name: _info(name, tensor) for name, tensor in self._tensors.items()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major data in pieces of at most `CHUNK_BYTES`."""
        import torch

        flat = self._tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        data = memoryview(flat.numpy())
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


def _are_equal(one: Any, other: Any) -> bool:
    import torch

    return one.dtype == other.dtype and torch.equal(one, other)


def _load(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise EdgeLLMError(
            f"{path.name} is in torch's own format, and torch is not installed",
            hint="pip install torch, or convert the file to model.safetensors elsewhere",
        ) from None
    remedy = "download or copy the file again"
    try:
        mapped = zipfile.is_zipfile(path)  # the format of before 2020 cannot be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise BrokenArtifactError(f"{path} is missing", hint=remedy) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle makes torch raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BrokenArtifactError(
            f"{path} is not a file of tensors that torch can read ({reason[:120]})", hint=remedy
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in state.values()
    ):
        raise BrokenArtifactError(f"{path} holds more than named tensors", hint=remedy)
    return state


def _info(name: str, tensor: Any) -> TensorInfo:
    dtype = _TYPES.get(str(tensor.dtype))
    if dtype is None:
        raise UnsupportedModelError(f"{name} has type {tensor.dtype}")
    return TensorInfo(dtype, tuple(tensor.shape))
