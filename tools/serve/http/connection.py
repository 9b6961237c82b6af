"""A connection whose client must ask for something."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # to send the head of a request; uvicorn's own limit ends with its first byte


class TimedConnection(H11Protocol):
    """Closes a connection on which nothing is asked, or which dribbles what it asks."""

    _given_up: asyncio.TimerHandle | None = None

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
        """Let the time run unless a request is being answered; what comes does not prolong it."""
        if self._is_answering():
            self._stop_watching()
        elif self._given_up is None:
            self._given_up = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_watching(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _give_up(self) -> None:
        self._given_up = None
        if not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        # uvicorn has no cycle before the first request, and declares that it always has one.
        return bool(self.cycle) and not self.cycle.response_complete
