"""A layer's kernels on a device, launched as by an engine, against numpy."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from kernel_references import REFERENCES

from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, packed_bytes
from harness.gpu.device import seconds_of

_TOLERANCE = 5e-3  # of the largest number: the kernels round to float16

Call = tuple[Variant, tuple[int, int, int], list[str | int]]  # arguments by name, or numbers
Layout = dict[str, tuple[tuple[int, ...], Any]]  # shape and dtype by name


class LayerCheck(abc.ABC):
    """Tensors of one layer's forward pass, on device and host."""

    compared: tuple[str, ...]  # names of results

    def __init__(self, device: Device, layout: Layout, label: str) -> None:
        """Allocate the tensors; a subclass fills them.

        Args:
            device: runs the kernels.
            layout: of the tensors.
            label: the case, for failures.
        """
        self._device, self._label = device, label
        self._block = Block(device, packed_bytes(layout))
        self._packed = self._block.pack(layout)

    @abc.abstractmethod
    def _calls(self) -> list[Call]:
        """Launches of a pass, in their order."""

    @abc.abstractmethod
    def _memory(self, arrays: dict[str, np.ndarray]) -> Callable[..., np.ndarray]:
        """Return what reads an address, for the references, whose tensors are `arrays`."""

    def _read(self, address: int, count: int, dtype: Any) -> np.ndarray:
        """Numbers at an address that no kernel writes, on the host."""
        first = int(address) - self._packed.address
        return self._packed.host[first : first + int(count) * np.dtype(dtype).itemsize].view(dtype)

    def run(self) -> dict[str, float]:
        """Check the kernels against their references; return the seconds of each.

        Raises:
            AssertionError: results differ.
        """
        expected = {name: each.copy() for name, each in self._packed.arrays.items()}
        self._block.upload(self._packed)
        for variant, grid, arguments in self._calls():
            self._device.launch(variant, grid, self._placed(arguments))
            self._compute(variant, grid, arguments, expected)
        self._block.download(self._packed)
        self._device.synchronize()
        self._compare(expected)
        return {each[0].kernel.name: self._timed(*each) for each in self._calls()}

    def _compare(self, expected: Mapping[str, np.ndarray]) -> None:
        for name in self.compared:
            found, right = (
                each.astype(np.float64) for each in (self._packed.arrays[name], expected[name])
            )
            error, largest = np.abs(found - right).max(), np.abs(right).max()
            assert error <= _TOLERANCE * largest, f"{name}, {self._label}: {error:.2g}"

    def _placed(self, arguments: list[str | int]) -> list[int]:
        at = self._packed.addresses
        return [at[each] if isinstance(each, str) else each for each in arguments]

    def _timed(
        self, variant: Variant, grid: tuple[int, int, int], arguments: list[str | int]
    ) -> float:
        given = self._placed(arguments)
        return seconds_of(self._device, lambda: self._device.launch(variant, grid, given))

    def _compute(
        self,
        variant: Variant,
        grid: tuple[int, int, int],
        arguments: list[str | int],
        arrays: dict[str, np.ndarray],
    ) -> None:
        flat = [arrays[each].reshape(-1) if isinstance(each, str) else each for each in arguments]
        facts = {**variant.constants, "grid": grid, "memory": self._memory(arrays)}
        REFERENCES[variant.kernel.name](*flat, constants=facts)
