"""Events of a request and their order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from edgellm.device_runtime.engine.sequence import Step
from edgellm.tools.serve.engines.event_queue import EventQueue
from edgellm.tools.serve.engines.events import Started
from edgellm.tools.serve.engines.request_stream import Call, DisconnectedError
from edgellm.tools.serve.http.errors import ApiError


class Gone:
    """A connection whose client disconnected at once."""

    def __init__(self) -> None:
        self.scope: dict[str, float] = {}

    async def receive(self) -> dict[str, str]:
        return {"type": "http.disconnect"}


class LateWorker:
    """Posts a step after its job was abandoned, and nothing more."""

    def submit(self, job) -> None:
        self.job = job
        job.post(Started(1))


def test_a_step_after_a_disconnect_does_not_hide_it():
    async def serve() -> None:
        worker = LateWorker()
        call = Call(
            worker=worker, asks=[SimpleNamespace(priority=0)], request=Gone(), total_timeout_s=60
        )
        await asyncio.sleep(0)  # the client's leaving is seen
        assert worker.job.abandoned
        worker.job.post(Step((1,), "late"))
        await asyncio.sleep(0)
        assert await call.arrived() == [Started(1)]
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(call.arrived(), 5)

    asyncio.run(serve())


class TimedWorker(LateWorker):
    """A worker whose job waits, or has started."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits

    def submit(self, job) -> None:
        self.job = job

    def is_waiting(self, job) -> bool:
        return self.waits and job is self.job

    def abandon(self, job) -> None:
        job.abandoned = True


class Staying(Gone):
    """A connection whose client waits."""

    async def receive(self) -> dict[str, str]:
        return await asyncio.Event().wait()


def test_a_request_that_times_out_in_the_queue_is_not_retried():
    async def serve() -> None:
        call = Call(
            worker=TimedWorker(waits=True),
            asks=[SimpleNamespace(priority=0)],
            request=Staying(),
            total_timeout_s=0.01,
        )
        with pytest.raises(ApiError, match="come back when") as caught:
            await asyncio.wait_for(call.arrived(), 5)
        assert (caught.value.status, caught.value.code) == (422, "timeout")
        assert caught.value.kind == "timeout_error"
        call.close()

    asyncio.run(serve())


def test_a_request_that_times_out_in_the_engine_gets_the_workers_events():
    async def serve() -> None:
        worker = TimedWorker(waits=False)
        call = Call(
            worker=worker,
            asks=[SimpleNamespace(priority=0)],
            request=Staying(),
            total_timeout_s=0.01,
        )
        told = asyncio.create_task(call.arrived())
        while asyncio.get_running_loop().time() < call.deadline + 0.02:
            await asyncio.sleep(0.005)
        assert not worker.job.abandoned
        worker.job.post(Step((1,), "cut"))
        assert await told == [Step((1,), "cut")]
        call.close()

    asyncio.run(serve())


def test_many_events_wake_the_loop_once():
    async def post() -> None:
        loop, queues = asyncio.get_running_loop(), [asyncio.Queue() for _ in range(3)]
        woken: list[object] = []
        box = EventQueue(SimpleNamespace(call_soon_threadsafe=woken.append))
        for number in range(4):
            for queue in queues:
                box.post(queue, number)
        assert len(woken) == 1
        loop.call_soon(woken[0])
        for queue in queues:
            assert [await queue.get() for _ in range(4)] == [0, 1, 2, 3]
        box.post(queues[0], 4)
        assert len(woken) == 2

    asyncio.run(post())
