"""Compiled kernels of edgellm's own in a CUDA context: the driver reads their PTX once."""

from __future__ import annotations

from typing import Any

from edgellm.device_runtime.gpu import driver_cuda, newest_ptx
from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.kernels.triton.catalog import Kernel, Variant


class LoadedKernels:
    """See the module; every call needs the context to be current."""

    def __init__(self, driver: Any, gpu: Any) -> None:
        major, minor = gpu.compute_capability()
        self._driver, self._sm = driver, 10 * major + minor
        self._loaded: dict[str, tuple[Any, prebuilt.Compiled]] = {}

    def find(self, variant: Variant) -> tuple[Any, prebuilt.Compiled]:
        """The function and what it is launched with; raises as `prebuilt.find`."""
        if variant.name not in self._loaded:
            cuda = driver_cuda()
            newest = newest_ptx(cuda) if cuda is not None else None
            compiled = prebuilt.find(variant, self._sm, newest)
            module = self._driver.module_from_buffer(compiled.ptx.encode() + b"\0")
            function = module.get_function(compiled.entry)
            function.prepare(argument_codes(variant.kernel))
            self._loaded[variant.name] = function, compiled
        return self._loaded[variant.name]


def argument_codes(kernel: Kernel) -> str:
    """Types of arguments as pycuda wants them: P for pointers, i for int32."""
    return "".join("P" if kind.startswith("*") else "i" for kind in kernel.signature.values())
