"""Matrices on the device that act as numpy arrays: hidden states for drafts.

Drafters index, concatenate and assign rows; each of these operations enqueues a copy within the
device. Conversion to a numpy array copies to the host.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import LimitError
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Buffer, Device

_log = logging.getLogger(__name__)
WORD_BYTES = 16  # unit of copies
_LARGEST_KEPT_BYTES = 4 << 20  # larger buffers (prompts) are freed, not reused


class RowMemory:
    """A pool of device buffers, since each allocation synchronizes."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._unused: dict[int, list[Buffer]] = defaultdict(list)
        self._host = device.pinned(0)

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least `num_bytes`; the stream may still use its former contents."""
        size = num_bytes
        if num_bytes <= _LARGEST_KEPT_BYTES:
            size = 1 << max(num_bytes - 1, 255).bit_length()
        unused = self._unused[size]
        return unused.pop() if unused else self.device.allocate(size)

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool; large ones are freed."""
        if buffer.num_bytes <= _LARGEST_KEPT_BYTES:
            self._unused[buffer.num_bytes].append(buffer)

    def fetch(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """A copy in host memory; synchronous."""
        if len(self._host) < num_bytes:
            self._host = self.device.pinned(num_bytes)
        self.device.download(self._host[:num_bytes], address)
        self.device.synchronize()
        return self._host[:num_bytes].copy()


class _Store:
    """A buffer that returns to the pool when its last `DeviceRows` is deleted."""

    def __init__(self, memory: RowMemory, num_bytes: int) -> None:
        buffer = memory.take(num_bytes)
        self.address = buffer.address
        # `__del__` is too late in a reference cycle: the buffer's finalizer has freed it by then.
        weakref.finalize(self, memory.give_back, buffer).atexit = False


class DeviceRows:
    """Selected rows [count, width] of a matrix on the device, or a single one, [width].

    Attributes:
        rows: int64, indices of the matrix's rows.
        width: numbers in a row.
        dtype: on the device; host arrays are float32.
    """

    __array_priority__ = 1.0

    def __init__(
        self,
        *,
        memory: RowMemory,
        address: int,
        rows: NDArray[np.int64],
        width: int,
        dtype: np.dtype,
        require: Callable[[], None] = lambda: None,
        store: _Store | None = None,
        lead: int = 0,
    ) -> None:
        """Wrap.

        Args:
            memory: pool for copies.
            address: of the matrix.
            rows: indices of rows.
            width: numbers in a row.
            dtype: of a number.
            require: raises `ValueError` if the matrix has been overwritten.
            store: owner of the matrix; None: a runner.
            lead: number of leading dimensions of size 1; -1: a single row.
        """
        self.memory, self.rows, self.width, self.dtype = memory, rows, width, dtype
        self._address, self._require, self._store, self._lead = address, require, store, lead

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the device."""
        return self.width * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as an array."""
        return (self.width,) if self._lead < 0 else (*[1] * self._lead, len(self.rows), self.width)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> DeviceRows:
        keys = key if isinstance(key, tuple) else (key,)
        if all(each is None for each in keys):
            return self._of(self.rows, self._lead + len(keys))
        if self._lead > 0 and key == 0:
            return self._of(self.rows, self._lead - 1)
        assert self._lead == 0, "rows of rows"
        if isinstance(key, (int, np.integer)):
            return self._of(self.rows[[int(key)]], -1)
        return self._of(self.rows[key], 0)

    def __setitem__(self, key: Any, value: DeviceRows | NDArray[np.floating]) -> None:
        (places,) = np.atleast_1d(self.rows[key])[None]
        assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
        if not isinstance(value, DeviceRows):
            value = _uploaded(self.memory, np.atleast_2d(value), self.dtype)
        value.copy_to(self._address + int(places[0]) * self.row_bytes)

    def copy_to(self, address: int) -> None:
        """Enqueue a copy of these rows to consecutive memory."""
        self._require()
        device = self.memory.device
        device.gather_rows(address, self._address, self.rows, self.row_bytes)

    def having(self, rows: NDArray[np.int64]) -> DeviceRows:
        """Other rows of the same matrix."""
        return self._of(rows, 0)

    def copy(self) -> DeviceRows | NDArray[np.float32]:
        """A copy; on the host if the device has too little memory for a prompt's rows."""
        try:
            copied = _blank(self, len(self.rows))
        except LimitError as error:
            _log.warning("%s; a prompt's hidden states go to the host, which is slower", error)
            return np.asarray(self)
        self.copy_to(copied._address)
        return copied._of(copied.rows, self._lead)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        del copy  # it always is one
        self._require()
        first, end = (int(self.rows.min()), int(self.rows.max()) + 1) if len(self.rows) else (0, 0)
        size = (end - first) * self.row_bytes
        found = self.memory.fetch(self._address + first * self.row_bytes, size)
        matrix = found.view(self.dtype).reshape(-1, self.width)[self.rows - first]
        return matrix.reshape(self.shape).astype(np.float32 if dtype is None else dtype)

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        del types
        if func is np.concatenate and not kwargs:
            return _joined(args[0])
        if func is np.zeros_like and set(kwargs) == {"shape"}:
            count, width = kwargs["shape"]
            assert width == self.width
            return _blank(self, count)
        plain = [np.asarray(each) if isinstance(each, DeviceRows) else each for each in args]
        return func(*plain, **kwargs)

    def _of(self, rows: NDArray[np.int64], lead: int) -> DeviceRows:
        return DeviceRows(
            memory=self.memory,
            address=self._address,
            rows=rows,
            width=self.width,
            dtype=self.dtype,
            require=self._require,
            store=self._store,
            lead=lead,
        )


def _blank(like: DeviceRows, count: int) -> DeviceRows:
    """`count` uninitialized rows."""
    store = _Store(like.memory, count * like.row_bytes)
    return DeviceRows(
        memory=like.memory,
        address=store.address,
        rows=np.arange(count),
        width=like.width,
        dtype=like.dtype,
        store=store,
    )


def _joined(parts: Sequence[DeviceRows | NDArray[Any]]) -> DeviceRows | NDArray[Any]:
    """Concatenate; on the host if one part is there."""
    on_device = [part for part in parts if isinstance(part, DeviceRows)]
    if len(on_device) < len(parts):
        return np.concatenate([np.asarray(part) for part in parts])
    if len(parts) == 1:
        return on_device[0]
    joined, end = _blank(on_device[0], sum(len(part) for part in parts)), 0
    for part in on_device:
        joined[end : end + len(part)] = part
        end += len(part)
    return joined


def _uploaded(memory: RowMemory, rows: NDArray[Any], dtype: np.dtype) -> DeviceRows:
    """Upload rows; synchronous, since the host buffer is reused."""
    store = _Store(memory, rows.size * dtype.itemsize)
    host = memory.device.pinned(rows.size * dtype.itemsize)
    host[:] = np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8)
    memory.device.upload(store.address, host)
    memory.device.synchronize()
    return DeviceRows(
        memory=memory,
        address=store.address,
        rows=np.arange(len(rows)),
        width=rows.shape[1],
        dtype=dtype,
        store=store,
    )
