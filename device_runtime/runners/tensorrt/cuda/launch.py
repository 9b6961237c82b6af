"""Kernels of edgellm's own, launched by the NVIDIA driver on a given stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton.prebuilt import Compiled


class DriverLaunch:
    """Launches in the context that is current; reads each kernel's PTX once."""

    def __init__(self) -> None:
        self._driver: Any = None
        self._functions: dict[str, ctypes.c_void_p] = {}  # by the kernel's text

    def __call__(
        self, compiled: Compiled, grid: tuple[int, int, int], arguments: Sequence[int], stream: int
    ) -> None:
        """Launch a kernel; its arguments are addresses and int32 numbers, in its order.

        Raises:
            EdgeLLMError: the driver is missing or refuses; says with which number.
        """
        function = self._functions.get(compiled.ptx)
        if function is None:
            function = self._functions[compiled.ptx] = self._load(compiled)
        kinds = compiled.kernel.signature.values()
        values = [
            (ctypes.c_void_p if kind.startswith("*") else ctypes.c_int32)(value)
            for kind, value in zip(kinds, arguments, strict=True)
        ]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        block = compiled.threads, 1, 1
        given = (*grid, *block, compiled.shared_bytes, ctypes.c_void_p(stream), places, None)
        self._ask("cuLaunchKernel", compiled, function, *given)

    def _load(self, compiled: Compiled) -> ctypes.c_void_p:
        if self._driver is None:
            try:
                self._driver = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise EdgeLLMError(f"the NVIDIA driver cannot be loaded: {error}") from None
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        text, entry = compiled.ptx.encode(), compiled.entry.encode()
        self._ask("cuModuleLoadData", compiled, ctypes.byref(module), text)
        self._ask("cuModuleGetFunction", compiled, ctypes.byref(function), module, entry)
        return function

    def _ask(self, name: str, compiled: Compiled, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise EdgeLLMError(
                f"the NVIDIA driver refuses the kernel {compiled.entry}: {name} gives {status}",
                hint="build the engine again on this machine; edgellm-doctor says more",
            )
