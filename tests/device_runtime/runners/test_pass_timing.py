"""Timing in a build: what is measured, its time budget, and passes of drafts."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm.build.pass_timing import measure
from edgellm.build.plan import Plan
from edgellm.core.graph_roles import DECODER, EXTEND, HOST, PASS, STEP
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.engine import spec_overhead
from edgellm.device_runtime.networks import decoder, draft
from edgellm.device_runtime.runners import pass_timing
from edgellm.device_runtime.runners.pass_timing import (
    BUDGET_S,
    MEASURED_ROWS,
    Budget,
    EstimatedMs,
    estimated_sizes,
    fastest_each_ms,
    timed_by_rows,
    with_estimates,
)
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.tree_policy import CostAwareTree, TreeLimits
from edgellm.device_runtime.speculate.tree import CandidatePool


class Clock:
    """A clock that only advances by `took`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    for module in (pass_timing, spec_overhead):
        monkeypatch.setattr(module, "time", found)
    return found


def test_measurements_are_interleaved(clock):
    """The smallest pass first; the fastest call of each counts, earlier ones do not."""
    calls = []

    def take(name: str, *seconds: float) -> None:
        calls.append(name)
        clock.now_s += seconds[calls.count(name) - 1]

    def wait() -> None:
        clock.now_s += 5

    runs = {
        "4": lambda: take("4", 9, 0.5, 3, 0.7, 2, 2, 2, 2),
        "1": lambda: take("1", 9, 2, 1, 4, 3, 3, 3, 3),
    }
    assert fastest_each_ms(runs, Budget(1e3), wait) == {"1": 1000.0, "4": 500.0}
    assert calls == ["1", "4"] * 8


def test_stable_times_are_not_repeated(clock):
    calls = []

    def take() -> None:
        calls.append(0)
        clock.now_s += 0.01 if len(calls) > 1 else 0.3

    assert fastest_each_ms({"1": take}, Budget(1e3)) == {"1": 10.0}
    assert len(calls) == 3


def linear(fixed: float, token: float):
    return lambda rows: fixed + token * rows


def reading_bound(fixed: float, token: float):
    """Time of a pass that is bound by reading weights."""
    return lambda rows: max(fixed, token * rows)


SHAPES = {"linear": linear, "reading": reading_bound}
SECONDS = [1e-5, 1e-3, 0.02, 0.1, 0.3, 0.8, 2, 4.9, 5.1, 60, 3600]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per_token", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("seconds", SECONDS)
def test_timing_keeps_its_budget_on_any_machine(clock, shape, per_token, seconds):
    """A single pass may exceed the budget: then it is the only one."""
    takes, rows_seen = SHAPES[shape](seconds, seconds * per_token), []

    def run(rows: int) -> None:
        rows_seen.append(rows)
        clock.now_s += takes(rows)

    found = timed_by_rows(run, MEASURED_ROWS, Budget(BUDGET_S))
    assert clock.now_s <= max(BUDGET_S, takes(1))
    assert list(found) == [str(rows) for rows in MEASURED_ROWS]
    assert list(found.values()) == sorted(found.values())
    for rows in MEASURED_ROWS:
        ms, truth = found[str(rows)], 1e3 * takes(rows)
        assert isinstance(ms, EstimatedMs) == (rows not in rows_seen)
        assert ms >= truth * 0.999  # an estimate never makes a tree seem cheaper
        if rows in rows_seen:
            assert ms == pytest.approx(truth, abs=1e-3)


@pytest.mark.parametrize("takes", [linear(10, 1), reading_bound(10, 1), linear(0, 1)])
def test_estimates_extrapolate_measured_times(takes):
    """By three sizes if they suffice, else by the upper bound."""
    measured = {str(rows): takes(rows) for rows in (1, 2, 4, 8, 16)}
    found = with_estimates(measured, MEASURED_ROWS)
    assert [found[str(rows)] for rows in (32, 64)] == [takes(32), takes(64)]
    hidden = with_estimates({"1": 10.0, "2": 10.0, "4": 10.0}, [8])
    assert hidden["8"] == 20.0


def test_disturbed_times_are_monotone():
    found = with_estimates({"1": 10.0, "2": 9.0, "4": 20.0}, [1, 2, 4, 8])
    assert list(found.values()) == [9.0, 9.0, 20.0, 40.0]
    assert estimated_sizes({PASS: found, STEP: {"1": 2.0}}) == {PASS: [8]}


class SlowDecoder:
    """A `DecoderNetwork` whose passes take scripted seconds."""

    capacity, max_batch_size, batch_limits, max_pass_tokens = 4096, 1, (0, 0), 0

    def __init__(self, clock: Clock, takes) -> None:
        self._clock, self._takes = clock, takes
        self.rows: list[int] = []
        self.kv = SimpleNamespace(free=lambda: None)

    def run(self, token_ids, write_index, logits_index) -> None:
        assert 0 <= write_index <= self.capacity - len(token_ids)
        assert logits_index.max() < len(token_ids)
        self.rows.append(len(token_ids))
        self._clock.now_s += self._takes(len(token_ids))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seconds", SECONDS)
def test_all_measurements_of_a_build_share_one_budget(clock, monkeypatch, shape, seconds):
    """Passes, the host's part of a round (real steps, which take no time here), prompts."""
    takes, spec = SHAPES[shape](seconds, seconds * 0.1), object.__new__(DecoderSpec)
    for name, value in {"vocab_size": 50, "num_parameters": 1000, "recurrent": None}.items():
        object.__setattr__(spec, name, value)
    session = SlowDecoder(clock, takes)
    monkeypatch.setattr(decoder, "network", lambda *_: session)
    plan = Plan(max_input_len=1024, kv_capacity=4096, max_verify_tree_size=16)
    costs, prefill_rows = measure({DECODER: None}, spec, plan)
    assert clock.now_s <= max(BUDGET_S, takes(1))
    assert list(costs[PASS]) == [str(rows) for rows in MEASURED_ROWS]
    assert prefill_rows in (64, 128, 256, 1024)
    if seconds <= 1e-3:
        assert not estimated_sizes(costs)
        assert {1, 64, 128, 256, 512} <= {*session.rows}
    if clock.now_s < BUDGET_S:
        assert costs[HOST]["2"] >= costs[HOST]["1"] >= 0


@pytest.mark.parametrize("seconds", SECONDS)
def test_rounds_of_a_slow_host_keep_their_budget(clock, monkeypatch, seconds):
    """A round is three steps; the first one alone may exceed the budget."""

    def step(*_: object) -> None:
        clock.now_s += seconds

    monkeypatch.setattr(spec_overhead, "step", step)
    found = spec_overhead.round_host_ms(1000, Budget(1.0))
    assert clock.now_s <= max(1.0, 3 * seconds)
    assert bool(found) == (9 * seconds <= 1.0)  # after two untimed rounds
    assert set(found.values()) <= {0.0}


def test_the_host_time_takes_the_memory_that_builds_expect():
    tracemalloc.start()
    try:
        spec_overhead.round_host_ms(10**9, Budget(0.1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = spec_overhead.memory_bytes(10**9)
    assert expected <= peak < 1.1 * expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_size_may_be_slower_than_the_smaller_ones_say(clock, shape, seconds):
    """One that runs another graph, for example: it is the last one."""
    takes, rows_seen = SHAPES[shape](seconds, seconds * 0.1), []

    def run(rows: int) -> None:
        rows_seen.append(rows)
        clock.now_s += takes(rows) * (100 if rows > 1 else 1)

    found = timed_by_rows(run, MEASURED_ROWS, Budget(BUDGET_S))
    assert list(found) == [str(rows) for rows in MEASURED_ROWS]
    if clock.now_s > max(BUDGET_S, takes(1)):
        assert rows_seen == [1, 2]
    for rows in MEASURED_ROWS:
        assert isinstance(found[str(rows)], EstimatedMs) == (rows not in rows_seen)


@pytest.mark.parametrize("seconds", SECONDS)
def test_draft_timing_stays_within_the_shared_budget(clock, seconds):
    session = WatchedDraft(clock, seconds)
    costs = draft.costs(session, DRAFT_SPEC, max_rows=4)
    assert list(costs) == [STEP, EXTEND]
    assert all(list(each) == ["1", "2", "4"] for each in costs.values())
    assert clock.now_s <= max(BUDGET_S, seconds)
    assert bool(estimated_sizes(costs)) == (seconds > 0.1)


def _tree_size(verify: dict[str, float]) -> int:
    """Number of paying nodes after the root, of a chain with acceptance rate 0.9."""
    limits, costs = TreeLimits(top_k=4, steps=5, verify_size=32), Costs.of(verify)
    policy = CostAwareTree(
        limits=limits, costs=costs, calibration=Calibration(), controller=SpecGate(costs=costs)
    )
    pool, rates = CandidatePool(0, 33), np.full(32, np.log(0.9))
    pool.add_chain(0, range(32), rates, np.full(32, 0.9))
    return len(policy.select(pool, 32))


@pytest.mark.parametrize("known", [1, 2, 3, 4, 5, 6])
def test_trees_by_estimates_are_no_larger_than_those_by_measurements(known):
    """And not much smaller, if the measured sizes show the cost of a token."""
    for takes in (linear(100, 0.1), linear(100, 1), linear(100, 10), reading_bound(100, 20)):
        truth = {str(rows): float(takes(rows)) for rows in MEASURED_ROWS}
        measured = dict(list(truth.items())[:known])
        size, best = _tree_size(with_estimates(measured, MEASURED_ROWS)), _tree_size(truth)
        assert size <= best
        assert size >= min(best, MEASURED_ROWS[known - 1] - 1)


class WatchedDraft:
    """A draft that records its passes."""

    capacity, batch_limits = 32, (0, 0)

    def __init__(self, clock: Clock | None = None, seconds: float = 0.0) -> None:
        self.passes: list[tuple[str, int]] = []
        self._clock, self._seconds = clock or Clock(), seconds
        self.kv = SimpleNamespace(free=lambda: None)

    def fuse(self, taps):
        self.passes.append(("fuse", len(taps)))
        return taps[:, :8]

    def run(self, token_ids, hidden, write_index, output_rows, *, top_k):
        assert (write_index, top_k) == (16, 4)
        assert len(hidden) == len(token_ids)
        is_extension = self.passes[-1:] == [("fuse", len(hidden))]
        assert len(output_rows) == (1 if is_extension else len(hidden))
        self.passes.append(("extend" if is_extension else "grow", len(hidden)))
        self._clock.now_s += self._seconds


DRAFT_SPEC = SimpleNamespace(
    draft_vocab_size=30,
    max_candidates=30,
    taps_width=16,
    decoder=SimpleNamespace(vocab_size=50, hidden_size=8),
    num_heads=0,
)


def test_draft_steps_are_measured_after_an_extension():
    session = WatchedDraft()
    costs = draft.costs(session, DRAFT_SPEC, max_rows=4)
    assert set(costs[STEP]) == set(costs[EXTEND]) == {"1", "2", "4"}
    passes = session.passes
    grown = [at for at, (kind, _) in enumerate(passes) if kind == "grow"]
    assert len(grown) >= 3 * 3
    assert all(passes[at - 1] == ("extend", 1) for at in grown)
