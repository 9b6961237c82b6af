"""Large requests, each another: the memory of the process stops growing."""

from __future__ import annotations

import gc
import json
import queue
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType

import pytest
from inside_server import Inside, serving_inside

from edgellm.device_runtime import LLM, SamplingParams
from edgellm.tools.serve import heap
from edgellm.tools.serve.engines.ask import EngineRequest
from edgellm.tools.serve.engines.events import Failed
from edgellm.tools.serve.engines.llm_worker import LLMWorker
from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.metrics import Metrics
from edgellm.tools.serve.engines.models import read_models
from edgellm.tools.serve.engines.worker import Job
from edgellm.tools.serve.settings import Settings

TESTS = Path(__file__).parents[2]
LOOP = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from guided_texts import Guided

from edgellm.device_runtime.sampling.guidance import Guide
from edgellm.tools.serve import heap

heap.manage()
guided = Guided(Path(sys.argv[1]))

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

def answer(at):
    names = [f"n{at}_{place}" for place in range(20_000)]
    few = names[:150]
    schema = (
        {"enum": names},
        {"properties": {name: {"enum": names[:100]} for name in few}, "required": few},
        {"anyOf": [{"properties": {name: {"const": at}}} for name in few]},
    )[at % 3]
    constraint = guided.guidance.start(Guide.of_schema(schema))
    for _ in range(4):
        constraint.take([int(constraint._allowed(()).nonzero()[0][0])])

guided.guidance.start(Guide("regex", "a"))
print(resident_mb())
with ThreadPoolExecutor(3) as threads:
    for turn in range(8):
        list(threads.map(answer, range(6 * turn, 6 * turn + 6)))
        heap.return_memory()
        print(resident_mb())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stops_growing(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LOOP, tmp_path],
        env={"PYTHONPATH": str(TESTS / "support"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    before, first, *later = map(float, result.stdout.split())
    assert max(later[-3:]) < first + 8, result.stdout
    assert later[-1] < before + 32, result.stdout


@pytest.fixture(scope="module")
def inside(roomy_engine):
    models = read_models([f"tiny={roomy_engine}"])
    with serving_inside(models, Loading(), Settings(max_body_bytes=1 << 20)) as server:
        yield server


def _post(server: Inside, path: str, body: object) -> int:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


LONG = "w20 " * (heap.LARGE_BYTES // 4)
CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}
SHORT = {"prompt": "w20", "max_tokens": 2}
REQUESTS = {
    "answered": (200, "/v1/completions", {**SHORT, "user": LONG}),
    "too long": (400, "/v1/completions", {**SHORT, "prompt": LONG}),
    "streamed": (400, "/v1/chat/completions", {**CHAT, "stream": True}),
    "messages": (400, "/v1/messages", {**CHAT, "model": "tiny"}),
    "ollama": (400, "/api/chat", {**CHAT, "model": "tiny"} | {"max_tokens": None}),
    "responses": (400, "/v1/responses", {"input": LONG}),
    "triton": (400, "/v2/models/tiny/generate", {"text_input": LONG}),
    "a form": (500, "/v1/completions", {**SHORT, "guided_regex": LONG}),  # cannot be guided
    "invalid": (400, "/v1/chat/completions", {**CHAT, "max_tokens": "x"}),
    "no model": (404, "/v1/chat/completions", {**CHAT, "model": "x"}),
    "too large": (413, "/v1/chat/completions", {**CHAT, "user": LONG * 20}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_refers_to_a_request_that_is_over(inside, monkeypatch, name):
    """Without a search for cycles: its frames, which hold texts and tokens, end with it."""
    returned: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(heap, "after_request", returned.put)
    status, path, body = REQUESTS[name]
    for _ in range(2):  # what is made once is no garbage
        assert _post(inside, path, body) == status
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert _post(inside, path, body) == status
        _wait_until(lambda: inside.tasks() == 1 and not inside.server_state.connections)
        gc.collect()
        own = str(Path(heap.__file__).parent)
        frames = [one for one in gc.garbage if isinstance(one, FrameType)]
        assert [one for one in frames if one.f_code.co_filename.startswith(own)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    # What its head says to be too large is not read.
    assert (max(returned.queue) > heap.LARGE_BYTES) == (status != 413)


def _all() -> list[object]:
    gc.collect()
    return gc.get_objects()


def _wait_until(holds) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_job_that_is_over_is_forgotten(roomy_engine):
    """The thread that ran it waits for the next one, and refers to none."""
    found = LLMWorker(
        llm=LLM(roomy_engine), metrics=Metrics("m"), queue_size=2, request_timeout_s=60
    )
    found.start()
    try:
        events: queue.Queue = queue.Queue()
        text = "w21 " * 9000
        found.submit(
            Job(
                asks=(EngineRequest(prompt=text, sampling=SamplingParams()),),
                post=events.put,
                deadline=time.monotonic() + 60,
            )
        )
        assert isinstance(events.get(timeout=60), Failed)
        _wait_until(
            lambda: not any(type(one) is EngineRequest and one.prompt == text for one in _all())
        )
    finally:
        found.end()
        found.join()


def _returner(monkeypatch) -> tuple[heap.Returner, threading.Event]:
    """A thread that returns memory, and the event that it did; servers of this process have own."""
    returner, returned = heap.Returner(), threading.Event()

    def return_memory() -> None:
        if threading.current_thread() is returner:
            returned.set()

    monkeypatch.setattr(heap, "return_memory", return_memory)
    returner.start()
    return returner, returned


@pytest.mark.parametrize(("num_bytes", "is_large"), [(1, False), (heap.LARGE_BYTES + 1, True)])
def test_memory_is_returned_after_large_requests_alone(monkeypatch, num_bytes, is_large):
    monkeypatch.setattr(heap, "private_bytes", lambda: 0)
    returner, returned = _returner(monkeypatch)
    returner.after(num_bytes)
    assert returned.wait(60 if is_large else 0.2) == is_large


def test_memory_is_returned_when_small_requests_took_much(monkeypatch):
    returner, returned = _returner(monkeypatch)
    much = b"x" * (64 << 20)
    returner.after(1)
    assert returned.wait(60)
    del much
