"""Runs the application: sockets, signals, draining, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.serve.http.connection import TimedConnection
from edgellm.tools.serve.routing.engine_pool import EnginePool

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_EVENTS_S = 3  # for clients to read what was sent before the end
_UNREAD_S = 60  # a peer that acknowledges nothing for this time is gone


def listen(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """A listening socket; port 0 takes a free one, `flag` names the option in errors.

    Raises:
        EdgeLLMError: the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise EdgeLLMError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            hint=f"give another {flag} or --host",
        ) from None
    if sys.platform == "linux":
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
    return found


class CompanionServer(Protocol):
    """Another server in the same loop, with the same engines."""

    async def start(self) -> str:
        """Start to listen; return a line for the log."""
        ...

    async def stop(self, max_seconds: float) -> None:
        """End when running requests have finished, or after `max_seconds`."""
        ...


class DrainingServer(uvicorn.Server):
    """Drains on a signal: accepted requests finish. Stops at once on a second one."""

    def __init__(
        self,
        *,
        config: uvicorn.Config,
        engines: EnginePool,
        on_ready: Callable[[Sequence[str]], None],
        drain_timeout_s: int,
        companions: Sequence[CompanionServer] = (),
    ) -> None:
        super().__init__(config)
        self._engines, self._on_ready, self._drain_timeout_s = engines, on_ready, drain_timeout_s
        self._companions = companions

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; calls `on_ready` when connections are accepted."""
        await super().startup(sockets)
        self._on_ready([await one.start() for one in self._companions])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        others = [one.stop(self._drain_timeout_s + _LAST_EVENTS_S) for one in self._companions]
        await asyncio.gather(super().shutdown(sockets), *others)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """See uvicorn, which would raise the signal again."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _end(self) -> None:
        if self.should_exit:
            self._engines.end()
            return
        _log.info("stopping: running requests have %d s to finish", self._drain_timeout_s)
        self._engines.drain()
        asyncio.get_running_loop().call_later(self._drain_timeout_s, self._engines.end)
        self.should_exit = True


def configured(app: ASGIApp, drain_timeout_s: int) -> uvicorn.Config:
    """Options of uvicorn for an application."""
    return uvicorn.Config(
        app, http=TimedConnection, ws="none", lifespan="off", loop="asyncio", log_config=None,
        access_log=False, server_header=False, timeout_keep_alive=20,
        timeout_graceful_shutdown=drain_timeout_s + _LAST_EVENTS_S,
    )  # fmt: skip


class _QuietServer(uvicorn.Server):
    """Leaves signals to the main server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """See uvicorn."""
        yield


class MetricsServer:
    """Server of the metrics at a separate port, like Triton's."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _QuietServer(configured(app, 0))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start to serve; return a line for the log."""
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        return f"metrics at port {self._listener.getsockname()[1]}"

    async def stop(self, max_seconds: float) -> None:
        """Ends at once: clients of metrics retry."""
        del max_seconds
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def serve(
    app: ASGIApp,
    engines: EnginePool,
    listener: socket.socket,
    on_ready: Callable[[Sequence[str]], None],
    *,
    drain_timeout_s: int,
    companions: Sequence[CompanionServer] = (),
) -> None:
    """Serve requests until a signal.

    Args:
        app: the application.
        engines: of the application; closed at the end.
        listener: where it listens.
        on_ready: called with the companions' log lines when connections are accepted.
        drain_timeout_s: time for accepted requests after the signal.
        companions: servers that start and stop with it.
    """
    config = configured(app, drain_timeout_s)
    try:
        server = DrainingServer(
            config=config,
            engines=engines,
            on_ready=on_ready,
            drain_timeout_s=drain_timeout_s,
            companions=companions,
        )
        server.run(sockets=[listener])
    finally:
        engines.close()
