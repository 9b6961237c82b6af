"""edgellm's attention kernels on a device, launched as by an engine, against numpy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from attention_references import keep_rows
from kernel_references import REFERENCES

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import FIRST_FP8, Variant
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.kernel_cache import MAGIC
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import PLUGINS, Launch, Plugin
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, Packed, packed_bytes
from harness.gpu.device import seconds_of

_NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
_ROWS, _TORCH_REPEATS = (1, 8, 16, 60), 20
_INPUTS = {"sinks": "stats", "q_out": "turned"}
_OUTPUTS = {"store_rows": ("turned",), "attend": ("parts", "stats"), "finish": ("y",)}
_TOLERANCE = 4e-3  # both read the same quantized values


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer; default: Llama-3.1-8B's."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    capacity: int = 4096
    live: int = 4032  # tokens before those of a forward pass, if they fit
    prompt: int = 1024  # tokens of the longest pass

    @classmethod
    def small(cls) -> Sizes:
        """Return sizes for a fake device."""
        return cls(4, 2, 64, 192, 100, 128)


def check_attention(device: Device, sm: int, sizes: Sizes | None = None) -> dict[str, float]:
    """Return microseconds of each kernel, and GB/s at which the KV cache is read.

    Raises:
        AssertionError: results differ.
        EdgeLLMError: there is no kernel for the device.
    """
    found: dict[str, float] = {}
    given = sizes or Sizes()
    for codes in ("fp16", "int8", *(["fp8"] if sm >= FIRST_FP8 else [])):
        for rows in (1, 8, 60, given.prompt):
            layer = _Layer(device, given, sm, codes, rows)
            for name, seconds in layer.run().items():
                found[f"{name}_{codes}_{rows}_us"] = seconds * 1e6
            reads = "finish" if rows >= catalog.PROMPT_TOKENS else "attend"
            rate = layer.cache_bytes / found[f"{reads}_{codes}_{rows}_us"] / 1e3
            found[f"{reads}_{codes}_{rows}_gb_per_s"] = rate
    return found


def time_contexts(
    device: Device, sm: int, contexts: Sequence[int], *, with_torch: bool = False
) -> dict[str, float]:
    """Return microseconds of `attend` and GB/s of KV cache by codes, rows and context.

    The capacity is that of the longest context: times follow the live tokens alone. `with_torch`
    adds the times of torch's scaled dot-product attention in float16.
    """
    found: dict[str, float] = {}
    for codes in ("fp16", "int8"):
        for rows in _ROWS:
            layer = _Layer(device, Sizes(capacity=max(contexts)), sm, codes, rows)
            for context in contexts:
                layer.begin_at(context - rows)
                case = f"{codes}_{rows}_{context}"
                seconds = layer.time("attend") + layer.time("finish")
                found[f"attend_{case}_us"] = seconds * 1e6
                found[f"attend_{case}_gb_per_s"] = layer.cache_bytes / seconds / 1e9
    if with_torch:
        for rows in _ROWS:
            for context in contexts:
                seconds = _seconds_of_torch(Sizes(), rows, context)
                found[f"torch_fp16_{rows}_{context}_us"] = seconds * 1e6
    return found


def _seconds_of_torch(sizes: Sizes, rows: int, context: int) -> float:
    """Return the seconds of torch's attention in a CUDA graph; the last `rows` are queries."""
    import torch

    def numbers(heads: int, count: int) -> torch.Tensor:
        shape = (1, heads, count, sizes.head_dim)
        return torch.randn(shape, dtype=torch.float16, device="cuda")

    q = numbers(sizes.heads, rows)
    k, v = (numbers(sizes.kv_heads, context) for _ in range(2))
    seen = torch.ones(rows, context, dtype=torch.bool, device="cuda").tril(context - rows)

    def attend() -> None:
        for _ in range(_TORCH_REPEATS):
            mask = seen if rows > 1 else None
            torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    found = []
    for _ in range(3):
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found) / _TORCH_REPEATS


class _Layer:
    """Tensors of one layer's forward pass, on device and host."""

    def __init__(self, device: Device, sizes: Sizes, sm: int, codes: str, rows: int) -> None:
        self._device, self._sizes, self._codes, self._rows = device, sizes, codes, rows
        self._live = min(sizes.live, sizes.capacity - rows)
        self._given = {
            "layer": 0,
            "heads": sizes.heads,
            "kv_heads": sizes.kv_heads,
            "codes": codes,
            "head_dim": sizes.head_dim,
            "capability": sm,
            "own_tables": 0,
            "window": 0,
            "cap_bits": 0,
            "sunk": 0,
        }
        layout = self._layout(np.float16 if codes == "fp16" else np.int8)
        self._block = Block(device, packed_bytes(layout))
        self._packed: Packed = self._block.pack(layout)
        self._fill(np.random.default_rng(rows))

    def _layout(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
        sizes, rows = self._sizes, self._rows
        plane = 2, sizes.kv_heads, sizes.capacity
        width, kv_width = (count * sizes.head_dim for count in (sizes.heads, sizes.kv_heads))
        turns = sizes.capacity, sizes.head_dim // 2
        plugin = next(each for each in PLUGINS if each.name == "attend")
        given = plugin.outputs(_NUMBERS, {"q": (1, rows, width)}, self._given)
        return {
            "q": ((1, rows, width), np.float16),
            "k": ((1, rows, kv_width), np.float16),
            "v": ((1, rows, kv_width), np.float16),
            "cos": (turns, np.float16),
            "sin": (turns, np.float16),
            "positions": ((1, rows), np.int64),
            "write_index": ((1,), np.int64),
            "table": ((6,), np.int64),
            "tree": ((rows, rows), np.int8),
            "turned": ((1, rows, width), np.float16),
            "parts": (given[0][1], np.float32),
            "stats": (given[1][1], np.float32),
            "y": ((1, rows, width), np.float16),
            "codes": ((*plane, sizes.head_dim), dtype),
            "scales": (plane, np.float16),
            "path": ((rows,), np.int32),
            "outcome": ((3,), np.int32),
        }

    def _fill(self, random: np.random.Generator) -> None:
        host, sizes = self._packed.arrays, self._sizes
        for name in ("q", "k", "v"):
            host[name][:] = random.standard_normal(host[name].shape)
        half = sizes.head_dim // 2
        angles = np.arange(sizes.capacity)[:, None] * 1e4 ** (-np.arange(half) / half)
        host["cos"][:], host["sin"][:] = np.cos(angles), np.sin(angles)
        self.begin_at(self._live)
        host["tree"][:] = np.tri(self._rows)
        is_float = self._codes == "fp16"
        shape = host["codes"].shape
        codes = random.standard_normal(shape) if is_float else random.integers(-100, 100, shape)
        host["codes"][:], host["scales"][:] = codes, 0.01
        at = self._packed.addresses
        plane = host["codes"].nbytes // 2, host["scales"].nbytes // 2
        host["table"][:2] = sizes.capacity, sizes.capacity ^ MAGIC
        host["table"][2:4] = at["codes"], at["codes"] + plane[0]
        host["table"][4:6] = at["scales"], at["scales"] + plane[1]
        host["path"][:2] = (0, self._rows - 1)[: self._rows]
        host["outcome"][:] = min(self._rows, 2), 0, 0

    @property
    def cache_bytes(self) -> int:
        """Of the live tokens and those of the pass."""
        size, is_float = self._sizes.head_dim, self._codes == "fp16"
        row_bytes = 2 * size if is_float else size + 2
        return 2 * self._sizes.kv_heads * row_bytes * (self._live + self._rows)

    def begin_at(self, live: int) -> None:
        """Set the number of tokens before those of the pass."""
        host, self._live = self._packed.arrays, live
        host["write_index"][:] = live
        host["positions"][:] = live + np.arange(self._rows)

    def run(self) -> dict[str, float]:
        """Check each kernel against its reference; return its seconds."""
        expected = {name: each.copy() for name, each in self._packed.arrays.items()}
        self._block.upload(self._packed)
        seconds = {}
        for plugin in PLUGINS:
            launch, inputs = self._plan(plugin)
            seconds[plugin.name] = self._launch(launch, inputs, _OUTPUTS[plugin.name])
            self._compute(plugin.name, launch, inputs, _OUTPUTS[plugin.name], expected)
        seconds["keep_rows"] = self._keep(expected)
        self._block.download(self._packed)
        self._device.synchronize()
        for name in ("turned", "y", "codes", "scales"):
            found = self._packed.arrays[name]
            np.testing.assert_allclose(
                found.astype(np.float64),
                expected[name].astype(np.float64),
                atol=1 if name == "codes" and self._codes != "fp16" else _TOLERANCE,
                err_msg=f"{name}, {self._codes}, {self._rows} rows",
            )
        return seconds

    def time(self, name: str) -> float:
        """Return the seconds of one kernel, whose results are not checked."""
        self._block.upload(self._packed)
        plugin = next(each for each in PLUGINS if each.name == name)
        launch, inputs = self._plan(plugin)
        return self._launch(launch, inputs, _OUTPUTS[name])

    def _plan(self, plugin: Plugin) -> tuple[Launch, list[str]]:
        """Return a plugin's launch, and the tensors that are its inputs."""
        inputs = [_INPUTS.get(name, name) for name in plugin.inputs]
        if plugin.name != "store_rows":
            inputs[0] = "turned"
        arrays = self._packed.arrays
        shapes = {key: arrays[name].shape for key, name in zip(plugin.inputs, inputs, strict=True)}
        return plugin.launch(_NUMBERS, shapes, self._given), inputs

    def _launch(self, launch: Launch, inputs: list[str], outputs: tuple[str, ...]) -> float:
        at = self._packed.addresses
        arguments = [at[name] for name in inputs]
        arguments += [*launch.sizes, *(at[name] for name in outputs)]
        return self._timed(launch.variant, launch.grid, arguments)

    def _timed(self, variant: Variant, grid: tuple[int, int, int], arguments: list[int]) -> float:
        return seconds_of(self._device, lambda: self._device.launch(variant, grid, arguments))

    def _compute(
        self,
        name: str,
        launch: Launch,
        inputs: list[str],
        outputs: tuple[str, ...],
        arrays: dict[str, np.ndarray],
    ) -> None:
        flat = [arrays[each].reshape(-1) for each in (*inputs, *outputs)]
        facts = {**launch.variant.constants, "grid": launch.grid, "memory": self._memory(arrays)}
        count = len(inputs)
        REFERENCES[name](*flat[:count], *launch.sizes, *flat[count:], constants=facts)

    def _keep(self, arrays: dict[str, np.ndarray]) -> float:
        """The last row moves after the first, which gives the same however often it runs."""
        variant = catalog.keep_rows(self._sizes.head_dim, self._codes)
        grid, names = (1, self._sizes.kv_heads, 2), ("path", "outcome", "write_index", "table")
        facts = {**variant.constants, "grid": grid, "memory": self._memory(arrays)}
        size = self._sizes.head_dim
        keep_rows(*(arrays[name] for name in names), size, constants=facts)
        return self._timed(variant, grid, [*(self._packed.addresses[name] for name in names), size])

    def _memory(self, arrays: dict[str, np.ndarray]) -> Any:
        """What lies at an address, in the references' copies."""

        def read(address: int, count: int, dtype: Any) -> np.ndarray:
            for name in ("codes", "scales"):
                begin, whole = self._packed.addresses[name], arrays[name].reshape(-1)
                if begin <= address < begin + whole.nbytes:
                    first = (int(address) - begin) // whole.itemsize
                    return whole[first : first + int(count)].view(dtype)
            raise AssertionError(f"{address} belongs to no KV cache")

        return read
