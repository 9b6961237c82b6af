"""Weights of experts in device memory, passed to kernels as a table of addresses.

TensorRT gets only the table, so experts are no constants of a plan. The file of an engine begins
with the table (`kernels/triton/experts.py`), whose addresses are offsets in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import BrokenArtifactError
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import (
    ADDRESSED_SUFFIX,
    Device,
    TensorInfo,
)

MAGIC = 0x656467656C6C6D  # as in the kernels
HEADER, ADDRESSES = 2, 4  # entries of the header, and of each projection
_PROJECTIONS = 3
_PIECE_BYTES = 16 << 20  # of a file, in one copy
_AGAIN = "build the engine again"


def table_entries(num_layers: int) -> int:
    """Number of entries of the table of experts for `num_layers`."""
    return HEADER + _PROJECTIONS * ADDRESSES * num_layers


class DeviceWeights:
    """A file of experts on the device."""

    def __init__(self, *, device: Device, entries: int, path: Path) -> None:
        """Load the file.

        Args:
            device: that computes.
            entries: of the table.
            path: the file.

        Raises:
            BrokenArtifactError: it is missing, damaged or of other layers.
            LimitError: the device has too little memory.
        """
        table = _read_table(path, entries)
        num_bytes = path.stat().st_size
        self._buffer = device.allocate(num_bytes)
        host = device.pinned(min(num_bytes, _PIECE_BYTES))
        with path.open("rb") as stream:
            for first in range(0, num_bytes, _PIECE_BYTES):
                piece = host[: min(_PIECE_BYTES, num_bytes - first)]
                stream.readinto(piece.data)
                if first == 0:
                    piece[: table.nbytes] = _addresses(table, self._buffer.address).view(np.uint8)
                device.upload(self._buffer.address + first, piece)
                device.synchronize()  # the next piece takes the host's memory
        self.addresses = {graph_io.WEIGHT_TABLE: self._buffer.address}


def _read_table(path: Path, entries: int) -> NDArray[np.int64]:
    """The table of a file; raises `BrokenArtifactError`."""
    try:
        table = np.fromfile(path, np.int64, entries)
        num_bytes = path.stat().st_size
    except OSError as error:
        raise BrokenArtifactError(
            f"the weights of experts cannot be read: {error}", hint=_AGAIN
        ) from None
    offsets = table[HEADER:]
    is_whole = len(table) == entries and table[0] ^ MAGIC == table[1]
    if not is_whole or offsets.min() < 0 or offsets.max() >= num_bytes:
        raise BrokenArtifactError(
            f"{path} does not hold the experts of its engine, whose table has {entries} entries",
            hint=_AGAIN,
        )
    return table


def _addresses(table: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The table with addresses in place of offsets; 0 stays 0."""
    offsets = table[HEADER:]
    return np.concatenate([table[:HEADER], np.where(offsets > 0, offsets + first, 0)])


def open_weights(
    tensors: Mapping[str, TensorInfo], device: Device, plan: Path
) -> DeviceWeights | None:
    """Experts of the engine with these tensors, if it has any; see `DeviceWeights`, which raises.

    `plan` is the engine's own file.
    """
    table = tensors.get(graph_io.WEIGHT_TABLE)
    if table is None:
        return None
    path = plan.with_suffix(ADDRESSED_SUFFIX)
    return DeviceWeights(device=device, entries=table.shape[0], path=path)
