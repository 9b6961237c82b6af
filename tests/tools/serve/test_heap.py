"""Large forms of answers, each another: the memory of the process stops growing."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.sampling.guidance import Guide
from edgellm.tools.serve import heap, worker
from edgellm.tools.serve.asks import Ask
from edgellm.tools.serve.events import Failed
from edgellm.tools.serve.metrics import Metrics
from edgellm.tools.serve.worker import Job, Worker

TESTS = Path(__file__).parents[2]
LOOP = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from guided_texts import Guided

from edgellm.device_runtime.sampling.guidance import Guide
from edgellm.tools.serve import heap

heap.use_one_heap()
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
        env={"PYTHONPATH": str(TESTS), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    before, first, *later = map(float, result.stdout.split())
    assert max(later[-3:]) < first + 8, result.stdout
    assert later[-1] < before + 32, result.stdout


def test_memory_is_returned_after_large_forms_alone(roomy_engine, monkeypatch):
    """The tokenizer of this engine cannot be guided: both answers fail, after the same way."""
    returned: queue.Queue[bool] = queue.Queue()
    monkeypatch.setattr(worker, "return_memory", lambda: returned.put(True))
    found = Worker(LLM(roomy_engine), Metrics("m"), queue_size=2, request_timeout_s=60)
    found.start()
    try:
        for size in (1, heap.LARGE_FORM + 1):
            assert returned.empty()
            events: queue.Queue = queue.Queue()
            asks = (Ask("w20", SamplingParams(guide=Guide("regex", "a" * size))),)
            found.submit(Job(asks, events.put, time.monotonic() + 60))
            assert isinstance(events.get(timeout=60), Failed)
        assert returned.get(timeout=60)
    finally:
        found.end()
        found.join()
