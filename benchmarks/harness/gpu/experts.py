"""edgellm's kernels of mixtures of experts on a device, launched as by an engine, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import MAGIC, table_entries
from harness.gpu.layer_check import Call, LayerCheck, Layout

_BITS = {"fp16": 16, "int4": 4, "fp4": 4}
_SWISH = np.array([1, 3e38, 0, 0], np.float32).view(np.int32).tolist()
# Steps of a softmax whose chosen shares are normalized; cap, smallest sum, addend and factor.
_NORMALIZED = [0, 0, 0, 0, 1, 0, *np.array([1, 0, 0, 1], np.float32).view(np.int32).tolist()]
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


class _Layer(LayerCheck):
    compared = "ids", "shares", "order", "begins", "inner", "parts", "y"

    def __init__(self, device: Device, sizes: Sizes, rows: int, codes: str) -> None:
        self._sizes, self._rows, self._codes = sizes, rows, codes
        super().__init__(device, self._layout(), f"{codes}, {rows} rows")
        self._fill(np.random.default_rng(rows))

    def _layout(self) -> Layout:
        sizes, pairs = self._sizes, self._rows * self._sizes.top_k
        count = sizes.experts * sizes.hidden * sizes.inner
        layout: Layout = {
            "x": ((self._rows, sizes.hidden), np.float16),
            "logits": ((self._rows, sizes.experts), np.float32),
            "ids": ((self._rows, sizes.top_k), np.int64),
            "shares": ((pairs,), np.float16),
            "table": ((table_entries(len(_PROJECTIONS)),), np.int64),
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
        for row in host["logits"]:  # no two are nearly equal
            row[:] = random.permutation(sizes.experts) * (4 / sizes.experts)
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
        count = len(_PROJECTIONS)
        host["table"][:] = [count, count ^ MAGIC, *addresses]

    def _calls(self) -> list[Call]:
        sizes, rows, codes = self._sizes, self._rows, self._codes
        widths, outputs = (sizes.hidden, sizes.inner, sizes.block), catalog.EXPERT_OUTPUTS
        pairs = ["order", "begins", "table"]
        chosen = sizes.experts, sizes.top_k, *_NORMALIZED
        return [
            (
                catalog.route_rows(sizes.experts),
                (rows, 1, 1),
                [*["logits"] * 4, *chosen, "ids", "shares"],
            ),
            (
                catalog.GROUP_ROWS,
                (sizes.experts + 1, 1, 1),
                ["ids", rows * sizes.top_k, "order", "begins"],
            ),
            (
                catalog.expert_gates(codes),
                (sizes.experts, -(-sizes.inner // outputs), 1),
                ["x", *pairs, 0, *widths, sizes.top_k, *_SWISH, "inner"],
            ),
            (
                catalog.expert_downs(codes),
                (sizes.experts, -(-sizes.hidden // outputs), 1),
                ["inner", "shares", *pairs, 2, *widths, "parts"],
            ),
            (
                catalog.SUM_EXPERTS,
                (rows, -(-sizes.hidden // catalog.SUMMED), 1),
                ["parts", sizes.hidden, sizes.top_k, "y"],
            ),
        ]

    def _memory(self, arrays: dict[str, np.ndarray]) -> Callable[..., np.ndarray]:
        del arrays  # weights are never written
        return self._read
