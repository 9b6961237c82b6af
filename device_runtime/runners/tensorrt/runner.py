"""Passes over a TensorRT engine; see `runners.Runner`.

Rows are padded to a bucket's, so that a CUDA graph can be replayed; padding stands behind the
rows, where the next pass overwrites it, and no row sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.contract import LimitError
from edgellm.device_runtime.runners import FetchedOutputs
from edgellm.device_runtime.runners.tensorrt.bound_pass import (
    PassRunner,
    bucket_of,
    bucket_sizes,
    fill_mask,
)
from edgellm.device_runtime.runners.tensorrt.cache import DeviceCache
from edgellm.device_runtime.runners.tensorrt.device import CompiledEngine, Device
from edgellm.device_runtime.runners.tensorrt.device_rows import WORD_BYTES, DeviceRows, RowMemory
from edgellm.device_runtime.runners.tensorrt.images import DeviceImages
from edgellm.device_runtime.runners.tensorrt.packed_buffers import (
    Layout,
    Packed,
    Shape,
    packed_bytes,
)
from edgellm.manifest import DecoderSpec

_Sizes = tuple[int, int, int]
_ROWS, _COLUMNS, _OUTPUTS = range(3)  # of a pass, of its mask, and rows that get candidates
_VARYING = {  # sizes of the dimensions that vary, in their order
    contract.INPUT_IDS: (_ROWS,),
    contract.POSITION_IDS: (_ROWS,),
    contract.TREE_MASK: (_ROWS, _COLUMNS),
    contract.LOGITS_INDEX: (_OUTPUTS,),
    contract.DRAFT_HIDDEN: (_ROWS,),
    contract.HIDDEN_TAPS: (_ROWS,),
    contract.TOKEN_IDS: (_OUTPUTS,),
    contract.TOP_LOGITS: (_OUTPUTS,),
    contract.LOGITS: (_OUTPUTS,),
    contract.CANDIDATE_IDS: (_OUTPUTS,),
    contract.CANDIDATE_LOG_PROBS: (_OUTPUTS,),
    contract.RECYCLED_HIDDEN: (_OUTPUTS,),
}
_FEATURES = (contract.HIDDEN_TAPS, contract.DRAFT_HIDDEN, contract.RECYCLED_HIDDEN)
_ON_DEVICE = (contract.LOGITS, *_FEATURES)  # outputs, until somebody asks
_WIDE = (contract.CANDIDATE_IDS, contract.CANDIDATE_LOG_PROBS)  # by as many as were built


class TensorRtRunner:
    """An engine whose passes have rows, with its KV cache where it has one."""

    def __init__(
        self,
        engine: CompiledEngine,
        device: Device,
        *,
        most_rows: int,
        tree_rows: int,
        spec: DecoderSpec | None = None,
        capacity: int = 0,
    ) -> None:
        """Allocate all that passes need.

        Args:
            engine: loaded.
            device: where it was loaded.
            most_rows: of a pass.
            tree_rows: of a pass that recurs, and rows that may get logits or candidates.
            spec: of a network with a cache.
            capacity: rows of the cache.

        Raises:
            LimitError: the device is too small.
        """
        self._engine, self._device, self._capacity = engine, device, capacity
        self.cache = self._images = None
        if spec is not None:
            past, present = (
                engine.tensors[name].shape
                for name in (contract.past_name(0, "key"), contract.present_name(0, "key"))
            )
            self._capacity = past[2]  # what was asked for, or some more
            new_rows = most_rows if present != past else 0
            self.cache = DeviceCache(device, spec.kv, self._capacity, new_rows)
            self._images = DeviceImages(device, engine, spec.vocab_size)
        self._buckets = bucket_sizes(max(tree_rows, 1))
        outputs = [
            name for name, info in engine.tensors.items()
            if not info.is_input and not name.startswith(contract.PRESENT)
        ]  # fmt: skip
        self._names = outputs
        self._picked = [name for name in outputs if name not in _ON_DEVICE]
        most = most_rows, most_rows, self._buckets[-1]
        self._kept = {
            name: device.allocate(self._num_bytes(name, most))
            for name in outputs if name in _ON_DEVICE
        }  # fmt: skip
        self._features = {
            name: device.allocate(self._num_bytes(name, most))
            for name, info in engine.tensors.items() if info.is_input and name in _FEATURES
        }  # fmt: skip
        self._memory = RowMemory(device)
        self._staging: dict[str, NDArray[np.uint8]] = {}
        fixed = {name: buffer.address for name, buffer in self._kept.items()}
        caches = self.cache.addresses if self.cache is not None else {}
        self._passes = PassRunner(
            engine, device, {**caches, **fixed}, packed_bytes(self._inputs(most)),
            packed_bytes(self._picks(most)), self._append,
        )  # fmt: skip
        self._latest: FetchedOutputs | None = None

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """See `runners.Runner`."""
        if self._images is not None:
            self._images.hold(inputs)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> FetchedOutputs:
        """See `runners.Runner`."""
        if self._latest is not None:
            self._latest.expire()
        self._require_candidates(inputs)
        sizes, placed, has_images = _sizes(inputs), {}, False
        if self._images is not None:
            placed, has_images = self._images.of(inputs[contract.INPUT_IDS])
        padded = None if has_images else self._padded(sizes, inputs)
        taken = padded or sizes
        layout, picks = self._inputs(taken), self._picks(taken)
        features = {
            name: (self._shape(name, taken), buffer.address)
            for name, buffer in self._features.items()
        }
        bound = self._passes.bind(layout, picks, {**placed, **features}, keep=padded is not None)
        _fill(bound.inputs, inputs, sizes[_ROWS])
        stays = [self._place(name, inputs[name], taken[_ROWS]) for name in features]
        waits = bool(picks) or not all(stays)
        bound.run(waits=waits)
        if waits and self.cache is not None:
            self.cache.settled()
        self._latest = self._outputs(bound.outputs, sizes, inputs)
        return self._latest

    def _place(self, name: str, rows: NDArray[Any] | DeviceRows, count: int) -> bool:
        """Bring features to where the engine reads them; whether they were on the device."""
        address = self._features[name].address
        stays = isinstance(rows, DeviceRows) and rows.memory.device.stream == self._device.stream
        if isinstance(rows, DeviceRows) and stays:
            padding = count - len(rows.rows)  # a row again: padding may be anything but no number
            taken = np.concatenate([rows.rows, np.repeat(rows.rows[-1:], padding)])
            rows.having(taken).copy_to(address)
            return True
        info, matrix = self._engine.tensors[name], np.asarray(rows)
        host = self._pinned(f"{name} to the device", self._features[name].num_bytes)
        size = math.prod((count, matrix.shape[-1])) * info.dtype.itemsize
        host[:size] = 0
        flat = np.ascontiguousarray(matrix, info.dtype).reshape(-1).view(np.uint8)
        host[: len(flat)] = flat
        self._device.upload(address, host[:size])
        return False

    def _append(self, inputs: Packed) -> None:
        if self.cache is not None:
            rows = inputs.arrays[contract.INPUT_IDS].shape[-1]
            self.cache.append(rows, inputs.addresses[contract.WRITE_INDEX])

    def _require_candidates(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """An engine gives as many candidates of a row as it was built for, and no more."""
        if contract.TOP_K not in inputs:
            return
        top_k = inputs[contract.TOP_K][0]
        built = self._engine.tensors[contract.CANDIDATE_IDS].shape[-1]
        if top_k > built:
            raise LimitError(
                f"--eagleDraftTopK {top_k} exceeds the {built} candidates that the draft engine "
                "gives",
                hint="take less, or build with a larger --maxDraftTreeSize",
            )

    def _padded(self, sizes: _Sizes, inputs: Mapping[str, NDArray[Any]]) -> _Sizes | None:
        """Sizes of a bucket; None where none fits.

        A mask may be wider than asked for, by rows before that all are seen.
        """
        rows, columns, outputs = sizes
        padded = bucket_of(rows, self._buckets)
        wide = columns + padded - rows
        if contract.TREE_MASK in inputs:
            wide = bucket_of(wide, self._buckets)
        if padded > self._buckets[-1]:
            return None
        if self.cache is not None:
            end = int(inputs[contract.WRITE_INDEX][0]) + padded
            if end > self._capacity or wide > min(self._buckets[-1], end):
                return None
        return padded, wide, bucket_of(outputs, self._buckets)

    def _shape(self, name: str, sizes: _Sizes) -> Shape:
        varying = iter(_VARYING.get(name, ()))
        dims = self._engine.tensors[name].shape
        return tuple(sizes[next(varying)] if dim < 0 else dim for dim in dims)

    def _num_bytes(self, name: str, sizes: _Sizes) -> int:
        return math.prod(self._shape(name, sizes)) * self._engine.tensors[name].dtype.itemsize

    def _inputs(self, sizes: _Sizes) -> Layout:
        return {
            name: (self._shape(name, sizes), info.dtype)
            for name, info in self._engine.tensors.items()
            if info.is_input
            and name not in _FEATURES
            and (name in _VARYING or name == contract.WRITE_INDEX)
        }

    def _picks(self, sizes: _Sizes) -> Layout:
        tensors = self._engine.tensors
        return {name: (self._shape(name, sizes), tensors[name].dtype) for name in self._picked}

    def _outputs(
        self,
        picked: Mapping[str, NDArray[Any]],
        sizes: _Sizes,
        inputs: Mapping[str, NDArray[Any]],
    ) -> FetchedOutputs:
        def fetch(name: str) -> NDArray[Any]:
            if name in _FEATURES and self._stays(name):
                return self._rows(name, sizes, outputs)
            if name in self._kept:
                return self._fetch(name, sizes)
            found = picked[name][tuple(slice(size) for size in self._shape(name, sizes))]
            if name in _WIDE:
                found = found[..., : inputs[contract.TOP_K][0]]
            return found.astype(np.float32) if found.dtype == np.float16 else found.copy()

        outputs = FetchedOutputs(self._names, fetch)
        return outputs

    def _stays(self, name: str) -> bool:
        """Whether rows of features can be gathered on the device."""
        info = self._engine.tensors[name]
        return info.shape[-1] * info.dtype.itemsize % WORD_BYTES == 0

    def _rows(self, name: str, sizes: _Sizes, outputs: FetchedOutputs) -> Any:
        """What drafters take for an array [1, rows, width]."""
        _, count, width = self._shape(name, sizes)
        return DeviceRows(
            self._memory, self._kept[name].address, np.arange(count), width,
            self._engine.tensors[name].dtype, require=lambda: outputs.require_latest(name), lead=1,
        )  # fmt: skip

    def _pinned(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        if name not in self._staging:
            self._staging[name] = self._device.pinned(num_bytes)
        return self._staging[name]

    def _fetch(self, name: str, sizes: _Sizes) -> NDArray[np.float32]:
        """From the device, where padding stands behind the rows."""
        host = self._pinned(name, self._kept[name].num_bytes)[: self._num_bytes(name, sizes)]
        self._device.download(host, self._kept[name].address)
        self._device.synchronize()
        dtype, shape = self._engine.tensors[name].dtype, self._shape(name, sizes)
        return host.view(dtype).reshape(shape).astype(np.float32)


def _sizes(inputs: Mapping[str, NDArray[Any]]) -> _Sizes:
    """Of a pass as it is asked for."""
    ids = inputs.get(contract.INPUT_IDS)
    rows = (inputs[contract.HIDDEN_TAPS] if ids is None else ids).shape[1]
    mask, outputs = inputs.get(contract.TREE_MASK), inputs.get(contract.LOGITS_INDEX)
    columns = rows if mask is None else mask.shape[1]
    return rows, columns, rows if outputs is None else len(outputs)


def _fill(bound: Mapping[str, NDArray[Any]], inputs: Mapping[str, NDArray[Any]], rows: int) -> None:
    """Write a pass's inputs, zeros behind them."""
    for name, place in bound.items():
        if name == contract.TREE_MASK:
            fill_mask(place, inputs.get(name), rows)
            continue
        array = inputs[name]
        if place.shape != array.shape:
            place[...] = 0
        place[tuple(slice(size) for size in array.shape)] = array
