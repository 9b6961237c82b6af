"""HTTP responses: one JSON body, or server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from edgellm.device_runtime.api.llm import Step
from edgellm.tools.serve.engines.events import Event, Finished, OutputSwitch, Started
from edgellm.tools.serve.engines.request_stream import Call, DisconnectedError
from edgellm.tools.serve.http.errors import as_api_error, streamed_body_for

FIRST_S = 0.5  # for a faulty request to become an error status before a stream begins
PING_S = 10.0  # between bytes of a stream: proxies cut idle connections
_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=dict[str, Any] | str, covariant=True)
_encode = msgspec.json.Encoder().encode
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
]


@dataclass(frozen=True, slots=True)
class Framing:
    """Encoding of one event in a stream."""

    media_type: bytes
    frame: Callable[[dict[str, Any]], bytes]
    ping: bytes = b""  # that clients skip; empty: the format has none


EVENTS = Framing(
    b"text/event-stream; charset=utf-8",
    lambda content: b"data: " + _encode(content) + b"\n\n",
    b": ping\n\n",
)
NAMED_EVENTS = Framing(  # the type is the event's name
    EVENTS.media_type,
    lambda content: b"event: " + content["type"].encode() + b"\n" + EVENTS.frame(content),
    EVENTS.ping,
)
LINES = Framing(b"application/x-ndjson", lambda content: _encode(content) + b"\n")


class Writer(Protocol[_Body]):
    """Converts the events of one request to a protocol's JSON, or to a text."""

    framing: Framing
    last: bytes  # end of a stream, after the last event

    def switch(self, at: int) -> None:
        """The next events belong to sequence `at`; without a call, to sequence 0."""
        ...

    def begin(self, started: Started) -> list[dict[str, Any]]:
        """Events before the first token of a sequence."""
        ...

    def step(self, step: Step) -> list[dict[str, Any]]:
        """Events of a step."""
        ...

    def end(self, figures: Finished) -> list[dict[str, Any]]:
        """Events after the last token of a sequence."""
        ...

    def whole(self, figures: Finished) -> _Body:
        """The whole body, after the last step of each sequence."""
        ...


class OneText:
    """Base of writers of requests with one sequence."""

    def switch(self, at: int) -> None:
        """See `Writer.switch`."""
        assert at == 0


async def answer(
    call: Call, writer: Writer[Any], request: Request, headers: dict[str, str], *, streams: bool
) -> Response:
    """The response to a request with these headers; waits for the first events.

    A stream begins without them after `FIRST_S`, such as while its request is in the queue.

    Raises:
        Exception: the request failed before its first token.
    """
    try:
        first: list[Event] = []
        with anyio.move_on_after(FIRST_S if streams else None):
            first = await call.arrived()
        if streams:
            return EventStream(
                call=call, writer=writer, first=first, path=request.url.path, headers=headers
            )
        return await _whole(call, writer, first, headers)
    except DisconnectedError:
        call.close()
        return Response(status_code=499)  # the client has disconnected
    except BaseException:
        call.close()
        raise


async def _whole(
    call: Call, writer: Writer[Any], first: list[Event], headers: dict[str, str]
) -> Response:
    content = await collect(call, writer, first)
    kind = PlainTextResponse if isinstance(content, str) else JSONResponse
    return kind(content, headers=headers)


async def collect(call: Call, writer: Writer[_Body], first: Sequence[Event] = ()) -> _Body:
    """Collect the whole body, then close the call.

    Args:
        call: the request.
        writer: converts its events.
        first: events that have already arrived.

    Raises:
        Exception: the request failed, or its client disconnected.
    """
    content: _Body | None = None
    try:
        async for events in _all(call, first):
            for event in events:
                if isinstance(event, Started):
                    writer.begin(event)
                elif isinstance(event, OutputSwitch):
                    writer.switch(event.at)
                elif isinstance(event, Step):
                    writer.step(event)
                elif isinstance(event, Finished):
                    content = writer.whole(event)
    finally:
        call.close()
    assert content is not None
    return content


async def _all(call: Call, first: Sequence[Event]) -> AsyncIterator[list[Event]]:
    yield [*first]
    async for events in call:
        yield events


class EventStream(Response):
    """A streamed output; it is aborted at the call's deadline if the client does not read it."""

    def __init__(
        self,
        *,
        call: Call,
        writer: Writer[Any],
        first: list[Event],
        path: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__()
        self._own = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._call, self._writer, self._first, self._path = call, writer, first, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; see ASGI."""
        del scope, receive
        try:
            with anyio.CancelScope(deadline=self._call.deadline + 1) as time_left:
                kind = (b"content-type", self._writer.framing.media_type)
                headers = [kind, *_HEADERS, *self._own]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for chunk in self._chunks():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": self._writer.last})
            if time_left.cancelled_caught:
                _log.warning("a client did not read its output in time")
        finally:
            self._call.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            events = self._first
            while True:
                contents = [content for event in events for content in self._form(event)]
                if contents:
                    yield self._framed(contents)
                if not self._call.has_more:
                    return
                events = []
                with anyio.move_on_after(PING_S) as waiting:
                    events = await self._call.arrived()
                if waiting.cancelled_caught and self._writer.framing.ping:
                    yield self._writer.framing.ping
        except DisconnectedError:
            return
        except Exception as error:  # noqa: BLE001 - the status was sent, the error follows
            yield self._framed([streamed_body_for(self._path, as_api_error(error))])

    def _framed(self, contents: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(map(self._writer.framing.frame, contents))

    def _form(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Step):
            return self._writer.step(event)
        if isinstance(event, Started):
            return self._writer.begin(event)
        if isinstance(event, OutputSwitch):
            self._writer.switch(event.at)
        return self._writer.end(event) if isinstance(event, Finished) else []
