"""Faults of one request: whatever it raises ends it alone, and says why.

Requests share forward passes, threads, files and servers. What is one request's own work (its
tokenizer stream, grammar, sampler, drafter, template, callbacks) runs `confined`.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
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
_REPORT = "the other requests go on; report it with the request that raised it"


class Confined(partial[object]):
    """`with Confined(fail):` hands faults of its block to `fail`; interrupts pass through.

    Any exception may come out of libraries and of callbacks, so that no narrower class would do.
    A partial, since it is made for each token: that takes no call of a Python function.
    """

    def __enter__(self) -> None:
        """Nothing is to be prepared."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """Hand a fault over."""
        if error is None or not is_fault(error):
            return False
        self(as_failure(error))
        return True


def computed(
    items: Sequence[T],
    compute: Callable[[Sequence[T]], Sequence[R]],
    fail: Callable[[T, EdgeLLMError], object],
) -> Generator[tuple[T, R], None, None]:
    """Results of a forward pass for several items; where it fails, of one for each.

    It may be one's fault alone: `fail` takes the item that fails alone, and why.

    Yields:
        An item and its result, which is to be used before the next is asked for.
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
    """Whether an exception is a fault of the work at hand, and no interrupt of the program.

    Cancelled futures and the panics of extension modules in Rust are no subclass of `Exception`.
    """
    return isinstance(error, Exception | CancelledError) or type(error).__name__ == "PanicException"


def as_failure(error: BaseException) -> EdgeLLMError:
    """What a request is told of a fault: an `EdgeLLMError` as it is, else its class and text."""
    if isinstance(error, EdgeLLMError):
        return error
    failure = UnexpectedError(described(error), hint=_hint(error))
    failure.__cause__ = error
    return failure


def described(error: BaseException) -> str:
    """One line: the class of an exception, and the first line of its text."""
    if isinstance(error, MemoryError):
        return "out of memory"
    # Of the standard library, since an exception's `__str__` may raise as well.
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return lines[0].strip().removesuffix(":").encode("utf-8", "backslashreplace").decode()


def _hint(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "close other programs or use a smaller model"
    return _REPORT
