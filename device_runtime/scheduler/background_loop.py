"""One thread that computes for many: who waits for answers sleeps until they have ended.

Where each of several threads reads an answer of its own, every pass wakes all of them to hand out
a token each, and they hold up the one that computes the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.scheduler.concurrent import ConcurrentRequests
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.scheduler.running_batch import RunningRequest
from edgellm.device_runtime.scheduler.step_lock import StepLock

Listener = Callable[[RequestOutput, tuple[Step, ...]], object]


class _Order:
    """Answers that somebody waits for."""

    def __init__(self, going: ConcurrentRequests, told: Listener) -> None:
        self.going, self._told = going, told
        self.ended, self.failure = threading.Event(), None

    failure: BaseException | None

    def fill(self) -> None:
        """Begin answers while there are places; end if there are none."""
        try:
            if not self.ended.is_set() and not self.going.fill():
                self.ended.set()
        except BaseException as error:  # noqa: BLE001 - the driver outlives every order
            self.fail(error)

    def take(self, entry: RunningRequest, steps: Sequence[Step]) -> None:
        """Tell what came of an answer; what fails ends the order."""
        if self.ended.is_set():  # another of its answers failed in the same pass
            return
        try:
            self._told(*self.going.take(entry, steps))
        except BaseException as error:  # noqa: BLE001 - the driver outlives every order
            self.fail(error)
            return
        if entry.failure is not None and entry not in self.going.entries:
            self.fail(entry.failure)

    def fail(self, error: BaseException) -> None:
        """Drop what is left of it."""
        self.going.drop()
        self.failure = error
        self.ended.set()


class BackgroundLoop:
    """See the module; `end` stops the thread when all answers have ended."""

    def __init__(self, turns: StepLock) -> None:
        self._turns = turns
        self._changed = threading.Condition()
        self._new: list[_Order] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._drive, name="passes", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def end(self) -> None:
        """Stop when nobody waits any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, max_seconds: float) -> None:
        """Wait for the end."""
        if self._thread.is_alive():
            self._thread.join(max_seconds)

    def grow(self, answers: Iterable[RequestOutput], maximum: int, told: Listener) -> None:
        """Let answers grow to their ends; from any thread.

        Args:
            answers: begun one by one, in the driver's thread.
            maximum: of them in the works.
            told: takes an answer and its new steps, in the driver's thread.

        Raises:
            Exception: an answer failed; the others are dropped.
        """
        order = _Order(ConcurrentRequests(self._turns, answers, maximum), told)
        with self._changed:
            self._new.append(order)
            self._changed.notify()
        order.ended.wait()
        if order.failure is not None:
            raise order.failure

    def _drive(self) -> None:
        orders: list[_Order] = []
        while True:
            orders = [one for one in orders if not one.ended.is_set()]
            with self._changed:
                if not orders:
                    self._changed.wait_for(lambda: self._new or self._is_ending)
                orders += self._new
                self._new = []
            if not orders:
                return
            for one in orders:
                one.fill()
            self._pass(orders)

    def _pass(self, orders: list[_Order]) -> None:
        of = {entry: one for one in orders for entry in one.going.entries}
        if not of:
            return
        try:
            news = self._turns.poll([*of])
        except BaseException as error:  # noqa: BLE001 - the engine was closed, or an interrupt
            for one in orders:
                one.fail(error)
            return
        for entry, steps in news:
            of[entry].take(entry, steps)
