"""A short run of benchmarks/serve.py: no answer is wrong, none belongs to somebody else."""

from __future__ import annotations

import asyncio

import serve

FLAGS = ("--queueSize", "4", "--noContextReuse")


def test_every_answer_is_right_or_refused(roomy_engine, offline):
    pool = serve.questions(offline, serve.requests(8, 12))
    assert len({question.answer for question in pool}) > 4  # the tokenizer knows few words
    with serve.serving(roomy_engine, *FLAGS) as (port, pid):
        report = asyncio.run(serve.load(port, pid, pool, clients=12, seconds=3))
    assert report.seen["wrong"] == report.seen["broken"] == 0, report.faults
    assert report.seen["answered"] > 12
    assert report.seen["refused"] > 0


def test_a_wrong_answer_would_be_noticed(roomy_engine, offline):
    (question,) = serve.questions(offline, serve.requests(1, 4))
    false = serve.Question(question.body, question.answer + "!")
    with serve.serving(roomy_engine, *FLAGS) as (port, pid):
        report = asyncio.run(serve.load(port, pid, [false], clients=1, seconds=0.5))
    assert report.seen["wrong"] > 0
    assert report.seen["answered"] == 0


def test_the_cost_is_measured_on_the_same_requests(roomy_engine, offline):
    wanted = serve.requests(2, 6)
    pool = serve.questions(offline, wanted)
    with serve.serving(roomy_engine, *FLAGS) as server:
        found = serve.cost(offline, server, wanted, pool, rounds=5)
    assert len(found.rates) == 10
    assert all(rate > 0 for rate in found.rates)
    assert all(seconds > 0 for seconds in found.cpu_s.values())
