"""HTTP connections with a time limit for the head of a request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # to send the head of a request; uvicorn's own limit ends with its first byte


class TimedConnection(H11Protocol):
    """Closes connections that are idle or send their head too slowly."""

    _timer: asyncio.TimerHandle | None = None

    # As uvicorn narrows it, too.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        """Start the timer unless a request is served; received data does not extend it."""
        if self._is_answering():
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        # uvicorn has no cycle before the first request, and declares that it always has one.
        return bool(self.cycle) and not self.cycle.response_complete
