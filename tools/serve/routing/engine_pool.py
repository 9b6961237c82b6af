"""The engines of a server by name: loading on demand, leases, LRU eviction.

An engine is loaded in a thread at its first request, while other engines generate. If the budget
is exhausted, the least recently used engine is unloaded once it has no requests. Requests for an
engine that is about to be unloaded join the same queue, so that no request starves. A request may
limit how long its engine stays loaded after it (Ollama's `keep_alive`); the last request decides.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.tools.serve import heap
from edgellm.tools.serve.engines.llm_worker import LLMWorker
from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.metrics import Metrics, Registry
from edgellm.tools.serve.engines.models import Model
from edgellm.tools.serve.engines.request_stream import Connection
from edgellm.tools.serve.engines.speech_worker import SpeechWorker
from edgellm.tools.serve.engines.worker import Worker, full, stopping
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.routing.handler import EngineHandler
from edgellm.tools.serve.settings import Settings

LEASES = "edgellm.leases"  # in a connection's scope: an ExitStack that ends with its request
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """One engine of the pool, loaded or not."""

    model: Model
    metrics: Metrics
    worker: Worker | None = None  # while it is loaded
    adapters: dict[str, Path] = field(default_factory=dict)  # while it is not loaded
    num_users: int = 0  # requests
    used: int = 0  # logical time of the last use
    is_leaving: bool = False  # another engine waits for its memory
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    # How long it stays loaded without requests, in seconds; None: until its memory is needed.
    keep_s: float | None = None
    expiry: asyncio.TimerHandle | None = None  # while it has no requests and `keep_s`

    @property
    def adapter_names(self) -> list[str]:
        """Names of LoRA adapters, which also name the engine."""
        return sorted(self.adapters if self.worker is None else self.worker.adapters)

    def keep(self, seconds: float | None) -> None:
        """Set `keep_s`; a running timer ends."""
        self.keep_s = seconds
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class EnginePool:
    """See the module. Only the event loop changes its state, except at start and end."""

    def __init__(
        self,
        models: Sequence[Model],
        loading: Loading,
        settings: Settings,
    ) -> None:
        """Create the pool; load no engine.

        Args:
            models: the first serves requests without a model name.
            loading: load options.
            settings: of the server; each engine alone fits in its memory budget.
        """
        self.settings, self.created = settings, int(time.time())
        self.registry = Registry()
        self._loading = loading
        self._places = {
            one.name: Place(model=one, metrics=Metrics(one.name, self.registry)) for one in models
        }
        self._load_lock, self._num_waiting = asyncio.Lock(), 0
        self._clock = itertools.count(1)
        self._is_draining = False
        self._warned: set[str] = set()
        self._expiring: set[asyncio.Task[None]] = set()

    @property
    def places(self) -> list[Place]:
        """The places of all engines in their order."""
        return [*self._places.values()]

    @property
    def _workers(self) -> list[Worker]:
        return [place.worker for place in self.places if place.worker is not None]

    # ------------------------------------------------------------------ beginning and end
    def begin(self) -> LLM | Transcriber:
        """Load the first engine; raises as `Loading.load`."""
        place = self.places[0]
        self._start_worker(place, self._loading.load(place.model))
        assert place.worker is not None
        return place.worker.engine

    def drain(self) -> None:
        """Accept no more requests; accepted ones finish."""
        self._is_draining = True
        for worker in self._workers:
            worker.drain()

    def end(self) -> None:
        """End all requests before their next forward pass."""
        self._is_draining = True
        for worker in self._workers:
            worker.end()

    def close(self) -> None:
        """Wait for all workers and unload all engines, after the loop has ended.

        Raises as `Loading.unload`.
        """
        self.end()
        for place in self.places:
            if place.worker is not None:
                worker, place.worker = place.worker, None
                worker.join()
                self._loading.unload(place.model, worker.engine)

    @property
    def is_alive(self) -> bool:
        """Whether the threads of all loaded engines run."""
        return all(worker.is_alive for worker in self._workers)

    @property
    def is_ready(self) -> bool:
        """Whether the pool accepts requests while there is room."""
        return self.is_alive and not self._is_draining

    def require_room(self) -> None:
        """Reject a request before its body is read; raises as `Worker.submit`."""
        if self._is_draining:
            raise stopping()
        if len(self._places) == 1:
            for worker in self._workers:
                worker.require_room()

    # -------------------------------------------------------------------------- by name
    def find(self, name: str | None) -> tuple[Place, str | None]:
        """The engine of a model name, and the adapter if the name is an adapter's.

        Raises:
            ApiError: 404 if the name is unknown.
        """
        if name is None:
            return self.places[0], None
        if name in self._places:
            return self._places[name], None
        known = [*self._places]
        for place in self.places:
            if name in place.adapter_names:
                return place, name
            known += place.adapter_names
        raise ApiError(
            404,
            f"there is no model {name!r} here, only {', '.join(map(repr, known))}",
            code="model_not_found",
            param="model",
        )

    async def of(
        self, name: str | None, connection: Connection, keep_s: float | None = None
    ) -> EngineHandler:
        """The engine of a model name, loaded and leased until the request ends.

        Args:
            name: of an engine or an adapter; None: the first engine.
            connection: of the request.
            keep_s: see `Place.keep_s`.

        Raises:
            ApiError: 404 for an unknown name, 429 or 503 if there is no room.
            EdgeLLMError: the engine cannot be loaded.
        """
        place, lora = self.find(name)
        if place.worker is None or place.is_leaving:
            await self._lease_when_loaded(place, connection)
        else:
            self._lease(place, connection)
        place.keep(keep_s)
        assert place.worker is not None
        return EngineHandler(
            worker=place.worker,
            model=place.model,
            lora=lora,
            settings=self.settings,
            warned=self._warned,
        )

    def _lease(self, place: Place, connection: Connection) -> None:
        place.num_users += 1
        place.used = next(self._clock)
        connection.scope[LEASES].callback(self._release, place)

    def _release(self, place: Place) -> None:
        place.num_users -= 1
        place.used = next(self._clock)
        if not place.num_users:
            place.unused.set()
            if place.keep_s is not None:
                loop = asyncio.get_running_loop()
                place.expiry = loop.call_later(place.keep_s, self._expire, place)

    # ------------------------------------------------------------------ unloading on demand
    async def unload(self, name: str) -> None:
        """Unload the engine of a model name at once, or when its requests end; raises as `find`."""
        place, _ = self.find(name)
        place.keep(0.0)
        await self._unload_unused(place)

    def _expire(self, place: Place) -> None:
        task = asyncio.get_running_loop().create_task(self._unload_unused(place))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    async def _unload_unused(self, place: Place) -> None:
        """Unload an engine, unless a request came that keeps it."""
        async with self._load_lock:
            is_unused = place.worker is not None and not place.num_users
            if is_unused and place.keep_s is not None and not self._is_draining:
                await self._unload(place)

    # ------------------------------------------------------------------ loading on demand
    async def _lease_when_loaded(self, place: Place, connection: Connection) -> None:
        """Load and lease an engine; engines are loaded one at a time."""
        if self._num_waiting >= self.settings.queue_size:
            place.metrics.rejected.inc()
            raise full(self._num_waiting, 10)
        now = asyncio.get_running_loop().time()
        left_s = connection.scope.get("arrived", now) + self.settings.total_timeout_s - now
        self._num_waiting += 1
        try:
            with anyio.move_on_after(left_s):
                async with self._load_lock:
                    await self._require_loaded(place)
                    self._lease(place, connection)
                    return
        finally:
            self._num_waiting -= 1
        raise ApiError(504, f"{place.model.name} was not loaded in time", code="timeout")

    async def _require_loaded(self, place: Place) -> None:
        if place.worker is not None:
            return
        await self._make_room(place.model)
        if self._is_draining:
            raise stopping()
        with anyio.CancelScope(shield=True):  # a cancelled load would leak its engine
            engine = await anyio.to_thread.run_sync(self._load, place)
            self._start_worker(place, engine)

    def _load(self, place: Place) -> LLM | Transcriber:
        """Load an engine and its former adapters; log adapters that fail."""
        engine = self._loading.load(place.model)
        if not isinstance(engine, Transcriber):
            for name, folder in place.adapters.items():
                _load_again(engine, name, folder)
        return engine

    def _start_worker(self, place: Place, engine: LLM | Transcriber) -> None:
        worker = self._worker(place.metrics, engine)
        worker.start()
        place.worker, place.adapters = worker, {}
        if self._is_draining:  # it came too late for `drain`
            worker.drain()

    def _worker(self, metrics: Metrics, engine: LLM | Transcriber) -> Worker:
        size, timeout_s = self.settings.queue_size, self.settings.request_timeout_s
        if isinstance(engine, Transcriber):
            return SpeechWorker(
                transcriber=engine, metrics=metrics, queue_size=size, request_timeout_s=timeout_s
            )
        return LLMWorker(llm=engine, metrics=metrics, queue_size=size, request_timeout_s=timeout_s)

    async def _make_room(self, model: Model) -> None:
        while self._held_bytes() + model.num_bytes > self.settings.memory_bytes:
            loaded = [place for place in self.places if place.worker is not None]
            leaving = min(loaded, key=lambda place: (place.num_users > 0, place.used))
            await self._unload(leaving)

    def _held_bytes(self) -> int:
        return sum(place.model.num_bytes for place in self.places if place.worker is not None)

    async def _unload(self, place: Place) -> None:
        """Unload an engine once it has no requests."""
        place.is_leaving = True
        try:
            while place.num_users:
                place.unused.clear()
                await place.unused.wait()
            worker, place.worker = place.worker, None
            assert worker is not None
            place.adapters = worker.adapters
            place.metrics.unwatch()
            place.keep(None)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(functools.partial(self._close, place.model, worker))
        finally:
            place.is_leaving = False

    def _close(self, model: Model, worker: Worker) -> None:
        worker.end()
        worker.join()
        try:
            self._loading.unload(model, worker.engine)
        except EdgeLLMError as error:  # the request that needs the memory continues
            _log.warning("%s: %s", model.name, error)
        heap.return_memory()


def _load_again(llm: LLM, name: str, folder: Path) -> None:
    try:
        llm.load_adapter(name, folder)
    except EdgeLLMError as error:
        _log.warning("the adapter %s is gone: %s", name, error)
