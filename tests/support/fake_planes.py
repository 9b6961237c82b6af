"""KV cache memory on the fake GPU, see `fake_gpu.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.tensorrt.cuda.protocols import NewRows, Planes


class GpuMisuseError(AssertionError):
    """An error that on a real GPU crashes, gives wrong numbers, or goes unnoticed."""


class FakePlanes(ABC):
    """A device's operations on KV cache memory."""

    @abstractmethod
    def at(self, address: int, num_bytes: int) -> NDArray[np.uint8]: ...

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def _ask(self, work: Callable[[], None]) -> None: ...

    def move_rows(self, planes: Planes, rows_address: int, count: int, first: int) -> None:
        if planes.row_bytes % 16 or planes.address % 16:
            raise GpuMisuseError("the kernel moves words of 16 bytes")

        def move() -> None:
            memory = self._rows(planes)
            rows = self.at(rows_address, 4 * count).view(np.int32)
            for at, row in enumerate(rows.tolist()):
                if row < at or first + row >= planes.rows:
                    raise GpuMisuseError(f"row {row} moves to {at}")
                memory[:, first + at] = memory[:, first + row]

        self._ask(move)

    def append_rows(self, planes: Planes, rows: NewRows, count: int) -> None:
        if planes.row_bytes % 16 or rows.address % 16 or rows.stride % 16:
            raise GpuMisuseError("the kernel moves words of 16 bytes")
        self.at(rows.write_index_address, 8)

        def append() -> None:
            (first,) = self.at(rows.write_index_address, 8).view(np.int64).tolist()
            if first + count > planes.rows:
                raise GpuMisuseError(f"{count} rows after {first} are too many")
            memory, size = self._rows(planes), rows.planes * count * planes.row_bytes
            for at in range(planes.count // rows.planes):
                new = self.at(rows.address + at * rows.stride, size)
                heads = slice(at * rows.planes, (at + 1) * rows.planes)
                memory[heads, first : first + count] = new.reshape(rows.planes, count, -1)

        self._ask(append)

    def _rows(self, planes: Planes) -> NDArray[np.uint8]:
        shape = planes.count, planes.rows, planes.row_bytes
        return self.at(planes.address, planes.num_bytes).reshape(shape)

    def save_rows(self, planes: Planes, length: int, first: int = 0) -> NDArray[np.uint8]:
        self.synchronize()
        return self._rows(planes)[:, first : first + length].reshape(planes.count, -1).copy()

    def load_rows(self, planes: Planes, rows: NDArray[np.uint8], first: int = 0) -> None:
        self.synchronize()
        length = rows.shape[1] // planes.row_bytes
        given = rows.reshape(planes.count, length, planes.row_bytes)
        self._rows(planes)[:, first : first + length] = given

    def copy_rows(self, planes: Planes, source: int, target: int, count: int) -> None:
        if max(source, target) + count > planes.rows or abs(source - target) < count:
            raise GpuMisuseError(f"{count} rows from {source} do not go to {target}")

        def copy() -> None:
            rows = self._rows(planes)
            rows[:, target : target + count] = rows[:, source : source + count]

        self._ask(copy)
