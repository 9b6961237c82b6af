"""Kernels that TensorRT-RTX compiles for the shapes of a pass, on the machine that runs it.

By default it compiles them in the background and runs slower kernels until then, which a CUDA
graph would keep. For passes that may be recorded it compiles them when the shape is first run; not
for prompts, which have many shapes. Its runtime cache keeps them for later processes.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from pathlib import Path
from typing import Any

from edgellm.core.artifact import replace_file
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device


def specialize(trt: Any, engine: Any, device: Device, path: Path) -> SpecializedKernels | None:
    """Settings of an engine's contexts; None with a library whose plans have all kernels.

    Args:
        trt: the module that compiled the engine.
        engine: the loaded plan.
        device: where it runs.
        path: the file of the runtime cache; read if it exists.
    """
    if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
        return None
    return SpecializedKernels(trt=trt, engine=engine, device=device, path=path)


class SpecializedKernels:
    """Runtime configurations, and the runtime cache that they fill."""

    def __init__(self, *, trt: Any, engine: Any, device: Device, path: Path) -> None:
        """Read the cache; the library ignores one of another version, GPU or driver."""
        self._device, self._path, self._saved_bytes = device, path, 0
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        with device.current():
            configs = [engine.create_runtime_config() for _ in range(2)]
            self._cache = configs[0].create_runtime_cache()
            with contextlib.suppress(OSError):
                saved = path.read_bytes()
                self._saved_bytes = len(saved) if self._cache.deserialize(saved) else 0
            for config, strategy in zip(configs, (strategies.EAGER, strategies.LAZY), strict=True):
                config.dynamic_shapes_kernel_specialization_strategy = strategy
                config.set_execution_context_allocation_strategy(
                    trt.ExecutionContextAllocationStrategy.USER_MANAGED
                )
                config.set_runtime_cache(self._cache)
        self._recorded, self._other = configs
        # Shapes of prompts come later. The device is closed after this, as it was opened before.
        atexit.register(_save, weakref.ref(self))

    def config(self, *, is_recorded: bool) -> Any:
        """What to make a context with, of passes that may be recorded or of others."""
        return self._recorded if is_recorded else self._other

    def save(self) -> None:
        """Write the cache if it grew; a folder that cannot be written leaves it unsaved."""
        with self._device.current():
            content = bytes(memoryview(self._cache.serialize()))
        if len(content) <= self._saved_bytes:
            return
        with contextlib.suppress(OSError, EdgeLLMError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content)
            self._saved_bytes = len(content)


def _save(kernels: weakref.ref[SpecializedKernels]) -> None:
    found = kernels()
    if found is not None:
        found.save()
