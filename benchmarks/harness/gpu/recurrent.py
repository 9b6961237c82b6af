"""edgellm's kernels of recurrent layers on a device, launched as by an engine, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from harness.gpu.layer_check import Call, LayerCheck, Layout

_MAGIC = 0x656467656C6C6D  # as in the kernels
_SIZE = 4  # of a convolution
_ROWS = 1, 8, 60, 256  # of a pass; more than eight are a chain, as a prompt's


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer; default: Qwen3.5-9B's."""

    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 8192  # of the convolution
    rows: tuple[int, ...] = _ROWS

    @classmethod
    def small(cls) -> Sizes:
        """Return sizes for a fake device."""
        return cls(1, 2, 16, 24, 40, (1, 8, 20))


def check_recurrent(device: Device, sizes: Sizes | None = None) -> dict[str, float]:
    """Return microseconds of each kernel, and GB/s at which a single row reads the state.

    Raises:
        AssertionError: results differ.
        EdgeLLMError: there is no kernel for the device.
    """
    found: dict[str, float] = {}
    sizes = sizes or Sizes()
    for rows in sizes.rows:
        for takes in (True, False):
            layer = _Layer(device, sizes, rows, takes=takes)
            names = {"delta_rows": "delta_rows" if takes else "decaying_rows"}
            for name, seconds in layer.run().items():
                found[f"{names.get(name, name)}_{rows}_us"] = seconds * 1e6
    state = 4 * sizes.heads * sizes.key_dim * sizes.value_dim
    found["delta_rows_1_gb_per_s"] = state / found["delta_rows_1_us"] / 1e3
    return found


class _Layer(LayerCheck):
    compared = "convolved", "y", "window", "matrix", "keys", "deltas", "decays"

    def __init__(self, device: Device, sizes: Sizes, rows: int, *, takes: bool) -> None:
        self._sizes, self._rows, self._takes = sizes, rows, takes
        super().__init__(device, self._layout(), f"{rows} rows")
        self._fill(np.random.default_rng(rows))

    def _layout(self) -> Layout:
        sizes, rows = self._sizes, self._rows
        keys, values = (sizes.key_heads, sizes.key_dim), (sizes.heads, sizes.value_dim)
        return {
            "x": ((rows, sizes.width), np.float16),
            "taps": ((_SIZE, sizes.width), np.float16),
            "parents": ((rows,), np.int64),
            "table": ((10,), np.int64),
            "convolved": ((rows, sizes.width), np.float16),
            "q": ((rows, *keys), np.float32),
            "k": ((rows, *keys), np.float32),
            "v": ((rows, *values), np.float32),
            "g": ((rows, sizes.heads), np.float32),
            "b": ((rows, sizes.heads), np.float32),
            "tree": ((rows, rows), np.int8),
            "y": ((rows, *values), np.float32),
            "window": ((_SIZE - 1, sizes.width), np.float16),
            "inputs": ((rows, sizes.width), np.float16),
            "matrix": ((sizes.heads, *keys[1:], *values[1:]), np.float32),
            "keys": ((rows, *keys), np.float16),
            "deltas": ((rows, *values), np.float32),
            "decays": ((2, rows, sizes.heads), np.float32),
            "path": ((rows,), np.int32),
            "outcome": ((1,), np.int32),
            "windows": ((1,), np.int32),
            "matrices": ((1,), np.int32),
        }

    def _fill(self, random: np.random.Generator) -> None:
        host, rows = self._packed.arrays, self._rows
        for name in ("x", "taps", "window", "q", "k", "v", "matrix"):
            host[name][:] = random.standard_normal(host[name].shape)
        for name in ("q", "k"):
            host[name] /= np.linalg.norm(host[name], axis=-1, keepdims=True)
        host["g"][:], host["b"][:] = -random.random(host["g"].shape), random.random(host["b"].shape)
        parents = np.arange(-1, rows - 1)
        if rows <= 8:
            parents[1:] = [int(random.integers(row)) for row in range(1, rows)]
        host["parents"][:], host["tree"][:] = parents, np.eye(rows, dtype=np.int8)
        for row in range(1, rows):
            host["tree"][row] |= host["tree"][parents[row]]
        path = np.flatnonzero(host["tree"][-1])
        host["path"][: len(path)], host["outcome"][:] = path, len(path)
        at = self._packed.addresses
        host["table"][:] = [
            *(rows, rows ^ _MAGIC),
            *(at["window"], at["inputs"], 0, 0),
            *(at[name] for name in ("matrix", "keys", "deltas", "decays")),
        ]
        host["windows"][:], host["matrices"][:] = 0, 1

    def _calls(self) -> list[Call]:
        """Launches of a pass, then of a commit, which writes the states in place."""
        sizes, rows = self._sizes, self._rows
        heads = sizes.key_heads, sizes.heads, sizes.key_dim, sizes.value_dim
        channels = -(-sizes.width // catalog.CHANNELS)
        values = sizes.heads, -(-sizes.value_dim // catalog.VALUES), 1
        width = sizes.width, _SIZE
        convolved = ["x", "taps", "parents", "table", 0, *width, "convolved"]
        inputs = ["q", "k", "v", "g", "b", "tree", "table", 1, rows, rows]
        committed = ["path", "outcome", "table"]
        return [
            (catalog.CONVOLVE_ROWS, (rows, channels, 1), convolved),
            (catalog.delta_rows(takes=self._takes), values, [*inputs, *heads, "y"]),
            (catalog.ADVANCE_WINDOW, (channels, 1, 1), [*committed, "windows", *width]),
            (catalog.ADVANCE_STATE, values, [*committed, "matrices", *heads]),
        ]

    def _memory(self, arrays: dict[str, np.ndarray]) -> Callable[..., np.ndarray]:
        """Read the references' copies."""
        names = {address: name for name, address in self._packed.addresses.items()}

        def read(address: int, count: int, dtype: Any) -> np.ndarray:
            return arrays[names[int(address)]].reshape(-1)[: int(count)].view(dtype)

        return read
