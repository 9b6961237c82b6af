"""What the library says while it compiles or loads an engine.

It calls back into objects of its own classes, from which nothing may be raised: what goes wrong
is kept, and raised when the call is over.
"""

from __future__ import annotations

from typing import Any

from edgellm.core.errors import EdgeLLMError

_LAYERS = "Layers:"
_IGNORED_INPUT = "Unused Input"
_SHOWN = 300  # characters of a message


class LibraryLog:
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
