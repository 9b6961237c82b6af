"""A short run of benchmarks/serving.py: no answer is wrong, none belongs to another client."""

from __future__ import annotations

import asyncio

import pytest
import serving

from edgellm.device_runtime import LLM

FLAGS = ("--queueSize", "4", "--noContextReuse")


def test_every_answer_is_right_or_refused(roomy_engine, offline):
    pool = serving.questions(offline, serving.requests(8, 12))
    assert len({question.answer for question in pool}) > 4  # the tokenizer knows few words
    with serving.serving(roomy_engine, *FLAGS) as (port, pid):
        report = asyncio.run(serving.load(port, pid, pool, clients=12, seconds=3))
    assert report.seen["wrong"] == report.seen["broken"] == 0, report.faults
    assert report.seen["answered"] > 12
    assert report.seen["refused"] > 0
    assert report.open_after[1] == report.open_before[1]  # threads
    assert abs(report.open_after[0] - report.open_before[0]) <= 1  # files


def test_answers_that_share_passes_while_clients_leave(shared_engine):
    """With kept rows and drafts; after all of them nothing is in the works and no row in use."""
    pool = serving.questions(LLM(shared_engine), serving.requests(8, 12))
    with serving.serving(shared_engine, "--queueSize", "64", "--spec", "auto") as (port, pid):
        report = asyncio.run(serving.load(port, pid, pool, clients=24, seconds=3, leaves=0.3))
    assert report.seen["wrong"] == report.seen["broken"] == 0, report.faults
    assert report.seen["answered"] > 24
    assert report.seen["left"] > 12
    assert len(report.remaining) == 3
    assert not any(report.remaining.values()), report.remaining
    assert report.open_after[1] == report.open_before[1]  # threads


def test_a_wrong_answer_would_be_noticed(roomy_engine, offline):
    (question,) = serving.questions(offline, serving.requests(1, 4))
    false = serving.Question(question.body, question.answer + "!")
    with serving.serving(roomy_engine, *FLAGS) as (port, pid):
        report = asyncio.run(serving.load(port, pid, [false], clients=1, seconds=0.5))
    assert report.seen["wrong"] > 0
    assert report.seen["answered"] == 0


def test_an_answer_that_breaks_off_would_be_noticed():
    whole = b'HTTP/1.1 200 OK\r\na: b\r\n\r\ndata: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    assert serving.read(whole + b"data: [DONE]\n\n") == (200, {"a": "b"}, "x", 1)
    with pytest.raises(ValueError, match=r"no .DONE."):
        serving.read(whole)


def test_a_leak_would_be_noticed():
    times = [0.5 * step for step in range(240)]
    report = serving.Report(rss=[(s, 10**8 + (s < 60) * 10**7 + round(s * 5e4)) for s in times])
    assert report.slope_bytes_per_s() == pytest.approx(5e4, rel=0.01)


def test_the_cost_is_measured_on_the_same_requests(roomy_engine, offline):
    wanted = serving.requests(2, 6)
    pool = serving.questions(offline, wanted)
    with serving.serving(roomy_engine, *FLAGS) as server:
        found = serving.cost(offline, server, wanted, pool, rounds=5)
    assert len(found.rates()) == 10
    assert min(found.rates()) > 0
    assert all(seconds > 0 for seconds in found.cpu_s.values())


def test_the_cost_by_hand():
    found = serving.Cost({"server": [[2.0, 3.0], [4.0]], "loop": [[1.0, 1.5], [3.0]]})
    assert found.rates() == [0.5, 0.5, 0.75]
    assert found.best_rate() == pytest.approx(4 / 6)
