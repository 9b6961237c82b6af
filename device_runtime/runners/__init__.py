"""What runs engines, one package each: a library, or a library with the device that it takes.

A package here is found by its name; `build` has one of the same name, which compiles. Users name
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

# Of one pass by contract name, in the host's memory, floats as float32. Arrays are fetched when
# they are first read, which must be before the runner's next pass.
Outputs = Mapping[str, NDArray[Any]]


# In the order in which "auto" asks, and what engines of each run on.
_DEVICES = {"tensorrt": "cuda", "onnxruntime_cuda": "cuda", "onnxruntime_cpu": "cpu"}


class Cache(Protocol):
    """The rows of a KV cache."""

    def compact(self, length: int, rows: NDArray[np.int64]) -> None:
        """The rows `length + rows`, ascending, become `length`, `length + 1`, ..."""
        ...

    def read_rows(self, length: int) -> NDArray[Any]:
        """A copy of the first `length` rows, in the cache's own type.

        Returns:
            [2 * num_layers, 1, num_kv_heads, length, head_dim].
        """
        ...

    def write_rows(self, rows: NDArray[Any]) -> None:
        """Write rows that `read_rows` copied, from row 0 on."""
        ...


class Runner(Protocol):
    """The loaded graph, or graphs, of a role."""

    @property
    def cache(self) -> Cache | None:
        """Where the role has one; all of its graphs share it."""
        ...

    def hold(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Inputs of the passes to come, until they are replaced: images."""
        ...

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """One pass.

        Args:
            inputs: by contract name, shaped as the contract says; without `TREE_MASK` rows see
                all before them. What the graph does not take is ignored.

        Raises:
            LimitError: more than the engine was built for.
        """
        ...


@runtime_checkable
class SharedRunner(Runner, Protocol):
    """One whose passes serve several sequences, which share memory in pages."""

    @property
    def num_sequences(self) -> int:
        """Of a pass, at most."""
        ...

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        ...

    @property
    def free_rows(self) -> int:
        """Rows for which pages are free."""
        ...

    def free_rows_without(self, caches: Sequence[Cache]) -> int:
        """Rows for which pages were free if these caches gave theirs back."""
        ...

    @property
    def pass_rows(self) -> int:
        """Rows of a sequence in a pass at most, where windows bound its pages; 0: any number."""
        ...

    def new_cache(self) -> Cache:
        """Of another sequence, without rows."""
        ...

    def reserve(self, cache: Cache, write_index: int, rows: int) -> None:
        """Before a pass: pages for its rows; raises `LimitError` where none is free.

        Pages that are before all windows are given back.
        """
        ...

    def least_rows(self, cache: Cache) -> int:
        """The fewest rows behind which it can be gone on; 0: any number that was written."""
        ...

    def write_rows(self, cache: Cache, rows: NDArray[Any], least_rows: int) -> None:
        """See `Cache`; fewer than `least_rows` of them cannot be gone on from."""
        ...

    def fork(self, cache: Cache) -> Cache:
        """Another with the same rows; they are copied when one of the two writes over them."""
        ...

    def release(self, cache: Cache) -> None:
        """Give the pages of a cache back."""
        ...

    def run_many(self, parts: Sequence[tuple[Cache, Mapping[str, NDArray[Any]]]]) -> list[Outputs]:
        """One pass for several sequences, at most `num_sequences`.

        Args:
            parts: caches, in which rows are reserved, with inputs as `run` takes them.

        Returns:
            What `run` would give for each.
        """
        ...


@runtime_checkable
class ArrangesPasses(Protocol):
    """A `SharedRunner` that computes what several sequences ask for in the cheapest passes."""

    @property
    def shared_rows(self) -> tuple[int, int]:
        """Rows of a sequence, and of all, at most, in a pass of trees side by side."""
        ...

    def learn_costs(self, costs: SharedCosts) -> None:
        """What passes cost was measured; before, the runner assumes it."""
        ...


@runtime_checkable
class LimitsBatch(Protocol):
    """A runner without a cache, whose passes may have a place on the first axis for each answer."""

    @property
    def max_sequences(self) -> int:
        """Of a pass."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A runner whose graphs add what LoRA adapters do; which of them, a pass says by `ADAPTER`."""

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """All adapters of the passes to come, as `ADAPTER_WEIGHTS` and `ADAPTER_TABLE`."""
        ...


class Backend(Protocol):
    """The functions that a backend's package has."""

    def available(self) -> str:
        """The library's version; raises `EdgeLLMError` with the remedy when it cannot run."""
        ...

    def require_device(self) -> None:
        """Raises `EdgeLLMError`, which says why, if engines that are built here do not run here."""
        ...

    def open_engine(self, folder: Path, engine: Engine) -> Mapping[str, Runner]:
        """Load an engine that was built for this machine; its runners by role.

        Raises:
            BrokenArtifactError: built for another machine or library, or refused by the library.
            LimitError: the memory of the device does not suffice.
        """
        ...


class FetchedOutputs(Mapping[str, NDArray[Any]]):
    """See `Outputs`; reading what is gone is a `ValueError`."""

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
        """Raises `ValueError` if the next pass has overwritten what `name` is read from."""
        if not self._is_latest:
            raise ValueError(f"{name} of a pass is read after the next one")

    def expire(self) -> None:
        """The next pass begins."""
        self._is_latest = False


def require_cache(runner: Runner) -> Cache:
    """The cache of a role that has one."""
    assert runner.cache is not None
    return runner.cache


def names() -> list[str]:
    """All backends, available or not."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def libraries() -> list[str]:
    """Those of all backends, as users name them."""
    return sorted({library_of(name) for name in names()})


def resolve(name: str, device: str = "") -> str:
    """The backend of a library on a device; "auto" is what `automatic` chooses.

    Args:
        name: a library, a backend, or "auto".
        device: of `DEVICES`, or "" for the usual one.

    Raises:
        EdgeLLMError: unknown, or (none) available on this machine, or not for the device.
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
        device: of `DEVICES`, or "" for any. Without a GPU ONNX Runtime's engines for CUDA can be
            built all the same, if they are asked for.

    Returns:
        Its name, and by name why each before it does not run here.

    Raises:
        EdgeLLMError: none does.
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
    """A backend as users ask for it."""
    library = library_of(name)
    return library if library == name else f"{library} on {_DEVICES[name]}"


def find(name: str) -> Backend:
    """The backend of a library or package, on the library's usual device; raises as `resolve`."""
    return cast(Backend, importlib.import_module(f"{__name__}.{resolve(name)}"))


def _reason_against(name: str) -> str:
    try:
        find(name).require_device()
    except EdgeLLMError as error:
        return str(error)
    return ""
