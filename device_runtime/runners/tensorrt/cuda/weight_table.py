"""Weights in device memory, passed to kernels as a table of addresses.

TensorRT gets only the table, so such weights are no constants of a plan. The file of an engine
begins with the table (`kernels/triton/weights.py`), whose addresses are offsets in the file. The
place of each matrix follows. Engines of a process that have the same matrix, as a draft and its
base, share its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import BrokenArtifactError
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import (
    ADDRESSED_SUFFIX,
    Buffer,
    Device,
    TensorInfo,
)

MAGIC = 0x656467656C6C6D  # as in the kernels
HEADER, ADDRESSES = 2, 4  # entries of the header, and of each matrix
# Offsets of a matrix's tensors in the file, and their SHA-256; its weights may be another's.
PLACE = np.dtype([("first", np.int64), ("end", np.int64), ("digest", np.uint8, 32)])
_PIECE_BYTES = 16 << 20  # of a file, in one copy
_AGAIN = "build the engine again"
_FORMER_TABLE = "expert_table"  # input of engines from before other weights had addresses
_loaded: weakref.WeakValueDictionary[tuple[int, bytes], Buffer] = weakref.WeakValueDictionary()


def table_entries(num_matrices: int) -> int:
    """Number of entries of the table."""
    return HEADER + ADDRESSES * num_matrices


class DeviceWeights:
    """Matrices of a file on the device."""

    def __init__(self, *, device: Device, entries: int, path: Path) -> None:
        """Load the file.

        Args:
            device: that computes.
            entries: of the table.
            path: the file.

        Raises:
            BrokenArtifactError: it is missing, damaged or of another engine.
            LimitError: the device has too little memory.
        """
        table, places = _read_table(path)
        if len(table) != entries:
            raise _of_another(path)
        self._device, self._buffers = device, [device.allocate(table.nbytes)]
        largest = int((places["end"] - places["first"]).max())
        host = device.pinned(max(table.nbytes, min(largest, _PIECE_BYTES)))
        addresses = table.copy()
        for place in places[places["first"] < places["end"]]:
            buffer = self._load(path, place, host)
            self._buffers.append(buffer)
            is_here = (table >= place["first"]) & (table < place["end"])
            is_here[:HEADER] = False
            addresses[is_here] += buffer.address - place["first"]
        host[: table.nbytes] = addresses.view(np.uint8)
        device.upload(self._buffers[0].address, host[: table.nbytes])
        device.synchronize()
        self.addresses = {graph_io.WEIGHT_TABLE: self._buffers[0].address}

    def _load(self, path: Path, place: np.void, host: NDArray[np.uint8]) -> Buffer:
        """A matrix on the device, where it may be already; `host` is pinned."""
        device, first, num_bytes = self._device, int(place["first"]), _num_bytes(place)
        key = device.stream, bytes(place["digest"])
        if (known := _loaded.get(key)) is not None:
            return known
        buffer = device.allocate(num_bytes)
        with path.open("rb") as stream:
            stream.seek(first)
            for at in range(0, num_bytes, len(host)):
                piece = host[: min(len(host), num_bytes - at)]
                stream.readinto(piece.data)
                device.upload(buffer.address + at, piece)
                device.synchronize()  # the next piece takes the host's memory
        _loaded[key] = buffer
        return buffer


def loaded_bytes(path: Path, device: Device) -> int:
    """Bytes of a file's matrices that are on the device, for another engine.

    Raises:
        BrokenArtifactError: as `DeviceWeights`.
    """
    _, places = _read_table(path)
    there = [each for each in places if (device.stream, bytes(each["digest"])) in _loaded]
    return sum(map(_num_bytes, there))


def _num_bytes(place: np.void) -> int:
    return int(place["end"] - place["first"])


def _read_table(path: Path) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Table and places of a file; raises `BrokenArtifactError`."""
    try:
        num_bytes = path.stat().st_size
        count, magic = (*np.fromfile(path, np.int64, HEADER), 0, 0)[:HEADER]
        entries = table_entries(int(count))
        if count ^ MAGIC != magic or not 0 < count <= num_bytes // PLACE.itemsize:
            raise _of_another(path)
        table = np.fromfile(path, np.int64, entries)
        places = np.fromfile(path, PLACE, int(count), offset=table.nbytes)
    except OSError as error:
        raise BrokenArtifactError(f"weights cannot be read: {error}", hint=_AGAIN) from None
    offsets, is_whole = table[HEADER:], len(table) == entries and len(places) == count
    is_inside = is_whole and places["first"].min() > 0 and places["end"].max() <= num_bytes
    if not is_inside or offsets.min() < 0 or offsets.max() >= num_bytes:
        raise _of_another(path)
    return table, places


def _of_another(path: Path) -> BrokenArtifactError:
    return BrokenArtifactError(f"{path} does not hold the weights of its engine", hint=_AGAIN)


def open_weights(
    tensors: Mapping[str, TensorInfo], device: Device, plan: Path
) -> DeviceWeights | None:
    """Weights by address of the engine with these tensors, if any.

    `plan` is the engine's own file. Raises as `DeviceWeights`, and for an older edgellm's engine.
    """
    if _FORMER_TABLE in tensors:
        raise BrokenArtifactError(f"{plan} is of an older edgellm", hint=_AGAIN)
    table = tensors.get(graph_io.WEIGHT_TABLE)
    if table is None:
        return None
    path = plan.with_suffix(ADDRESSED_SUFFIX)
    return DeviceWeights(device=device, entries=table.shape[0], path=path)
