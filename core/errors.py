"""Errors that a user can mend; all of them are an `EdgeLLMError`."""

from __future__ import annotations


class EdgeLLMError(Exception):
    """A failure that the user can mend: one line that says what, one that says how."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnsupportedModelError(EdgeLLMError):
    """The checkpoint is sound, but edgellm does not know how to compute it."""


class BrokenArtifactError(EdgeLLMError):
    """A checkpoint, bundle or engine on disk is damaged, incomplete or of another version."""


class LimitError(EdgeLLMError):
    """Something does not fit: memory, prompt length, KV capacity."""


class RequestError(EdgeLLMError):
    """One request is malformed; the others of the file still run."""


class UnexpectedError(EdgeLLMError):
    """One request met a fault of the program or of a library, which is its `__cause__`."""
