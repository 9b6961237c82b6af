"""Costs of batches: how they are measured, and how sequences share them."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.core import graph_io
from edgellm.core.graph_roles import PASS, measured_name, shared_kind
from edgellm.device_runtime.networks.known_costs import known_costs
from edgellm.device_runtime.runners import batch_costs
from edgellm.device_runtime.runners.batch_costs import SharedCosts, measure_shared
from edgellm.device_runtime.runners.onnxruntime_cuda import padded_batch
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.tensorrt import ragged_batch
from edgellm.device_runtime.speculate.policy.costs import BatchLoad, Costs

# A pass of one takes 10 ms and 0.1 a row; each further sequence takes 1 ms more.
TIMES = {
    shared_kind(PASS, count): {str(rows): 9 + count + 0.1 * count * rows for rows in (1, 8, 64)}
    for count in (1, 2, 8)
}
# A batch takes longer than one pass for each.
DEAR = {
    shared_kind(PASS, count): {"1": 2 * count**1.5, "8": 9 * count**1.5} for count in (1, 2, 4, 8)
}


def costs(times=TIMES) -> SharedCosts:
    found = SharedCosts.find(PASS, {PASS: {"1": 3.0}, **times})
    assert found is not None
    return found


def asks(*rows: int):
    return [
        {
            graph_io.INPUT_IDS: np.zeros((1, count), np.int64),
            graph_io.WRITE_INDEX: np.array([20]),
            graph_io.LOGITS_INDEX: np.arange(count),
        }
        for count in rows
    ]


def test_costs_between_measurements_are_interpolated():
    found = costs()
    assert found.of(2, 16) == pytest.approx(11 + 1.6)
    assert found.of(1, 300) == pytest.approx(10 + 30)  # beyond what was measured
    assert found.of(2, 2000) == pytest.approx(11 + 200)
    each = 3.0  # rows of each of five
    assert found.of(5, 15) == pytest.approx(9 + 5 + 0.1 * 5 * each)
    assert found.by_rows(8)[0] == pytest.approx(17.8)  # no pass has fewer rows than sequences
    assert SharedCosts.find(PASS, {PASS: {"1": 3.0}}) is None
    assert "4 sequences" in measured_name(shared_kind(PASS, 4))


def test_costs_are_monotone_in_tokens():
    found = SharedCosts({1: {"1": 10, "4": 9}, 2: {"1": 8, "4": 12}})
    assert (found.of(1, 1), found.of(2, 2)) == (9, 9)


def test_tokens_and_trees_of_all_are_measured(monkeypatch):
    """Trees of at most as many tokens as a pass takes; single tokens always."""
    asked = []

    def scripted(runs, budget, tokens):
        for run in runs.values():
            run()
        return dict.fromkeys(sorted(runs, key=tokens), 5.0) if budget is None else {}

    monkeypatch.setattr(batch_costs, "fastest_each_ms", scripted)
    found = measure_shared(PASS, 6, (16, 32), lambda count, rows: asked.append((count, rows)))
    trees = [(1, r) for r in (2, 4, 8, 16)] + [(2, r) for r in (2, 4, 8, 16)]
    trees += [(4, 2), (4, 4), (4, 8), (6, 2), (6, 4)]
    assert sorted(asked) == sorted([*trees, *((count, 1) for count in (1, 2, 4, 6))])
    assert set(found) == {shared_kind(PASS, count) for count in (1, 2, 4, 6)}
    assert found[shared_kind(PASS, 6)] == {"1": 5.0, "2": 5.0, "4": 5.0}


class Batching(Runner):
    """A runner that requests the costs of passes."""

    batch_limits = 8, 32
    learned: SharedCosts | None = None

    def learn_costs(self, found):
        self.learned = found


def test_only_missing_costs_are_measured():
    runner, measured = Batching(), []

    def measure():
        measured.append(0)
        return {PASS: {"1": 9.0}, **TIMES}

    known_costs(runner, PASS, {PASS: {"1": 3.0}, **DEAR}, measure)
    assert not measured
    assert runner.learned.of(1, 8) == 9
    found = known_costs(runner, PASS, {PASS: {"1": 3.0}}, measure)  # of an older build
    assert (found[PASS]["1"], len(measured)) == (3.0, 1)
    assert runner.learned.of(2, 16) == pytest.approx(12.6)
    assert known_costs(Runner(), PASS, {PASS: {"1": 3.0}}, measure) == {PASS: {"1": 3.0}}
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("rows", "assumed", "shared", "dear"),
    [
        ((1, 1, 1, 1), [4], [4], [1, 1, 1, 1]),
        ((64, 1, 1, 1), [1, 4], [4], [1, 1, 1, 1]),
    ],
)
def test_padded_batches_are_split_where_measured_costs_are_lower(rows, assumed, shared, dear):
    parts, ends = dict(enumerate(asks(*rows))), [20] * 8

    def found(*cost):
        return [len(grid.parts) for grid in padded_batch.arrange(parts, ends, 8, *cost)]

    assert found() == assumed
    cheap = {name: {"1": 10.0, "64": 10.5} for name in TIMES}
    assert found(costs(cheap).of) == shared
    assert found(costs(DEAR).of) == dear


def test_ragged_batches_are_split_at_limits_and_by_costs():
    parts = asks(1, 1, 40, 1, 1)
    assert ragged_batch.groups(parts, 100, 100) == [slice(0, 5)]
    assert len(ragged_batch.groups(parts, 42, 42)) == 2
    assert ragged_batch.groups(parts, 100, 100, costs()) == [slice(0, 5)]
    dear = ragged_batch.groups(parts, 100, 100, costs(DEAR))
    assert dear == [slice(at, at + 1) for at in range(5)]


def test_a_share_is_of_what_passes_of_several_cost():
    verify = {"1": 10.0, "64": 16.3}
    alone, together = Costs.of(verify), Costs.of(verify, together=costs())
    batch_load = BatchLoad(2, 1)
    np.testing.assert_allclose(together.share(BatchLoad()), alone.share(BatchLoad()))
    found = together.share(batch_load)
    assert len(found) == len(alone.verify)  # no tree has more rows than were measured
    assert found[1] == pytest.approx(11.2 / 2)
    assert found[9] - found[8] == pytest.approx(0.1)
    assert alone.share(batch_load)[1] == pytest.approx(10.1 / 2)
