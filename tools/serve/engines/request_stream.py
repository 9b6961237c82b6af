"""The event stream of one request, for the task that serves its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import Step
from edgellm.tools.serve.engines.ask import Ask, EngineRequest
from edgellm.tools.serve.engines.event_queue import loop_event_queue
from edgellm.tools.serve.engines.events import (
    Event,
    Failed,
    Finished,
    OutputSwitch,
    Started,
)
from edgellm.tools.serve.engines.worker import Job, Worker, too_late
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.http.request_log import REQUEST_FACTS, RequestFacts

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
        asks: Sequence[Ask],
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
        self._facts: RequestFacts = request.scope.get(REQUEST_FACTS, RequestFacts())
        self._prompts = [ask.prompt if isinstance(ask, EngineRequest) else ask for ask in asks]
        self._at, self._counted = 0, set[int]()  # sequence of the next event; counted prompts
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._expire)
        self._watch: asyncio.Task[None] | None = asyncio.create_task(
            self._wait_for_disconnect(request)
        )

    @property
    def deadline(self) -> float:
        """Deadline of the last byte, by the loop's clock."""
        return self._deadline

    @property
    def has_more(self) -> bool:
        """Whether more events follow."""
        return self._left > 0

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
                    self._facts.ending = _reason(event.error)
                    events.clear()  # the error's frames refer to them
                    raise event.error
                self._events.put_nowait(event)  # earlier events are delivered first
                events = events[:at]
                break
        for event in events:
            self._count(event)
        return events

    def _count(self, event: Event) -> None:
        """Count finished sequences, and for the log tokens; a prompt of several choices once."""
        facts = self._facts
        if isinstance(event, OutputSwitch):
            self._at = event.at
        elif isinstance(event, Started):
            prompt = id(self._prompts[self._at])
            facts.prompt_tokens += 0 if prompt in self._counted else event.prompt_tokens
            self._counted.add(prompt)
        elif isinstance(event, Step):
            facts.output_tokens += len(event.token_ids)
        elif isinstance(event, Finished):
            self._left -= 1
            facts.prompt_tokens += event.prompt_tokens if event.embedding is not None else 0

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        """Yield events until all sequences are finished; raises as `arrived`."""
        while self.has_more:
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


def _reason(error: Exception) -> str:
    """Why an output ended early, for the log."""
    if isinstance(error, DisconnectedError):
        return "the client disconnected"
    return str(error) if isinstance(error, (ApiError, EdgeLLMError)) else "an unexpected error"


def _too_late() -> ApiError:
    return too_late("the time was over, waiting included: come back when fewer requests wait")
