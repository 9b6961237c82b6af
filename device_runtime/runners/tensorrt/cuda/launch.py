"""Kernels of edgellm's own, launched by the NVIDIA driver on a given stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton.prebuilt import Compiled

# Launches a loaded kernel: its grid, its arguments in its order (addresses and int32 numbers), and
# the stream. Raises `EdgeLLMError` if the driver rejects it.
Launch = Callable[[tuple[int, int, int], Sequence[int], int], None]


class DriverKernels:
    """Kernels in the primary context of the first GPU; each kernel's PTX is read once."""

    def __init__(self) -> None:
        self._driver: Any = None
        self._primary = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}  # by the kernel's text

    def load(self, compiled: Compiled) -> Launch:
        """Load a kernel; a driver does not load it while a CUDA graph is recorded.

        Raises:
            EdgeLLMError: the driver is missing or rejects the kernel; says with which number.
        """
        function = self._functions.get(compiled.ptx)
        if function is None:
            function = self._functions[compiled.ptx] = self._load(compiled)
        kinds = [
            ctypes.c_void_p if kind.startswith("*") else ctypes.c_int32
            for kind in compiled.kernel.signature.values()
        ]

        def launch(grid: tuple[int, int, int], arguments: Sequence[int], stream: int) -> None:
            values = [kind(value) for kind, value in zip(kinds, arguments, strict=True)]
            places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
            block = compiled.threads, 1, 1
            given = (*grid, *block, compiled.shared_bytes, ctypes.c_void_p(stream), places, None)
            self._ask("cuLaunchKernel", compiled, function, *given)

        return launch

    def _load(self, compiled: Compiled) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        text, entry = compiled.ptx.encode(), compiled.entry.encode()
        with self._current(compiled):
            self._ask("cuModuleLoadData", compiled, ctypes.byref(module), text)
            self._ask("cuModuleGetFunction", compiled, ctypes.byref(function), module, entry)
        return function

    @contextmanager
    def _current(self, compiled: Compiled) -> Iterator[None]:
        """The context, current in whatever thread of a compiler this is."""
        if self._driver is None:
            try:
                self._driver = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise EdgeLLMError(
                    f"the NVIDIA driver cannot be loaded: {error}", hint="edgellm-doctor says more"
                ) from None
        if not self._primary:
            gpu = ctypes.c_int()
            self._ask("cuInit", compiled, 0)
            self._ask("cuDeviceGet", compiled, ctypes.byref(gpu), 0)
            self._ask("cuDevicePrimaryCtxRetain", compiled, ctypes.byref(self._primary), gpu)
        self._ask("cuCtxPushCurrent_v2", compiled, self._primary)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent_v2", compiled, ctypes.byref(ctypes.c_void_p()))

    def _ask(self, name: str, compiled: Compiled, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise EdgeLLMError(
                f"the NVIDIA driver refuses the kernel {compiled.entry}: {name} gives {status}",
                hint="build the engine again on this machine; edgellm-doctor says more",
            )
