"""The KV cache of a session on the device, and the images that a prompt shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.contract import DecoderSpec, EdgeLLMError, KVCacheSpec
from edgellm.device_runtime.positions import PromptPositions
from edgellm.device_runtime.runners.tensorrt.bound_pass import Placed
from edgellm.device_runtime.runners.tensorrt.compaction import WORD_BYTES, displaced
from edgellm.device_runtime.runners.tensorrt.device import Buffer, Device, Engine, Planes
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, aligned
from edgellm.device_runtime.session import I64, ImageRows

_MOST_MOVED = 1024  # rows at once


class DeviceCache:
    """Keys and values of all layers, [2 * layers, 1, num_kv_heads, C, head_dim] in one piece."""

    def __init__(self, device: Device, spec: KVCacheSpec, capacity: int) -> None:
        """Allocate; raises `LimitError` if the device is too small."""
        dtype = np.dtype(spec.dtype)
        row_bytes = spec.head_dim * dtype.itemsize
        if row_bytes % WORD_BYTES:
            raise EdgeLLMError(
                f"rows of {row_bytes} bytes are not moved on a GPU",
                hint="--backend onnxruntime runs heads of this size",
            )
        self._spec, self._dtype, self._device = spec, dtype, device
        planes, plane_bytes = 2 * spec.num_layers * spec.num_kv_heads, capacity * row_bytes
        self._buffer = device.allocate(planes * plane_bytes)
        self._planes = Planes(self._buffer.address, planes, capacity, row_bytes)
        self._rows = Block(device, 4 * _MOST_MOVED)
        self._is_moving = False
        self.addresses: dict[str, int] = {}  # a cache is read and written in one place
        parts = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        for at, (layer, part) in enumerate(parts):
            address = self._buffer.address + at * spec.num_kv_heads * plane_bytes
            self.addresses[contract.past_name(layer, part)] = address
            self.addresses[contract.present_name(layer, part)] = address

    def compact(self, length: int, rows: I64) -> None:
        """See `Session.compact`; does not wait."""
        if not displaced(rows.tolist()):
            return
        if self._is_moving:
            self._device.synchronize()  # the rows before are still read
        packed = self._rows.pack({"rows": (rows.shape, np.int32)})
        packed.arrays["rows"][:] = rows
        self._rows.upload(packed)
        self._device.move_rows(self._planes, packed.addresses["rows"], len(rows), length)
        self._is_moving = True

    def settled(self) -> None:
        """Somebody waited for the device."""
        self._is_moving = False

    def read_rows(self, length: int) -> NDArray:
        """See `Session.read_rows`."""
        spec = self._spec
        rows = self._device.save_rows(self._planes, length).view(self._dtype)
        return rows.reshape(2 * spec.num_layers, 1, spec.num_kv_heads, length, spec.head_dim)

    def write_rows(self, rows: NDArray) -> None:
        """See `Session.write_rows`."""
        flat = np.ascontiguousarray(rows, self._dtype).reshape(self._planes.count, -1)
        self._device.load_rows(self._planes, flat.view(np.uint8))


class DeviceImages:
    """Image rows of a prompt on the device, and one row of zeros for passes without any."""

    def __init__(self, device: Device, engine: Engine, spec: DecoderSpec) -> None:
        self._device, self._first_id = device, spec.vocab_size
        self._names = [
            name for name in (contract.IMAGE_EMBEDS, contract.DEEPSTACK_EMBEDS)
            if name in engine.tensors
        ]  # fmt: skip
        self._dtypes = {name: engine.tensors[name].dtype for name in self._names}
        self._buffers: list[Buffer] = []
        self.positions = PromptPositions()
        none = ImageRows.none(spec.hidden_size, spec.images.num_deepstack if spec.images else 0)
        self._none, self._none_buffers = self._placed(none)
        self._shown = self._none

    def set_images(self, images: ImageRows) -> None:
        """See `Session.set_images`."""
        self.positions.set_images(images)
        self._shown, self._buffers = self._placed(images)

    def of(self, token_ids: I64) -> tuple[Placed, bool]:
        """What a pass over these tokens reads, and whether it is more than the row of zeros."""
        has_images = bool(self._names) and bool((token_ids >= self._first_id).any())
        return (self._shown if has_images else self._none), has_images

    def _placed(self, images: ImageRows) -> tuple[Placed, list[Buffer]]:
        arrays = {
            contract.IMAGE_EMBEDS: images.embeds, contract.DEEPSTACK_EMBEDS: images.deepstack
        }  # fmt: skip
        placed, buffers = {}, []
        for name in self._names:
            array = arrays[name].astype(self._dtypes[name])
            buffers.append(self._device.allocate(aligned(array.nbytes)))
            host = self._device.pinned(array.nbytes)
            host[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._device.upload(buffers[-1].address, host)
            self._device.synchronize()
            placed[name] = (array.shape, buffers[-1].address)
        return placed, buffers
