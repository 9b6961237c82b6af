"""A server in the test's own process, with access to its event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from edgellm.tools.serve.app import create_app
from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.models import Model
from edgellm.tools.serve.routing.engine_pool import EnginePool
from edgellm.tools.serve.server import configured, listen
from edgellm.tools.serve.settings import Settings


class Inside(uvicorn.Server):
    """A server on `port` of this machine."""

    port: int
    loop: asyncio.AbstractEventLoop

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()

    def tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))


@contextmanager
def serving_inside(
    models: Sequence[Model], loading: Loading, settings: Settings
) -> Iterator[Inside]:
    """Run a server until all of its engines are unloaded."""
    loading.prepare(models)
    engines = EnginePool(models, loading, settings)
    server = Inside(configured(create_app(engines), 5))
    listener = listen("127.0.0.1", 0)
    server.port = listener.getsockname()[1]
    engines.begin()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    engines.end()
    thread.join()
    engines.close()
