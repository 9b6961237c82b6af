"""What a client's task is told of its job, in which order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from edgellm.device_runtime.engine.sequence import Step
from edgellm.tools.serve.client_request import Call, DisconnectedError
from edgellm.tools.serve.events import Started


class Gone:
    """A request whose client left at once."""

    def __init__(self) -> None:
        self.scope: dict[str, float] = {}

    async def receive(self) -> dict[str, str]:
        return {"type": "http.disconnect"}


class LateWorker:
    """Posts a step after its job was abandoned, and nothing more."""

    def submit(self, job) -> None:
        self.job = job
        job.post(Started(1))


def test_a_step_behind_the_clients_leaving_does_not_hide_it():
    async def serve() -> None:
        worker = LateWorker()
        call = Call(worker, [SimpleNamespace(priority=0)], Gone(), 60)
        await asyncio.sleep(0)  # the client's leaving is seen
        assert worker.job.abandoned
        worker.job.post(Step((1,), "late"))
        await asyncio.sleep(0)
        assert await call.arrived() == [Started(1)]
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(call.arrived(), 5)

    asyncio.run(serve())
