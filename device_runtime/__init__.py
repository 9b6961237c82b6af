"""Engine to tokens: backends, sampling, the decoding loop, `llm_inference`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import edgellm.core  # noqa: F401 - it switches off the telemetry of libraries

if TYPE_CHECKING:
    from edgellm.device_runtime.api.llm import LLM, BatchError, RequestOutput, Step
    from edgellm.device_runtime.sampling.params import SamplingParams
    from edgellm.device_runtime.speculate.options import SpecOptions
    from edgellm.device_runtime.transcription.options import TranscriptionOptions
    from edgellm.device_runtime.transcription.transcriber import Transcriber

__all__ = [
    "LLM",
    "BatchError",
    "RequestOutput",
    "SamplingParams",
    "SpecOptions",
    "Step",
    "Transcriber",
    "TranscriptionOptions",
]


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that `llm_inference --help` stays quick."""
    if name in ("LLM", "RequestOutput", "BatchError", "Step"):
        from edgellm.device_runtime.api import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from edgellm.device_runtime.sampling.params import SamplingParams

        return SamplingParams
    if name == "SpecOptions":
        from edgellm.device_runtime.speculate.options import SpecOptions

        return SpecOptions
    if name == "Transcriber":
        from edgellm.device_runtime.transcription.transcriber import Transcriber

        return Transcriber
    if name == "TranscriptionOptions":
        from edgellm.device_runtime.transcription.options import TranscriptionOptions

        return TranscriptionOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
