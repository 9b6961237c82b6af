"""Passes over graphs of `cuda_lowering`: everything lies on the device, which is named by data.

The host says what rows see and where they go. Slots are looked at in steps of `STEP`, so that
bindings serve many passes; what stands behind the live rows is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.contract import DecoderSpec, KVCacheSpec, LimitError
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    CPU,
    HOST_INPUTS,
    KEPT,
    SLOTS,
    VISIBLE,
    input_types,
)
from edgellm.device_runtime.runners.onnxruntime_images import KEPT_ROWS, Shown
from edgellm.device_runtime.session import I64, Bool, require_room

STEP = 64


class _Buffers:
    """Arrays of the host and their copies on a device, bound as inputs."""

    def __init__(
        self, device: str, arrays: Mapping[str, np.ndarray], binding: ort.IOBinding
    ) -> None:
        self.arrays = arrays
        self._values = {
            name: allocate(array.shape, array.dtype, CPU if name in HOST_INPUTS else device)
            for name, array in arrays.items()
        }
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)

    def upload(self) -> None:
        for name, array in self.arrays.items():
            self._values[name].update_inplace(array)


def allocate(shape: Sequence[int], dtype: np.dtype, device: str) -> ort.OrtValue:
    """Memory on a device; raises `LimitError` if there is not so much."""
    try:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, device)
    except Exception as error:  # noqa: BLE001 - the classes are private to the extension module
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raise LimitError(
            f"{size / 1e6:.0f} MB cannot be had on the device: {str(error).splitlines()[0]}",
            hint="close other programs, or build with a smaller --maxKVCacheCapacity",
        ) from None


class DeviceCache:
    """Keys and values of all layers on a device, each [1, num_kv_heads, C, head_dim]."""

    def __init__(self, spec: KVCacheSpec, capacity: int, device: str) -> None:
        self._heads, self._device = spec.num_kv_heads, device
        shape = (1, spec.num_kv_heads, capacity, spec.head_dim)
        names = [(layer, part) for layer in range(spec.num_layers) for part in ("key", "value")]
        zeros = np.zeros(shape, spec.dtype)
        self._values = {name: allocate(shape, zeros.dtype, device) for name in names}
        for value in self._values.values():
            value.update_inplace(zeros)  # masked rows must be numbers, too

    def bind(self, binding: ort.IOBinding) -> None:
        """As inputs, and in the same place as outputs."""
        for (layer, part), value in self._values.items():
            binding.bind_ortvalue_input(contract.past_name(layer, part), value)
            binding.bind_ortvalue_output(contract.present_name(layer, part), value)

    def compact(self, graph: ort.InferenceSession, length: int, rows: I64) -> None:
        """See `Session.compact`; `graph` is that of `ROWS_GRAPH`."""
        if rows[-1] + 1 == len(rows):
            return  # they stand where they belong
        binding = graph.io_binding()
        slots = slot_indices(self._heads, len(rows))
        slots[..., 2] = length + np.arange(len(rows))
        buffers = _Buffers(self._device, {KEPT: length + rows, SLOTS: slots}, binding)
        self.bind(binding)
        buffers.upload()
        graph.run_with_iobinding(binding)

    def read_rows(self, length: int) -> np.ndarray:
        """The whole cache passes to the host; it is asked for once a prompt at most."""
        return np.stack([value.numpy()[:, :, :length] for value in self._values.values()])

    def write_rows(self, rows: np.ndarray) -> None:
        """See `Session.write_rows`."""
        for value, found in zip(self._values.values(), rows, strict=True):
            array = value.numpy()
            array[:, :, : found.shape[-2]] = found
            value.update_inplace(array)


def slot_indices(num_kv_heads: int, rows: int) -> I64:
    """Where rows go, int64 [1, num_kv_heads, rows, 3]; the slots are still to be filled in."""
    indices = np.zeros((1, num_kv_heads, rows, 3), np.int64)
    indices[..., 1] = np.arange(num_kv_heads)[:, None]
    return indices


def fill_visible(
    out: Bool, write_index: int, positions: I64, mask: Bool | None, window: int | None
) -> None:
    """Write what rows see.

    Args:
        out: bool [S, T].
        write_index: slots before the new rows.
        positions: int64 [S], of the new rows.
        mask: bool [S, M], rules the last M slots up to the new rows'; None is causal.
        window: of positions that a row sees, its own included; None: all.
    """
    rows, width = out.shape
    end = write_index + rows
    mask = np.tri(rows, dtype=np.bool_) if mask is None else mask
    first = end - mask.shape[1]
    out[:, :first], out[:, first:end], out[:, end:] = True, mask, False
    if window is not None:
        slots = np.arange(width)
        slots[write_index:end] = positions
        out &= slots > positions[:, None] - window


class BoundPass:
    """One graph bound for fixed sizes."""

    def __init__(
        self,
        session: ort.InferenceSession,
        device: str,
        cache: DeviceCache,
        shown: Shown,
        arrays: Mapping[str, np.ndarray],
        outputs: Mapping[str, str],
    ) -> None:
        """Bind.

        Args:
            session: computes on `device`.
            device: where the arrays go.
            cache: read and written in one place.
            shown: the images at hand.
            arrays: inputs; those that the graph does not have are ignored.
            outputs: names, with the device that each is wanted on.
        """
        self._session, self._shown, self._version = session, shown, 0
        self._binding = session.io_binding()
        types = input_types(session)
        taken = {name: array.astype(types[name]) for name, array in arrays.items() if name in types}
        self._buffers = _Buffers(device, taken, self._binding)
        given = {value.name for value in session.get_outputs()}
        self._order = [name for name in outputs if name in given]
        for name in self._order:
            self._binding.bind_output(name, outputs[name])
        cache.bind(self._binding)

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """Of the next run."""
        return self._buffers.arrays

    def place(
        self, write_index: int, position_ids: I64 | None, mask: Bool | None, window: int | None
    ) -> None:
        """Say where the rows stand and what they see."""
        positions, slots = self.inputs[contract.POSITION_IDS], self.inputs[SLOTS]
        offsets = np.arange(slots.shape[2]) + write_index
        slots[..., 2] = offsets
        self._shown.place(offsets if position_ids is None else position_ids, positions)
        fill_visible(self.inputs[VISIBLE], write_index, positions[0], mask, window)

    def run(self) -> None:
        """Compute; outputs hold what came of it until the next run."""
        if self._version != self._shown.version:
            for name, value in self._shown.values.items():
                self._binding.bind_ortvalue_input(name, value)
            self._version = self._shown.version
        self._buffers.upload()
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()

    def fetch(self, name: str) -> np.ndarray | None:
        """An output in the host's memory; None where the graph has none of that name."""
        if name not in self._order:
            return None
        return self._binding.get_outputs()[self._order.index(name)].numpy()


class Passes:
    """Binds passes of a graph; those of a number of steps are kept until it grows."""

    def __init__(
        self, graph: ort.InferenceSession, spec: DecoderSpec, capacity: int, device: str
    ) -> None:
        self.cache = DeviceCache(spec.kv, capacity, device)
        types = input_types(graph)
        self.shown = Shown(spec, device, types.get(contract.IMAGE_EMBEDS, np.float32))
        self._graph, self._spec, self._capacity, self._device = graph, spec, capacity, device
        self._kept: dict[tuple[int, ...], BoundPass] = {}
        self._width = 0

    def bind(
        self,
        token_ids: I64,
        write_index: int,
        output_rows: I64,
        more: Mapping[str, np.ndarray],
        outputs: Mapping[str, str],
    ) -> BoundPass:
        """A pass with its ids; `more` are inputs that base and draft do not have in common."""
        rows, heads = len(token_ids), len(output_rows)
        require_room(self._capacity, write_index, rows)
        width = min(-(-(write_index + rows) // STEP) * STEP, self._capacity)
        if width != self._width:
            self._width = width
            self._kept.clear()
        key = (rows, heads, *(int(array[0]) for name, array in more.items() if name in HOST_INPUTS))
        bound = self._kept.get(key)
        if bound is None:
            arrays = {
                contract.INPUT_IDS: np.zeros((1, rows), np.int64),
                contract.POSITION_IDS: np.zeros((self._spec.position_axes, rows), np.int64),
                contract.LOGITS_INDEX: np.zeros(heads, np.int64),
                VISIBLE: np.zeros((rows, width), np.bool_),
                SLOTS: slot_indices(self._spec.kv.num_kv_heads, rows),
                **more,
            }
            bound = BoundPass(self._graph, self._device, self.cache, self.shown, arrays, outputs)
            if rows <= KEPT_ROWS:
                self._kept[key] = bound
        for name, array in (
            (contract.INPUT_IDS, token_ids), (contract.LOGITS_INDEX, output_rows), *more.items()
        ):  # fmt: skip
            bound.inputs[name][:] = array
        return bound
