"""A plan file to an engine that runs; the device's side is `cuda.py`."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.graph_io import CACHE_TABLE
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Buffer, Device, TensorInfo
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import open_weights
from edgellm.device_runtime.runners.tensorrt.library.log import LibraryLog
from edgellm.device_runtime.runners.tensorrt.library.refit import refit
from edgellm.device_runtime.runners.tensorrt.library.specialized_kernels import (
    SpecializedKernels,
    specialize,
)


def load_engine(
    trt: Any,
    path: Path,
    device: Device,
    caches: Mapping[str, str],
    compiled: Path,
    *,
    is_stripped: bool = False,
) -> LoadedEngine:
    """Read a plan file, whose origin was compared with this machine before.

    Args:
        trt: the module that compiled it.
        path: the plan.
        device: where its weights go.
        caches: outputs that must lie where an input lies, and that input; an engine that takes
            a table of caches has none.
        compiled: file of kernels that the library compiles while the engine runs, if it does.
        is_stripped: the plan has no weights; see `refit`.

    Raises:
        BrokenArtifactError: the library refuses the file or its weights, or the file of weights
            by address is damaged.
        LimitError: there is too little memory for these weights or to refit the plan.
        EdgeLLMError: a cache is not updated in place.
    """
    log = LibraryLog(trt)
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        device.current(),
    ):
        runtime = trt.Runtime(log.logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is not None and is_stripped:
            refit(trt, engine, path, log)
    if engine is None:
        words = " ".join(log.errors[0].split()) if log.errors else "it does not say why"
        raise BrokenArtifactError(
            f"TensorRT {trt.__version__} cannot load {path}: {words}",
            hint="build the engine again on this machine",
        )
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    for output, wanted in caches.items():
        if CACHE_TABLE in names:
            break  # the engine knows its caches by address
        updates = engine.get_tensor_shape(output) == engine.get_tensor_shape(wanted)
        if updates and hasattr(engine, "get_aliased_input_tensor"):
            found = engine.get_aliased_input_tensor(output)
            if found != wanted:
                raise EdgeLLMError(
                    f"{path} does not update {wanted} in place",
                    hint="build the engine again with this TensorRT",
                )
    kernels = specialize(trt, engine, device, compiled)
    return LoadedEngine(
        trt=trt, runtime=runtime, engine=engine, device=device, log=log, kernels=kernels, plan=path
    )


class LoadedEngine:
    """See `device.CompiledEngine`."""

    def __init__(
        self,
        *,
        trt: Any,
        runtime: Any,
        engine: Any,
        device: Device,
        log: LibraryLog,
        kernels: SpecializedKernels | None = None,
        plan: Path | None = None,
    ) -> None:
        """`plan`: the engine's file, next to that of its weights by address."""
        self._trt, self._engine, self._device, self._log = trt, engine, device, log
        self.kernels = kernels
        self._runtime = runtime  # lives as long as what it loaded
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(
                name=name,
                is_input=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
                dtype=np.dtype(trt.nptype(engine.get_tensor_dtype(name))),
                shape=tuple(engine.get_tensor_shape(name)),
            )
            for name in names
        }
        self.weights = None if plan is None else open_weights(self.tensors, device, plan)

    @property
    def num_profiles(self) -> int:
        """See `device.CompiledEngine`."""
        return self._engine.num_optimization_profiles

    def shape_range(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `device.CompiledEngine`."""
        if -1 not in (known := self.tensors[name].shape):
            return known, known
        least, _, maximum = self._engine.get_tensor_profile_shape(name, profile)
        return tuple(least), tuple(maximum)

    def scratch_bytes(self, profile: int) -> int:
        """See `device.CompiledEngine`."""
        return max(int(self._engine.get_device_memory_size_for_profile_v2(profile)), 1)

    def new_context(
        self, profile: int, scratch: Buffer, *, is_recorded: bool = False
    ) -> LoadedContext:
        """See `device.CompiledEngine`."""
        given = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.kernels is not None:
            given = self.kernels.config(is_recorded=is_recorded)
        with self._device.current():
            return self._new_context(profile, scratch, given)

    def _new_context(self, profile: int, scratch: Buffer, given: Any) -> LoadedContext:
        context = self._engine.create_execution_context(given)
        if context is None:
            raise self._log.failure("TensorRT does not make an execution context")
        context.set_device_memory(scratch.address, scratch.num_bytes)
        stream = self._device.stream
        if not context.set_optimization_profile_async(profile, stream):
            raise self._log.failure(f"TensorRT does not take profile {profile}")
        self._device.synchronize_all()  # weights may still be copied on a stream of TensorRT's
        return LoadedContext(context=context, device=self._device, log=self._log, scratch=scratch)


class LoadedContext:
    """See `device.Context`."""

    def __init__(self, *, context: Any, device: Device, log: LibraryLog, scratch: Buffer) -> None:
        self._context, self._device, self._log = context, device, log
        self._stream = device.stream
        self._scratch = scratch  # lives as long as what computes in it

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        """See `device.Context`."""
        with self._device.current():
            taken = self._context.set_input_shape(name, tuple(shape))
        if not taken:
            raise self._log.failure(f"TensorRT does not take {name} {list(shape)}")

    def output_shape(self, name: str) -> tuple[int, ...]:
        """See `device.Context`."""
        return tuple(self._context.get_tensor_shape(name))

    def bind(self, name: str, address: int) -> None:
        """See `device.Context`."""
        if not self._context.set_tensor_address(name, address):
            raise self._log.failure(f"TensorRT does not take the address of {name}")

    def enqueue(self) -> None:
        """See `device.Context`."""
        with self._device.current():
            asked = self._context.execute_async_v3(self._stream)
        if not asked:
            raise self._log.failure("TensorRT does not run the pass")

    def is_capturable(self) -> bool:
        """See `device.Context`; only TensorRT-RTX can say no."""
        ask = getattr(self._context, "is_stream_capturable", None)
        with self._device.current():
            return True if ask is None else bool(ask(self._stream))
