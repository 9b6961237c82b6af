"""Errors that a user can fix; all of them are an `EdgeLLMError`."""

from __future__ import annotations

from collections.abc import Collection, Iterable


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


class PromptLengthError(RequestError):
    """The prompt has more tokens than the engine takes, or than its KV cache has room for."""


class UnexpectedError(EdgeLLMError):
    """A request failed by a bug of edgellm or a library, which is its `__cause__`."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The question "did you mean X?" with the known name most like `name`, or "" for none.

    Upper case, dashes and underscores make no difference.
    """
    import difflib  # takes a millisecond, which only errors pay

    folded = {fold_name(one): one for one in known}
    close = difflib.get_close_matches(fold_name(name), folded, n=1)
    return f"did you mean {folded[close[0]]}?" if close else ""


def fold_name(name: str) -> str:
    """A name without case, dashes and underscores."""
    return name.replace("-", "").replace("_", "").lower()


def require_choice(flag: str, value: str, known: Collection[str]) -> None:
    """Raise `EdgeLLMError` with the choices of a flag, unless its value is one of them."""
    if value not in known:
        *others, last = known
        listed = f"{', '.join(others)} or {last}" if others else last
        raise EdgeLLMError(f"{flag} {value}: give {listed}", hint=suggestion(value, known))
