"""What the compiler tells while it works, and how it is stopped.

TensorRT calls back into objects of its own classes, from which nothing may be raised: what goes
wrong is kept, and raised when the call is over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.backends import Report
from edgellm.device_runtime.backends.tensorrt.memory import trim

_LAYERS = "Layers:"
_IGNORED_INPUT = "Unused Input"
_SHOWN = 300  # characters of a message


class BuildLog:
    """Errors, warnings, and the list of kernels; the rest of the log is thousands of lines."""

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.layers = ""
        keep, severity = self._keep, trt.ILogger.Severity

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, level: Any, message: str) -> None:
                is_error = level in (severity.ERROR, severity.INTERNAL_ERROR)
                keep(message, is_error=is_error, is_warning=level == severity.WARNING)

        self.logger = Logger()

    def _keep(self, message: str, *, is_error: bool, is_warning: bool) -> None:
        if is_error:
            self.errors.append(message)
        elif is_warning:
            self.warnings.append(message)
        elif message.startswith(_LAYERS):
            self.layers = message

    def failure(self, what: str) -> EdgeLLMError:
        """An error with the library's own words."""
        words = " ".join(self.errors[0].split()) if self.errors else "it does not say why"
        return EdgeLLMError(
            f"{what}: {words[:_SHOWN]}",
            hint="report it with the bundle's manifest; --backend onnxruntime builds for the CPU",
        )

    def refuse_ignored_inputs(self) -> None:
        """An operator whose input is not understood computes something else.

        Raises:
            EdgeLLMError: the library said that it ignores one.
        """
        for warning in self.warnings:
            if _IGNORED_INPUT in warning:
                raise EdgeLLMError(
                    f"TensorRT would ignore an input of the graph: {' '.join(warning.split())}",
                    hint="report it with the bundle's manifest",
                )


def progress_monitor(trt: Any, report: Report, pending: list[int]) -> Any:
    """Tells the compiler's own phases, and cancels the build when a signal is `pending`."""

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
    """Receives the engine in pieces while it is made."""

    def __init__(self, trt: Any, path: Path) -> None:
        self._stream = path.open("wb")
        self._failure: OSError | None = None
        write = self._write

        class Writer(trt.IStreamWriter):
            def __init__(self) -> None:
                trt.IStreamWriter.__init__(self)

            def write(self, data: bytes) -> int:
                return write(data)

        self.writer = Writer()

    def _write(self, data: bytes) -> int:
        trim()  # the pieces come when the compiler holds most
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
