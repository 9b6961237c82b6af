"""A short run of benchmarks/serve.py: no answer is wrong, none belongs to somebody else."""

from __future__ import annotations

import asyncio

import pytest
import serve

from edgellm.device_runtime import LLM

FLAGS = ("--queueSize", "4", "--noContextReuse")


def test_every_answer_is_right_or_refused(roomy_engine, offline):
    pool = serve.questions(offline, serve.requests(8, 12))
    assert len({question.answer for question in pool}) > 4  # the tokenizer knows few words
    with serve.serving(roomy_engine, *FLAGS) as (port, pid):
        report = asyncio.run(serve.load(port, pid, pool, clients=12, seconds=3))
    assert report.seen["wrong"] == report.seen["broken"] == 0, report.faults
    assert report.seen["answered"] > 12
    assert report.seen["refused"] > 0
    assert report.open_after[1] == report.open_before[1]  # threads
    assert abs(report.open_after[0] - report.open_before[0]) <= 1  # files


def test_answers_that_share_passes_while_clients_leave(shared_engine):
    """With kept rows and drafts; after all of them nothing is in the works and no row in use."""
    pool = serve.questions(LLM(shared_engine), serve.requests(8, 12))
    with serve.serving(shared_engine, "--queueSize", "64", "--spec", "auto") as (port, pid):
        report = asyncio.run(serve.load(port, pid, pool, clients=24, seconds=3, leaves=0.3))
    assert report.seen["wrong"] == report.seen["broken"] == 0, report.faults
    assert report.seen["answered"] > 24
    assert report.seen["left"] > 12
    assert len(report.remaining) == 3
    assert not any(report.remaining.values()), report.remaining
    assert report.open_after[1] == report.open_before[1]  # threads


def test_a_wrong_answer_would_be_noticed(roomy_engine, offline):
    (question,) = serve.questions(offline, serve.requests(1, 4))
    false = serve.Question(question.body, question.answer + "!")
    with serve.serving(roomy_engine, *FLAGS) as (port, pid):
        report = asyncio.run(serve.load(port, pid, [false], clients=1, seconds=0.5))
    assert report.seen["wrong"] > 0
    assert report.seen["answered"] == 0


def test_an_answer_that_breaks_off_would_be_noticed():
    whole = b'HTTP/1.1 200 OK\r\na: b\r\n\r\ndata: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    assert serve.read(whole + b"data: [DONE]\n\n") == (200, {"a": "b"}, "x", 1)
    with pytest.raises(ValueError, match=r"no .DONE."):
        serve.read(whole)


def test_a_leak_would_be_noticed():
    times = [0.5 * step for step in range(240)]
    report = serve.Report(rss=[(s, 10**8 + (s < 60) * 10**7 + round(s * 5e4)) for s in times])
    assert report.slope_bytes_per_s() == pytest.approx(5e4, rel=0.01)


def test_the_cost_is_measured_on_the_same_requests(roomy_engine, offline):
    wanted = serve.requests(2, 6)
    pool = serve.questions(offline, wanted)
    with serve.serving(roomy_engine, *FLAGS) as server:
        found = serve.cost(offline, server, wanted, pool, rounds=5)
    assert len(found.rates()) == 10
    assert min(found.rates()) > 0
    assert all(seconds > 0 for seconds in found.cpu_s.values())


def test_the_cost_by_hand():
    found = serve.Cost({"server": [[2.0, 3.0], [4.0]], "loop": [[1.0, 1.5], [3.0]]})
    assert found.rates() == [0.5, 0.5, 0.75]
    assert found.best_rate() == pytest.approx(4 / 6)
