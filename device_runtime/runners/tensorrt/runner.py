"""Runner of a TensorRT engine; see `runners.Runner`.

Passes are padded to buckets, so CUDA graphs can be replayed. Padding follows the tokens: it is
masked, and the next pass overwrites it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.runners.device_speculation import Growth, Rounds
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import FetchedOutputs, Outputs
from edgellm.device_runtime.runners.runner import Inputs, Runner
from edgellm.device_runtime.runners.slot_kv_cache import SlotPool
from edgellm.device_runtime.runners.tensorrt.bound_pass import (
    BoundPass,
    PassRunner,
    PlacedPass,
    bucket_of,
    bucket_sizes,
)
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import (
    Buffer,
    CompiledEngine,
    Device,
    TensorInfo,
    Weights,
)
from edgellm.device_runtime.runners.tensorrt.device_speculation.round import open_rounds
from edgellm.device_runtime.runners.tensorrt.device_tensors import (
    WORD_BYTES,
    DeviceRows,
    RowMemory,
)
from edgellm.device_runtime.runners.tensorrt.images import DeviceImages
from edgellm.device_runtime.runners.tensorrt.kernel_cache import DeviceCaches, open_cache
from edgellm.device_runtime.runners.tensorrt.lora import DeviceAdapters
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Layout, packed_bytes
from edgellm.device_runtime.runners.tensorrt.shapes import (
    FEATURES,
    ROWS,
    Shapes,
    Sizes,
    asked_sizes,
    fill,
)
from edgellm.device_runtime.runners.tensorrt.state_memory import DeviceStates, open_states

_ON_DEVICE = (graph_io.LOGITS, *FEATURES)  # outputs, until they are fetched
_COMMITTED = 24  # approximate maximum of a draft's tokens that a round commits
_WIDE = (graph_io.CANDIDATE_IDS, graph_io.CANDIDATE_LOG_PROBS)  # as wide as the engine was built


class TensorRtRunner(Runner):
    """Runs an engine with a token axis, and its KV cache if it has one."""

    runs_async = True

    def __init__(
        self,
        *,
        engine: CompiledEngine,
        device: Device,
        max_rows: int,
        tree_rows: int,
        spec: DecoderSpec | None = None,
        capacity: int = 0,
        num_sequences: int = 1,
        adapters: int = 0,
    ) -> None:
        """Allocate the memory of all passes; raises `LimitError` if the device has too little.

        Args:
            engine: the loaded engine.
            device: its device.
            max_rows: maximum tokens of a pass.
            tree_rows: maximum tokens of a recurring pass, and of logits or candidates.
            spec: of a network with a cache.
            capacity: positions of a sequence in the cache.
            num_sequences: sequences in the cache.
            adapters: adapter slots; 0: the engine has no LoRA.
        """
        self._engine, self._device, self._capacity = engine, device, capacity
        self.num_sequences, self._shapes = num_sequences, Shapes(engine)
        self._rows_memory: DeviceCaches | None = None
        self._images: DeviceImages | None = None
        if spec is not None:
            memory = open_cache(engine, device, spec.kv, capacity, max_rows, num_sequences)
            self._rows_memory, self._capacity = memory, memory.capacity
            self.kv_pool = SlotPool(memory, num_sequences, capacity)
            self._images = DeviceImages(device, engine, spec.vocab_size)
        self._recurrent = self.states = open_states(engine, device, spec, max(max_rows, tree_rows))
        self._adapters: DeviceAdapters | None = None
        if adapters:
            self._adapters = DeviceAdapters(
                engine=engine, device=device, count=adapters, placed_rows=max_rows
            )
        self._buckets = bucket_sizes(max(tree_rows, 1))
        self._names = self._shapes.outputs
        self._picked = [name for name in self._names if name not in _ON_DEVICE]
        maximum = max_rows, max_rows, self._buckets[-1]
        self._kept = self._allocate((name for name in self._names if name in _ON_DEVICE), maximum)
        self._features = self._allocate(self._shapes.feature_inputs, maximum)
        self._memory = RowMemory(device)
        self._staging: dict[str, NDArray[np.uint8]] = {}
        fixed = {name: buffer.address for name, buffer in self._kept.items()}
        memory = self._rows_memory
        self._passes = PassRunner(
            engine=engine,
            device=device,
            fixed={**_addresses(memory, self._recurrent, engine.weights), **fixed},
            arguments_bytes=packed_bytes(self._arguments(maximum, has_adapters=True)),
            picks_bytes=packed_bytes(self._picks(maximum)),
            after=memory.append if memory is not None else _nothing,
        )
        self._latest: FetchedOutputs | None = None
        self._latest_picks: Mapping[str, int] = {}
        self._is_asked = False  # an asynchronous pass may still read its inputs from the host

    def _arguments(self, sizes: Sizes, *, has_adapters: bool) -> Layout:
        """The layout of inputs from the host."""
        layout = self._shapes.inputs(sizes)
        if self._adapters is None:
            return layout
        return {**layout, **self._adapters.layout(sizes[ROWS], are_used=has_adapters)}

    def _allocate(self, names: Iterable[str], maximum: Sizes) -> dict[str, Buffer]:
        return {
            name: self._device.allocate(self._shapes.num_bytes(name, maximum)) for name in names
        }

    def hold(self, inputs: Inputs) -> None:
        """See `Runner`."""
        if self._images is not None:
            self._images.hold(inputs)

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """See `Runner`."""
        assert self._adapters is not None
        self._adapters.hold(weights, table)

    def run(self, inputs: Inputs) -> Outputs:
        """See `Runner`."""
        return self._run(inputs, fetches=True)

    def run_async(
        self, parts: Sequence[tuple[KVCache, Inputs]]
    ) -> list[tuple[Outputs, int | None]]:
        """See `Runner`."""
        ((_, inputs),) = parts
        return [(self._run(inputs, fetches=False), 0)]

    def _run(self, inputs: Inputs, *, fetches: bool) -> FetchedOutputs:
        self.expire()
        self._require_candidates(inputs)
        sizes, placed, has_images = asked_sizes(inputs), {}, False
        if self._images is not None:
            placed, ids = self._images.of(inputs[graph_io.INPUT_IDS])
            if has_images := placed is not self._images.none:
                inputs = {**inputs, graph_io.INPUT_IDS: ids}
        padded = self._padded(sizes, inputs) if self._recurs(sizes) and not has_images else None
        taken = padded or sizes
        adapters, are_used = self._adapters, False
        if adapters is not None:
            masks, are_used = adapters.of(inputs)
            inputs = {**inputs, **masks}
        layout, picks = self._arguments(taken, has_adapters=are_used), self._picks(taken)
        features = {
            name: (self._shapes.of(name, taken), buffer.address)
            for name, buffer in self._features.items()
        }
        bound = self._passes.bind(
            layout,
            picks,
            {**placed, **features},
            lambda: {} if adapters is None else adapters.placed(are_used=are_used),
            keep=padded is not None,
            fetches=fetches,
        )
        if self._is_asked:
            self._device.synchronize()
            self.on_synchronized()
        fill(bound.inputs, inputs, sizes[ROWS])
        stays = [self._place(name, inputs[name], taken[ROWS]) for name in features]
        waits = bool(picks and fetches) or not all(stays)
        self._is_asked, self._latest_picks = bool(layout), bound.pick_addresses
        bound.run(waits=waits)
        if waits:
            self.on_synchronized()
        self._latest = self._outputs(bound, sizes, inputs)
        return self._latest

    def expire(self) -> None:
        """See `device_speculation.protocols.Network`."""
        if self._latest is not None:
            self._latest.expire()

    def on_synchronized(self) -> None:
        """See `device_speculation.protocols.Network`."""
        self._is_asked = False
        if self._rows_memory is not None:
            self._rows_memory.on_synchronized()
        if self._recurrent is not None:
            self._recurrent.on_synchronized()

    def prepare(self) -> None:
        """Create contexts, and record the pass of plain decoding."""
        self._passes.prepare()
        if not {graph_io.INPUT_IDS, graph_io.LOGITS} <= self._engine.tensors.keys():
            return
        self._rehearse((1, 1, 1))

    def _rehearse(self, sizes: Sizes) -> None:
        """Run and record a pass."""
        layout = self._shapes.inputs(sizes)
        inputs = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        if graph_io.SEQUENCES not in inputs:
            inputs.pop(graph_io.TREE_MASK, None)
        for _ in range(2):  # the first run prepares what cannot be recorded
            TensorRtRunner.run(self, inputs)

    def open_rounds(self, draft: Runner, growth: Growth) -> Rounds | None:
        """See `Runner`."""
        if not isinstance(draft, TensorRtRunner) or draft._device.stream != self._device.stream:
            return None
        if self._recurrent is not None or draft._recurrent is not None:
            return None  # the host commits accepted tokens to their states
        if len({graph_io.SEQUENCES in each._engine.tensors for each in (self, draft)}) > 1:
            return None
        return open_rounds(self, draft, growth, self._device)

    def tensor(self, name: str) -> TensorInfo:
        """See `device_speculation.protocols.Network`."""
        return self._engine.tensors[name]

    def kept_address(self, name: str) -> int:
        """See `device_speculation.protocols.Network`."""
        return self._kept[name].address

    def pick_addresses(self) -> Mapping[str, int]:
        """See `device_speculation.protocols.Network`."""
        return self._latest_picks or self._passes.pick_addresses(self._picks((1, 1, 1)))

    @property
    def tree_rows(self) -> int:
        """See `device_speculation.protocols.Network`."""
        return self._buckets[-1]

    def first_row(self, cache: KVCache | None) -> int:
        """See `device_speculation.protocols.Network`."""
        del cache
        return 0

    def place(
        self, sizes: Sizes, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> PlacedPass:
        """See `device_speculation.protocols.Network`."""
        placed = {name: (self._shapes.of(name, sizes), at) for name, at in inputs.items()}
        if self._images is not None:
            placed |= self._images.none
        if self._adapters is not None:
            placed |= self._adapters.unused(sizes[ROWS])
        return self._passes.place(sizes[ROWS], placed, outputs)

    def placed_outputs(self, sizes: Sizes, addresses: Mapping[str, int]) -> FetchedOutputs:
        """See `device_speculation.protocols.Network`."""

        def fetch(name: str) -> NDArray[Any]:
            if name in FEATURES and self._stays(name):
                return self._rows(name, sizes, outputs)
            return self._fetch(name, sizes, addresses.get(name))

        self._latest = outputs = FetchedOutputs(self._names, fetch)
        return outputs

    def _recurs(self, sizes: Sizes) -> bool:
        """Whether passes of these sizes get their own context; prompts do not."""
        rows, _, outputs = sizes
        return rows == outputs or (graph_io.DRAFT_HIDDEN in self._features and rows <= _COMMITTED)

    def _place(self, name: str, rows: NDArray[Any] | DeviceRows, count: int) -> bool:
        """Copy hidden states to the engine's input; returns whether they were on the device."""
        address = self._features[name].address
        stays = isinstance(rows, DeviceRows) and rows.memory.device.stream == self._device.stream
        if isinstance(rows, DeviceRows) and stays:
            padding = count - len(rows.rows)  # repeat a row: padding must not be NaN
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

    def _require_candidates(self, inputs: Inputs) -> None:
        """Check the number of candidates against the engine's limit."""
        if graph_io.TOP_K not in inputs:
            return
        top_k = inputs[graph_io.TOP_K][0]
        built = self._engine.tensors[graph_io.CANDIDATE_IDS].shape[-1]
        if top_k > built:
            raise LimitError(
                f"--eagleDraftTopK {top_k} exceeds the draft engine's {built} candidates",
                hint="take less, or build with a larger --maxDraftTreeSize",
            )

    def _padded(self, sizes: Sizes, inputs: Inputs) -> Sizes | None:
        """Sizes padded to a bucket; None if no bucket fits.

        A padded mask has extra columns before the others, which all tokens attend to.
        """
        rows, columns, outputs = sizes
        padded = bucket_of(rows, self._buckets)
        wide = columns + padded - rows
        if graph_io.TREE_MASK in inputs:
            wide = bucket_of(wide, self._buckets)
        if padded > self._buckets[-1]:
            return None
        if self.kv_pool is not None:
            end = int(inputs[graph_io.WRITE_INDEX][0]) + padded
            if end > self._capacity or wide > min(self._buckets[-1], end):
                return None
        return padded, wide, bucket_of(outputs, self._buckets)

    def _picks(self, sizes: Sizes) -> Layout:
        tensors = self._engine.tensors
        return {name: (self._shapes.of(name, sizes), tensors[name].dtype) for name in self._picked}

    def _outputs(self, bound: BoundPass, sizes: Sizes, inputs: Inputs) -> FetchedOutputs:
        is_here = bound.fetches
        # Keep no other inputs: device rows would live until garbage collection.
        top_k = int(inputs[graph_io.TOP_K][0]) if graph_io.TOP_K in inputs else 0

        def fetch(name: str) -> NDArray[Any]:
            nonlocal is_here
            if name in FEATURES and self._stays(name):
                return self._rows(name, sizes, outputs)
            if name in self._kept:
                return self._fetch(name, sizes)
            if not is_here:
                bound.fetch()
                self._device.synchronize()
                is_here = True
            found = bound.outputs[name]
            found = found[tuple(slice(size) for size in self._shapes.of(name, sizes))]
            if name in _WIDE:
                found = found[..., :top_k]
            return found.astype(np.float32) if found.dtype == np.float16 else found.copy()

        outputs = FetchedOutputs(self._names, fetch)
        return outputs

    def _stays(self, name: str) -> bool:
        """Whether hidden states can be gathered on the device."""
        info = self._engine.tensors[name]
        return info.shape[-1] * info.dtype.itemsize % WORD_BYTES == 0

    def _rows(self, name: str, sizes: Sizes, outputs: FetchedOutputs) -> Any:
        """Device rows that act as an array [1, rows, width]."""
        _, count, width = self._shapes.of(name, sizes)
        return DeviceRows(
            memory=self._memory,
            address=self._kept[name].address,
            rows=np.arange(count),
            width=width,
            dtype=self._engine.tensors[name].dtype,
            require=lambda: outputs.require_latest(name),
            lead=1,
        )

    def _pinned(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        if name not in self._staging:
            self._staging[name] = self._device.pinned(num_bytes)
        return self._staging[name]

    def _fetch(self, name: str, sizes: Sizes, address: int | None = None) -> NDArray[Any]:
        """Fetch an output without padding, by default from its fixed address."""
        size, dtype = self._shapes.num_bytes(name, sizes), self._engine.tensors[name].dtype
        rows = self._buckets[-1]
        tree = rows, rows, rows
        kept = self._kept.get(name)
        maximum = self._shapes.num_bytes(name, tree) if kept is None else kept.num_bytes
        host = self._pinned(name, maximum)[:size]
        self._device.download(host, self._kept[name].address if address is None else address)
        self._device.synchronize()
        found = host.view(dtype).reshape(self._shapes.of(name, sizes))
        return found.astype(np.float32) if dtype.kind == "f" else found.copy()


def _addresses(*memories: DeviceCaches | DeviceStates | Weights | None) -> dict[str, int]:
    """Addresses of tensors of these memories."""
    found: dict[str, int] = {}
    for memory in memories:
        found |= memory.addresses if memory is not None else {}
    return found


def _nothing(*_: int) -> None:
    """The step after passes without a cache."""
