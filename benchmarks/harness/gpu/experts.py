"""edgellm's kernels of mixtures of experts on a device, launched as by an engine, against numpy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_references import REFERENCES

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import Variant
from edgellm.device_runtime.runners.tensorrt.cuda.expert_weights import MAGIC, table_entries
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, packed_bytes

_REPEATS = 10
_TOLERANCE = 5e-3  # of the largest number: products are rounded to float16
_BITS = {"fp16": 16, "int4": 4, "fp4": 4}
_SWISH = np.array([1, 3e38, 0, 0], np.float32).view(np.int32).tolist()
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer; default: a quarter of the experts of Qwen3-30B-A3B's."""

    experts: int = 32
    top_k: int = 8
    hidden: int = 2048
    inner: int = 768
    block: int = 128
    rows: tuple[int, ...] = (1, 8, 40)

    @classmethod
    def small(cls) -> Sizes:
        """Return sizes for a fake device."""
        return cls(4, 2, 160, 48, 16, (1, 20))


def check_experts(device: Device, sizes: Sizes | None = None) -> dict[str, float]:
    """Return microseconds of each kernel, and GB/s at which a single row reads experts.

    Raises:
        AssertionError: results differ.
        EdgeLLMError: there is no kernel for the device.
    """
    found: dict[str, float] = {}
    sizes = sizes or Sizes()
    for codes in _BITS:
        for rows in sizes.rows:
            times = _Layer(device, sizes, rows, codes).run()
            found |= {f"{name}_{codes}_{rows}_us": 1e6 * each for name, each in times.items()}
        weights = sizes.top_k * sizes.hidden * sizes.inner * _BITS[codes] // 8
        for name, matrices in (("expert_gates", 2), ("expert_downs", 1)):
            us = found[f"{name}_{codes}_1_us"]
            found[f"{name}_{codes}_1_gb_per_s"] = matrices * weights / us / 1e3
    return found


_Call = tuple[Variant, tuple[int, int, int], list[str | int]]  # arguments by name, or numbers


class _Layer:
    """Tensors of one layer's forward pass, on device and host."""

    def __init__(self, device: Device, sizes: Sizes, rows: int, codes: str) -> None:
        self._device, self._sizes, self._rows, self._codes = device, sizes, rows, codes
        layout = self._layout()
        self._block = Block(device, packed_bytes(layout))
        self._packed = self._block.pack(layout)
        self._fill(np.random.default_rng(rows))

    def _layout(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        sizes, pairs = self._sizes, self._rows * self._sizes.top_k
        count = sizes.experts * sizes.hidden * sizes.inner
        layout: dict[str, tuple[tuple[int, ...], Any]] = {
            "x": ((self._rows, sizes.hidden), np.float16),
            "ids": ((self._rows, sizes.top_k), np.int64),
            "shares": ((pairs,), np.float16),
            "table": ((table_entries(1),), np.int64),
            "order": ((pairs,), np.int32),
            "begins": ((sizes.experts + 1,), np.int32),
            "inner": ((pairs, sizes.inner), np.float16),
            "parts": ((pairs, sizes.hidden), np.float16),
            "y": ((self._rows, sizes.hidden), np.float16),
        }
        for name in _PROJECTIONS:
            layout[name] = (count * _BITS[self._codes] // 8,), np.uint8
            layout[f"{name} scales"] = (count // sizes.block,), np.float16
        return layout

    def _fill(self, random: np.random.Generator) -> None:
        host, sizes = self._packed.arrays, self._sizes
        host["x"][:] = random.standard_normal(host["x"].shape)
        host["shares"][:] = 1 / sizes.top_k
        for row in host["ids"]:
            row[:] = random.permutation(sizes.experts)[: sizes.top_k]
        at, addresses = self._packed.addresses, []
        for name in _PROJECTIONS:
            stored = host[name]
            if self._codes == "fp16":
                stored.view(np.float16)[:] = random.random(stored.size // 2, np.float32) / 16
            else:
                stored[:] = random.integers(0, 256, stored.size, np.uint8)
            host[f"{name} scales"][:] = 1 / 64
            has_scales = self._codes != "fp16"
            addresses += [at[name], at[f"{name} scales"] * has_scales, 0, 0]
        host["table"][:] = [sizes.experts, sizes.experts ^ MAGIC, *addresses]

    def run(self) -> dict[str, float]:
        """Check the kernels against their references; return the seconds of each."""
        expected = {name: each.copy() for name, each in self._packed.arrays.items()}
        self._block.upload(self._packed)
        for variant, grid, arguments in self._calls():
            self._device.launch(variant, grid, self._placed(arguments))
            self._compute(variant, grid, arguments, expected)
        self._block.download(self._packed)
        self._device.synchronize()
        self._compare(expected)
        return {each[0].kernel.name: self._timed(*each) for each in self._calls()}

    def _calls(self) -> list[_Call]:
        sizes, rows, codes = self._sizes, self._rows, self._codes
        layer = 0, sizes.hidden, sizes.inner, sizes.block
        outputs = catalog.EXPERT_OUTPUTS
        pairs = ["order", "begins", "table", *layer]
        return [
            (
                catalog.GROUP_ROWS,
                (sizes.experts + 1, 1, 1),
                ["ids", rows * sizes.top_k, "order", "begins"],
            ),
            (
                catalog.expert_gates(codes),
                (sizes.experts, -(-sizes.inner // outputs), 1),
                ["x", *pairs, sizes.top_k, *_SWISH, "inner"],
            ),
            (
                catalog.expert_downs(codes),
                (sizes.experts, -(-sizes.hidden // outputs), 1),
                ["inner", "shares", *pairs, "parts"],
            ),
            (
                catalog.SUM_EXPERTS,
                (rows, -(-sizes.hidden // catalog.SUMMED), 1),
                ["parts", sizes.hidden, sizes.top_k, "y"],
            ),
        ]

    def _compare(self, expected: Mapping[str, np.ndarray]) -> None:
        for name in ("order", "begins", "inner", "parts", "y"):
            found, right = (
                each.astype(np.float64) for each in (self._packed.arrays[name], expected[name])
            )
            error, largest = np.abs(found - right).max(), np.abs(right).max()
            said = f"{name} of {self._codes}, {self._rows} rows: {error:.2g}"
            assert error <= _TOLERANCE * largest, said

    def _placed(self, arguments: list[str | int]) -> list[int]:
        at = self._packed.addresses
        return [at[each] if isinstance(each, str) else each for each in arguments]

    def _timed(
        self, variant: Variant, grid: tuple[int, int, int], arguments: list[str | int]
    ) -> float:
        given = self._placed(arguments)
        start = time.perf_counter()
        for _ in range(_REPEATS):
            self._device.launch(variant, grid, given)
        self._device.synchronize()
        return (time.perf_counter() - start) / _REPEATS

    def _compute(
        self,
        variant: Variant,
        grid: tuple[int, int, int],
        arguments: list[str | int],
        arrays: dict[str, np.ndarray],
    ) -> None:
        flat = [arrays[each].reshape(-1) if isinstance(each, str) else each for each in arguments]
        facts = {**variant.constants, "grid": grid, "memory": self._read}
        REFERENCES[variant.kernel.name](*flat, constants=facts)

    def _read(self, address: int, count: int, dtype: Any) -> np.ndarray:
        """Weights and scales at an address, on the host, where they are never written."""
        first = int(address) - self._packed.address
        return self._packed.host[first : first + int(count) * np.dtype(dtype).itemsize].view(dtype)
