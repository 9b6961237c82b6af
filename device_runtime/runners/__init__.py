"""Runners of engines: protocols, and one package for each backend (library and device).

Packages are found by name; `build` has a package of the same name, which compiles. Users name
libraries: `onnxruntime` with the device cuda is the package `onnxruntime_cuda`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DEVICES, Engine, library_of
from edgellm.device_runtime.runners.batch_costs import SharedCosts

# Outputs of one pass by graph I/O name, in host memory, floats as float32. Arrays are fetched when
# first read, which must be before the runner's next pass.
Outputs = Mapping[str, NDArray[Any]]


# Devices of the backends, in the order in which "auto" tries them.
_DEVICES = {"tensorrt": "cuda", "onnxruntime_cuda": "cuda", "onnxruntime_cpu": "cpu"}


class Cache(Protocol):
    """The KV cache of one sequence."""

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """Move the positions `length + rows`, ascending, to `length`, `length + 1`, ..."""
        ...

    def read_rows(self, length: int) -> NDArray[Any]:
        """A copy of the first `length` positions, in the cache's dtype.

        Returns:
            [2 * num_layers, 1, num_kv_heads, length, head_dim].
        """
        ...

    def write_rows(self, rows: NDArray[Any]) -> None:
        """Write positions that `read_rows` copied, from position 0 on."""
        ...


class Runner(Protocol):
    """Runs the loaded graphs of a role."""

    @property
    def cache(self) -> Cache | None:
        """The KV cache of the role, if any; all of its graphs share it."""
        ...

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Set inputs of all later passes, until they are replaced: images."""
        ...

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """Run one forward pass.

        Args:
            inputs: by graph I/O name, with the shapes of `core.graph_io`. Without `TREE_MASK`
                attention is causal. Inputs that the graph does not have are ignored.

        Raises:
            LimitError: the inputs exceed the engine's limits.
        """
        ...


@runtime_checkable
class SharedRunner(Runner, Protocol):
    """A runner with batches of sequences, whose KV caches share memory in blocks."""

    @property
    def num_sequences(self) -> int:
        """Maximum batch size."""
        ...

    @property
    def page_rows(self) -> int:
        """Positions in a block."""
        ...

    @property
    def free_rows(self) -> int:
        """Positions in free blocks."""
        ...

    def free_rows_without(self, caches: Sequence[Cache]) -> int:
        """Positions in free blocks if these caches were freed."""
        ...

    @property
    def pass_rows(self) -> int:
        """Maximum tokens of a sequence in a pass if windows bound its blocks; 0: unlimited."""
        ...

    def new_cache(self) -> Cache:
        """An empty cache of another sequence."""
        ...

    def reserve(self, cache: Cache, write_index: int, rows: int) -> None:
        """Allocate blocks for the tokens of a pass; raises `LimitError` if none is free.

        Blocks before all sliding windows are freed.
        """
        ...

    def least_rows(self, cache: Cache) -> int:
        """The minimum length to which the cache can be truncated; 0: any length."""
        ...

    def write_rows(self, cache: Cache, rows: NDArray[Any], least_rows: int) -> None:
        """See `Cache`; later the cache cannot be truncated below `least_rows`."""
        ...

    def fork(self, cache: Cache) -> Cache:
        """A copy-on-write copy of a cache."""
        ...

    def release(self, cache: Cache) -> None:
        """Free the blocks of a cache."""
        ...

    def run_many(self, parts: Sequence[tuple[Cache, Mapping[str, NDArray[Any]]]]) -> list[Outputs]:
        """Run one pass for a batch of at most `num_sequences`.

        Args:
            parts: caches with reserved positions, each with inputs as in `run`.

        Returns:
            The outputs of `run` for each sequence.
        """
        ...


@runtime_checkable
class ArrangesPasses(Protocol):
    """A `SharedRunner` that splits a batch into the cheapest passes."""

    @property
    def shared_rows(self) -> tuple[int, int]:
        """Maximum tokens of a sequence, and of all, in a batch of trees."""
        ...

    def learn_costs(self, costs: SharedCosts) -> None:
        """Set the measured costs of passes; before, the runner estimates them."""
        ...


@runtime_checkable
class LimitsBatch(Protocol):
    """A runner without a cache, whose inputs may have a batch axis."""

    @property
    def max_sequences(self) -> int:
        """Maximum batch size."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A runner whose graphs apply LoRA adapters, selected by the input `ADAPTER`."""

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """Set all adapters of later passes, as `ADAPTER_WEIGHTS` and `ADAPTER_TABLE`."""
        ...


class Backend(Protocol):
    """The functions that a backend's package has."""

    def available(self) -> str:
        """The library's version; raises `EdgeLLMError` with a hint if it is unavailable."""
        ...

    def require_device(self) -> None:
        """Raise `EdgeLLMError` with the reason if this machine cannot run its own engines."""
        ...

    def open_engine(self, folder: Path, engine: Engine) -> Mapping[str, Runner]:
        """Load an engine that was built for this machine; returns its runners by role.

        Raises:
            BrokenArtifactError: built for another machine or library, or rejected by the library.
            LimitError: the device has too little memory.
        """
        ...


class FetchedOutputs(Mapping[str, NDArray[Any]]):
    """See `Outputs`; reading after the next pass raises `ValueError`."""

    __slots__ = ("_fetch", "_fetched", "_is_latest", "_names")

    def __init__(self, names: Collection[str], fetch: Callable[[str], NDArray[Any]]) -> None:
        self._names, self._fetch = names, fetch
        self._fetched: dict[str, NDArray[Any]] = {}
        self._is_latest = True

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._fetched:
            self.require_latest(name)
            self._fetched[name] = self._fetch(name)
        return self._fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def require_latest(self, name: str) -> None:
        """Raise `ValueError` if the next pass has overwritten the memory of `name`."""
        if not self._is_latest:
            raise ValueError(f"{name} of a pass is read after the next one")

    def expire(self) -> None:
        """Mark the outputs as overwritten by the next pass."""
        self._is_latest = False


def require_cache(runner: Runner) -> Cache:
    """The cache of a role that has one."""
    assert runner.cache is not None
    return runner.cache


def names() -> list[str]:
    """All backends, available or not."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def libraries() -> list[str]:
    """The libraries of all backends, as users name them."""
    return sorted({library_of(name) for name in names()})


def resolve(name: str, device: str = "") -> str:
    """The backend of a library on a device; "auto" is what `automatic` chooses.

    Args:
        name: a library, a backend, or "auto".
        device: one of `DEVICES`, or "" for the default.

    Raises:
        EdgeLLMError: unknown, unavailable on this machine, or not for this device.
    """
    if name == "auto":
        return automatic(device)[0]
    found = next((each for each in (f"{name}_{device or DEVICES[0]}", name) if each in names()), "")
    if not found:
        known = ", ".join(libraries())
        raise EdgeLLMError(f"unknown backend {name!r}", hint=f"backends: {known}")
    return found


def automatic(device: str = "") -> tuple[str, dict[str, str]]:
    """The first backend whose engines run here: TensorRT, ONNX Runtime on CUDA, then on the CPU.

    Args:
        device: one of `DEVICES`, or "" for any. With "cuda", ONNX Runtime engines can be built
            also without a GPU.

    Returns:
        Its name, and by name why each backend before it does not run here.

    Raises:
        EdgeLLMError: no backend runs here.
    """
    reasons: dict[str, str] = {}
    for name in (each for each, runs_on in _DEVICES.items() if device in (runs_on, "")):
        reasons[name] = _reason_against(name)
        if not reasons[name]:
            return name, {key: reason for key, reason in reasons.items() if key != name}
    if device == "cuda":
        return "onnxruntime_cuda", reasons
    details = "; ".join(f"{library_of(name)}: {reason}" for name, reason in reasons.items())
    raise EdgeLLMError(f"no backend can run here ({details})")


def title(name: str) -> str:
    """A backend's name for users."""
    library = library_of(name)
    return library if library == name else f"{library} on {_DEVICES[name]}"


def find(name: str) -> Backend:
    """The backend of a library or package, on the library's default device; raises as `resolve`."""
    return cast(Backend, importlib.import_module(f"{__name__}.{resolve(name)}"))


def _reason_against(name: str) -> str:
    try:
        find(name).require_device()
    except EdgeLLMError as error:
        return str(error)
    return ""
