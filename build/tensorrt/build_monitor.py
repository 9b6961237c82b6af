"""Progress and cancellation of TensorRT's compiler, and the stream of its engine.

TensorRT calls objects of its own classes, which must not raise: errors are stored, and raised after
the call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgellm.core.commands.progress import Report
from edgellm.core.resources import trim


def progress_monitor(trt: Any, report: Report, pending: list[int]) -> Any:
    """Reports the compiler's phases, and cancels the build when a signal is `pending`."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, _parent: str | None, _steps: int) -> None:
            report(f"compiling: {phase.lower()}")

        def step_complete(self, _phase: str, _step: int) -> bool:
            return not pending

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()


class EngineFile:
    """Receives the engine in pieces while it is compiled, or whole if TensorRT has no streams."""

    def __init__(self, trt: Any, path: Path) -> None:
        self._stream = path.open("wb")
        self._failure: OSError | None = None
        self._trt = trt

    def receive(self, builder: Any, network: Any, config: Any) -> bool:
        """Compile a network into the file; whether the compiler made an engine."""
        if hasattr(self._trt, "IStreamWriter"):
            writer = _writer(self._trt, self._write)
            return builder.build_serialized_network_to_stream(network, config, writer)
        plan = builder.build_serialized_network(network, config)
        if plan is not None:
            self._write(plan)
        return plan is not None

    def _write(self, data: bytes) -> int:
        trim()  # the compiler's memory peaks while it writes
        try:
            return self._stream.write(data)
        except OSError as error:
            self._failure = error
            return 0

    def close(self) -> None:
        """Flush the file; raises `OSError` if it could not be written."""
        self._stream.close()
        if self._failure is not None:
            raise self._failure


def _writer(trt: Any, write: Callable[[bytes], int]) -> Any:
    """An object of TensorRT's class that forwards data to `write`."""

    class Writer(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            return write(data)

    return Writer()
