"""LoRA adapters of an engine: loaded and unloaded between passes, by name."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
    RequestError,
)
from edgellm.core.manifest import Engine
from edgellm.core.peft_adapter import Adapter, LowRank, read_adapter
from edgellm.device_runtime.adapted_layers import (
    MAX_LORA_RANK,
    MAX_LORAS,
    AdaptedLayer,
    read_layers,
)
from edgellm.device_runtime.arrays import (
    F32,
    I64,
    LoadedAdapter,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of an adapter, for the layers of an engine."""

    values: F32  # all A and B, concatenated
    entries: I64  # [layers, 3]: rank, offset of A, offset of B

    @property
    def mark(self) -> str:
        """A hash of the weights."""
        digest = hashlib.sha256(self.entries.tobytes())
        digest.update(self.values.data)
        return f"lora {digest.hexdigest()[:32]}"


class Adapters:
    """All loaded adapters; methods are thread-safe."""

    def __init__(
        self,
        *,
        layers: Iterable[AdaptedLayer],
        max_rank: int,
        maximum: int,
        hold: Callable[[F32, I64], object],
        between_passes: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Start with no adapters.

        Args:
            layers: of the engine, in the order of `ADAPTER_TABLE`.
            max_rank: of the engine; 0: it takes no adapters.
            maximum: number of adapters; 0: any number.
            hold: receives weights and table of all adapters.
            between_passes: context in which `hold` may be called.
        """
        self._layers = {layer.name: (place, layer) for place, layer in enumerate(layers)}
        self._max_rank, self._maximum = max_rank, maximum
        self._hold, self._between_passes = hold, between_passes
        self._loaded: dict[str, tuple[LoadedAdapter, Path, _Weights]] = {}
        self._changing = threading.Lock()

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of the loaded adapters, by name."""
        return {name: folder for name, (_, folder, _) in self._loaded.items()}

    def close(self) -> None:
        """Release the engine; the folders are still known."""
        self._hold = lambda *_: None

    def find(self, name: str) -> LoadedAdapter:
        """A loaded adapter.

        Raises:
            RequestError: the name is unknown.
        """
        if name not in self._loaded:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise RequestError(f"there is no adapter {name!r}", hint=f"loaded: {known}")
        return self._loaded[name][0]

    def load(self, name: str, folder: Path) -> LoadedAdapter:
        """Load a PEFT adapter; a loaded name with the same weights stays.

        Raises:
            EdgeLLMError: the engine takes no adapters, or not this one; nothing changes.
            RequestError: the name belongs to other weights, or is empty.
        """
        self._require_any()
        if not name:
            raise RequestError("an adapter needs a name")
        weights = self._read(read_adapter(folder))
        with self._changing:
            if name in self._loaded:
                known = self._loaded[name][0]
                if known.mark == weights.mark:
                    return known
                raise RequestError(
                    f"the name {name!r} belongs to another adapter", hint="unload that first"
                )
            self._require_place()
            taken = {each.slot for each, _, _ in self._loaded.values()}
            slot = next(slot for slot in range(1, len(taken) + 2) if slot not in taken)
            found = LoadedAdapter(name=name, slot=slot, mark=weights.mark)
            self._replace({**self._loaded, name: (found, folder, weights)})
            return found

    def unload(self, name: str, num_using: Callable[[LoadedAdapter], int]) -> None:
        """Unload an adapter.

        Raises:
            RequestError: the name is unknown, or running requests use it.
        """
        with self._changing:
            adapter = self.find(name)
            left = {key: value for key, value in self._loaded.items() if key != name}
            self._replace(left, lambda: _require_unused(adapter, num_using(adapter)))

    def _replace(
        self,
        loaded: dict[str, tuple[LoadedAdapter, Path, _Weights]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the adapters of further passes; `check` may raise."""
        slots = max((each.slot for each, _, _ in loaded.values()), default=0) + 1
        table = np.zeros((slots, len(self._layers), 3), np.int64)
        parts, begin = [np.zeros(1, np.float32)], 1
        for adapter, _, weights in loaded.values():
            own = weights.entries
            table[adapter.slot] = own + np.where(own[:, :1], (0, begin, begin), 0)
            parts.append(weights.values)
            begin += len(weights.values)
        joined = np.concatenate(parts)
        with self._between_passes():
            check()
            self._hold(joined, table)
            for name in self._loaded.keys() - loaded.keys():
                self._loaded[name][0].is_loaded = False
            self._loaded = loaded

    def _require_any(self) -> None:
        if not self._max_rank:
            raise EdgeLLMError(
                "the engine takes no adapters",
                hint="build it with llm_build --maxLoraRank, or export the base with --lora_dir",
            )

    def _require_place(self) -> None:
        if self._maximum and len(self._loaded) >= self._maximum:
            known = ", ".join(sorted(self._loaded))
            raise LimitError(
                f"the engine holds {self._maximum} adapter{'s' * (self._maximum > 1)} at most, all "
                f"taken: {known}",
                hint="unload one of them, or build with a larger --maxLoras",
            )

    def _read(self, adapter: Adapter) -> _Weights:
        entries = np.zeros((len(self._layers), 3), np.int64)
        parts: list[F32] = []
        end = 0
        for name, change in adapter.layers.items():
            place = self._place(adapter, name, change)
            entries[place] = change.rank, end, end + change.rank * change.in_features
            a, b = (_floats(adapter, each) for each in (change.a, change.b))
            parts += [a.ravel(), (b.T * np.float32(change.scale)).ravel()]
            end += a.size + b.size
        return _Weights(np.concatenate(parts), entries)

    def _place(self, adapter: Adapter, name: str, change: LowRank) -> int:
        """A layer's index in the table."""
        if name not in self._layers:
            raise EdgeLLMError(
                f"{adapter.folder} changes {name}, which adapters of this engine cannot",
                hint="merge it into the weights: edgellm-export llm --lora_dir",
            )
        place, layer = self._layers[name]
        if (change.in_features, change.out_features) != (layer.in_features, layer.out_features):
            raise BrokenArtifactError(
                f"{adapter.folder} was made for another model: its change of {name} is "
                f"[{change.out_features}, {change.in_features}], the layer "
                f"[{layer.out_features}, {layer.in_features}]"
            )
        if change.rank > self._max_rank:
            raise LimitError(
                f"{adapter.folder} has rank {change.rank}, the engine takes {self._max_rank}",
                hint=f"build it with --maxLoraRank {change.rank}",
            )
        return place


def open_adapters(
    folder: Path,
    engine: Engine,
    network: DecoderNetwork,
    between_passes: Callable[[], AbstractContextManager[None]],
) -> Adapters:
    """The adapters of an engine, none loaded; raises `BrokenArtifactError` if it is damaged."""
    max_rank = int(engine.options.get(MAX_LORA_RANK, 0))
    layers = read_layers(folder) if max_rank else []
    maximum = int(engine.options.get(MAX_LORAS, 0))
    found = Adapters(
        layers=layers,
        max_rank=max_rank,
        maximum=maximum,
        hold=network.hold_adapters,
        between_passes=between_passes,
    )
    if max_rank:
        network.hold_adapters(np.zeros(1, np.float32), np.zeros((1, len(layers), 3), np.int64))
    return found


def _require_unused(adapter: LoadedAdapter, count: int) -> None:
    if count:
        raise RequestError(
            f"the adapter {adapter.name!r} is in use by {count} request{'s' * (count > 1)}",
            hint="unload it when they have finished",
        )


def _floats(adapter: Adapter, name: str) -> NDArray[np.float32]:
    """A tensor of an adapter."""
    info = adapter.tensors.infos()[name]
    data = b"".join(bytes(piece) for piece in adapter.tensors.stream(name))
    stored: NDArray[Any] = np.frombuffer(data, _TYPES[info.dtype])
    if info.dtype == "BF16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    values = stored.astype(np.float32).reshape(info.shape)
    if not np.isfinite(values).all():
        raise BrokenArtifactError(f"{adapter.folder}: {name} holds values that are not numbers")
    return values
