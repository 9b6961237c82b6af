"""Faults of one request: an exception ends only its request, with the error as the reason.

Requests share forward passes, threads, files and servers. Work of one request only (its
tokenizer stream, grammar, sampler, drafter, template, callbacks) runs in `Confined`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

from edgellm.core.errors import (
    EdgeLLMError,
    UnexpectedError,
)

T = TypeVar("T")
R = TypeVar("R")
# Classes by name, since asyncio takes a hundredth of a second to import.
_FAULTS = {"CancelledError", "PanicException"}
_REPORT = "the other requests continue; report it with the request that raised it"


class Confined(partial[object]):
    """`with Confined(fail):` passes exceptions of its block to `fail`, except interrupts.

    Libraries and callbacks may raise any exception, so no narrower class suffices. A `partial`,
    since one is made for each token, and it needs no call of a Python function.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """Pass an exception to `fail`."""
        if error is None or not is_fault(error):
            return False
        self(as_failure(error))
        return True


def computed(
    items: Sequence[T],
    compute: Callable[[Sequence[T]], Sequence[R]],
    fail: Callable[[T, EdgeLLMError], object],
) -> Generator[tuple[T, R], None, None]:
    """Results of one forward pass for several items; if it fails, of one pass for each.

    One item may cause the failure: `fail` receives the item that fails alone, with its error.

    Yields:
        An item and its result, which must be used before the next one.
    """
    try:
        results = compute(items)
    except BaseException as error:
        if not is_fault(error):
            raise
        if len(items) == 1:
            fail(items[0], as_failure(error))
            return
    else:
        yield from zip(items, results, strict=True)
        return
    for one in items:
        yield from computed([one], compute, fail)


def is_fault(error: BaseException) -> bool:
    """Whether an exception is an error, not an interrupt of the program.

    Cancelled futures and panics of extension modules in Rust are not subclasses of `Exception`.
    """
    return isinstance(error, Exception) or any(
        kind.__name__ in _FAULTS for kind in type(error).__mro__
    )


def as_failure(error: BaseException) -> EdgeLLMError:
    """The error of a request: an `EdgeLLMError` unchanged, others by class and text."""
    if isinstance(error, EdgeLLMError):
        return error
    failure = UnexpectedError(described(error), hint=_hint(error))
    failure.__cause__ = error
    return failure


def described(error: BaseException) -> str:
    """One line: the class of an exception, and the first line of its text."""
    if isinstance(error, MemoryError):
        return "out of memory"
    # By the standard library, since an exception's `__str__` may raise as well.
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return lines[0].strip().removesuffix(":").encode("utf-8", "backslashreplace").decode()


def _hint(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "close other programs or use a smaller model"
    return _REPORT
