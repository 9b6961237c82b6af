"""Whose turn it is: threads that share an engine are served in line, an answer at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from edgellm.contract import EdgeLLMError

PATIENCE_S = 30.0  # nobody waits longer for an answer that is not iterated over


class Turn:
    """The engine, from an answer's first pass to its last."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Nothing else is computed during the block; an answer that was overtaken waits in line.

        Raises:
            EdgeLLMError: the engine was closed.
        """
        with self._turns.computing(self):
            yield


class Turns:
    """The line before an engine.

    An answer that pauses between two passes keeps the engine, until the thread that iterates
    over it turns to another, or, if others wait, until it has paused for `PATIENCE_S`. So no
    thread waits for ever. An answer that was overtaken goes on when its turn comes again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[Turn] = deque()
        self._holder: Turn | None = None
        self._thread = 0  # of the holder's latest pass
        self._paused = 0.0  # since, of time.monotonic()
        self._computes = 0  # the thread that does; 0: none
        self._visitors: set[int] = set()  # threads that wait for the end of a pass
        self._closed = False

    @contextmanager
    def take(self) -> Iterator[Turn]:
        """Wait for the engine and have it during the block; raises as `Turn.computing`."""
        turn = Turn(self)
        self._enter(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._let_go(turn)

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Compute something between two passes, whosever turn it is; raises if it was closed."""
        thread = threading.get_ident()
        try:
            with self._changed:
                self._visitors.add(thread)
                self._changed.wait_for(self._is_free)
                self.require_open()
                self._computes = thread
            yield
        finally:
            self._end_of_pass()

    @contextmanager
    def computing(self, turn: Turn) -> Iterator[None]:
        """See `Turn.computing`."""
        thread = threading.get_ident()
        try:
            with self._changed:
                self._wait_for(turn, thread)
                self._computes = self._thread = thread
            yield
        finally:
            self._end_of_pass()

    def close(self) -> None:
        """Wait for the end of a pass and let nobody compute again."""
        with self._changed:
            self._changed.wait_for(self._is_free)
            self._closed, self._holder = True, None
            self._changed.notify_all()

    def require_open(self) -> None:
        """Raises `EdgeLLMError` behind `close`."""
        if self._closed:
            raise EdgeLLMError("the LLM was closed", hint="load the engine again")

    def _wait_for(self, turn: Turn, thread: int) -> None:
        """Wait until a turn has the engine and nobody computes."""
        while True:
            self.require_open()
            if self._holder is not turn:
                self._enter(turn)
            self._changed.wait_for(lambda: self._is_free() and not self._visitors - {thread})
            if self._holder is turn:
                return

    def _enter(self, turn: Turn) -> None:
        with self._changed:
            if self._thread == threading.get_ident():
                self._let_go(self._holder)  # the caller turned to another answer
            self._line.append(turn)
            try:
                while not self._closed and (wait_s := self._wait_s(turn)) > 0:
                    self._changed.wait(wait_s)
                self.require_open()
                self._holder, self._paused = turn, time.monotonic()
                self._thread = threading.get_ident()
            finally:
                self._line.remove(turn)
                self._changed.notify_all()

    def _wait_s(self, turn: Turn) -> float:
        """Seconds to wait before it is worth to look again; 0: it is this one's turn."""
        if not self._is_free() or self._line[0] is not turn:
            return PATIENCE_S
        return 0 if self._holder is None else self._paused + PATIENCE_S - time.monotonic()

    def _is_free(self) -> bool:
        """Whether the calling thread may compute; an interrupt may have cut a pass of its own."""
        return self._computes in (0, threading.get_ident())

    def _let_go(self, turn: Turn | None) -> None:
        if self._holder is turn:
            self._holder = None
            self._changed.notify_all()

    def _end_of_pass(self) -> None:
        """Of the calling thread, if it has begun one."""
        thread = threading.get_ident()
        with self._changed:
            self._visitors.discard(thread)
            if self._computes == thread:
                self._computes, self._paused = 0, time.monotonic()
            self._changed.notify_all()
