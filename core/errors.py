"""Errors that a user can fix; all of them are an `EdgeLLMError`."""

from __future__ import annotations


class EdgeLLMError(Exception):
    """An error that the user can fix: a one-line message and a one-line hint."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnsupportedModelError(EdgeLLMError):
    """The checkpoint is valid, but edgellm does not support it."""


class BrokenArtifactError(EdgeLLMError):
    """A checkpoint, bundle or engine on disk is damaged, incomplete or of another version."""


class LimitError(EdgeLLMError):
    """A limit is exceeded: memory, prompt length, KV cache capacity."""


class RequestError(EdgeLLMError):
    """A request is malformed; other requests of the file still run."""


class UnexpectedError(EdgeLLMError):
    """A request failed by a bug of edgellm or a library, which is its `__cause__`."""
