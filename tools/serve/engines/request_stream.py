"""The event stream of one request, for the task that serves its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive

from edgellm.tools.serve.engines.ask import EmbeddingJob, EngineRequest
from edgellm.tools.serve.engines.event_queue import loop_event_queue
from edgellm.tools.serve.engines.events import Event, Failed, Finished
from edgellm.tools.serve.engines.worker import Job, Worker, too_late
from edgellm.tools.serve.http.errors import ApiError

BODY_BYTES = "edgellm.body_bytes"  # in a scope: the size of a request's body
_LAST_PASS_S = 10.0  # for the pass that runs when the time is over


class DisconnectedError(Exception):
    """The client has disconnected."""


class Connection(Protocol):
    """A client's connection, such as Starlette's `Request`."""

    @property
    def scope(self) -> MutableMapping[str, Any]:
        """ASGI scope; `arrived` is the request's start by the loop's clock."""
        ...

    @property
    def receive(self) -> Receive:
        """ASGI receive; returns `http.disconnect` when the client has disconnected."""
        ...


class Call:
    """A job and its events; closing it ends the job before the next forward pass."""

    def __init__(
        self,
        *,
        worker: Worker,
        asks: Sequence[EngineRequest] | Sequence[EmbeddingJob],
        request: Connection,
        total_timeout_s: float,
    ) -> None:
        """Put the job into the queue.

        Raises:
            ApiError: 429 or 503.
        """
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        post = partial(loop_event_queue().post, self._events)
        deadline = request.scope.get("arrived", self._loop.time()) + total_timeout_s
        priority = min((ask.priority for ask in asks if isinstance(ask, EngineRequest)), default=0)
        num_bytes = request.scope.get(BODY_BYTES, 0)
        self._worker, self._job = (
            worker,
            Job(
                asks=tuple(asks),
                post=post,
                deadline=deadline,
                priority=priority,
                num_bytes=num_bytes,
            ),
        )
        worker.submit(self._job)
        self._left = len(asks)
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._expire)
        self._watch: asyncio.Task[None] | None = asyncio.create_task(
            self._wait_for_disconnect(request)
        )

    @property
    def deadline(self) -> float:
        """Deadline of the last byte, by the loop's clock."""
        return self._deadline

    async def arrived(self) -> list[Event]:
        """All events since the last call, at least one.

        Raises:
            DisconnectedError: the client has disconnected.
            Exception: the request failed, for this reason.
        """
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for at, event in enumerate(events):  # a disconnect may overtake the last step
            if isinstance(event, Failed):
                if not at:
                    events.clear()  # the error's frames refer to them
                    raise event.error
                self._events.put_nowait(event)  # earlier events are delivered first
                events = events[:at]
                break
        self._left -= sum(isinstance(event, Finished) for event in events)
        return events

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        """Yield events until all sequences are finished; raises as `arrived`."""
        while self._left:
            yield await self.arrived()

    def close(self) -> None:
        """Stop the job, whatever its state."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # its error's frames refer to this call, and to the request
        self._worker.abandon(self._job)

    def _expire(self) -> None:
        """Fail a waiting job; the worker ends a running one before its next forward pass."""
        if self._worker.is_waiting(self._job):
            self._fail(_too_late())
        else:
            self._timer = self._loop.call_later(_LAST_PASS_S, self._fail, _too_late())

    def _fail(self, error: Exception) -> None:
        self._job.abandoned = True
        self._events.put_nowait(Failed(error))

    async def _wait_for_disconnect(self, request: Connection) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._fail(DisconnectedError())


def _too_late() -> ApiError:
    return too_late("the time was over, waiting included: come back when fewer requests wait")
