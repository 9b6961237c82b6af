"""edgellm's kernels of embeddings and heads on a device, launched as by an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import MAGIC, table_entries
from harness.gpu.layer_check import Call, LayerCheck, Layout

_BITS = {"fp16": 16, "int4": 4}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a tied head; default: a quarter of Llama 3.2 1B's."""

    vocab: int = 32064
    hidden: int = 2048
    block: int = 32
    rows: tuple[int, ...] = (1, 8, 60)

    @classmethod
    def small(cls) -> Sizes:
        """Return sizes for a fake device."""
        return cls(300, 160, 32, (1, 20))


def check_vocabulary(device: Device, sizes: Sizes | None = None) -> dict[str, float]:
    """Return microseconds of each kernel, and GB/s at which a head reads its weights.

    Raises:
        AssertionError: results differ.
        EdgeLLMError: there is no kernel for the device.
    """
    found: dict[str, float] = {}
    sizes = sizes or Sizes()
    for codes, bits in _BITS.items():
        for rows in sizes.rows:
            times = _Layer(device, sizes, rows, codes).run()
            found |= {f"{name}_{codes}_{rows}_us": 1e6 * each for name, each in times.items()}
            us = found[f"head_rows_{codes}_{rows}_us"]
            gigabytes = sizes.vocab * sizes.hidden * bits // 8 / 1e9
            found[f"head_rows_{codes}_{rows}_gb_per_s"] = gigabytes / us * 1e6
    return found


class _Layer(LayerCheck):
    compared = "x", "y"

    def __init__(self, device: Device, sizes: Sizes, rows: int, codes: str) -> None:
        self._sizes, self._rows, self._codes = sizes, rows, codes
        super().__init__(device, self._layout(), f"{codes}, {rows} rows")
        self._fill(np.random.default_rng(rows))

    def _layout(self) -> Layout:
        sizes, rows = self._sizes, self._rows
        count = sizes.vocab * sizes.hidden
        return {
            "ids": ((rows,), np.int64),
            "table": ((table_entries(1),), np.int64),
            "x": ((rows, sizes.hidden), np.float16),
            "y": ((rows, sizes.vocab), np.float32),
            "weights": ((count * _BITS[self._codes] // 8,), np.uint8),
            "scales": ((count // sizes.block,), np.float16),
        }

    def _fill(self, random: np.random.Generator) -> None:
        host, at = self._packed.arrays, self._packed.addresses
        host["ids"][:] = random.integers(0, self._sizes.vocab, self._rows)
        stored, has_scales = host["weights"], self._codes != "fp16"
        if has_scales:
            stored[:] = random.integers(0, 256, stored.size, np.uint8)
        else:
            stored.view(np.float16)[:] = random.random(stored.size // 2, np.float32) / 16
        host["scales"][:] = 1 / 64
        host["table"][:] = [1, 1 ^ MAGIC, at["weights"], at["scales"] * has_scales, 0, 0]

    def _calls(self) -> list[Call]:
        sizes, rows = self._sizes, self._rows
        widths = sizes.vocab, sizes.hidden, sizes.block
        tiles = -(-rows // catalog.HEAD_ROWS[1])
        return [
            (
                catalog.look_up_rows(self._codes),
                (rows, -(-sizes.hidden // catalog.LOOKED_UP), 1),
                ["ids", "table", 0, *widths, "x"],
            ),
            (
                catalog.head_rows(self._codes),
                (tiles, -(-sizes.vocab // catalog.HEAD_OUTPUTS), 1),
                ["x", "table", 0, rows, *widths, "y"],
            ),
        ]

    def _memory(self, arrays: dict[str, np.ndarray]) -> Callable[..., np.ndarray]:
        del arrays  # weights are never written
        return self._read
