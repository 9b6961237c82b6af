"""Ctrl-C that waits for the end of a forward pass, so that outputs which it finishes are kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HeldInterrupts:
    """A block in which `check` raises the first interrupt; the second ends the process at once."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._is_holding = self._is_waiting = False
        self._came = 0  # the signal of the first interrupt

    def __enter__(self) -> HeldInterrupts:
        """Take the place of the handlers; other threads than the main one get no signals."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        self._is_holding = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the handlers back; an interrupt that waits is raised."""
        self._is_holding = False
        for number, handler in self._handlers.items():
            if number != self._came:  # whose next one ends the process
                signal.signal(number, handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise the interrupt that waits, if there is one."""
        if self._is_waiting:
            self._is_waiting = False
            self._handlers[self._came](self._came, None)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A part of the block that may take long, in which interrupts do not wait."""
        self._is_holding = False
        self.check()
        try:
            yield
        finally:
            self._is_holding = True

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if not self._is_holding:
            self._handlers[number](number, frame)
            return
        self._came, self._is_waiting = number, True
        signal.signal(number, signal.SIG_DFL)
