"""Speculation rounds or plain decoding: the faster one runs, the other is retried at times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from edgellm.device_runtime.speculate.policy.costs import Costs, price
from edgellm.device_runtime.speculate.policy.spec_budget import TextLookupShare
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.text_lookup import TextDrafts

SILENT = TextDrafts()
FREE = Costs.of({"1": 10, "64": 10.001}, {"1": 0.001, "64": 0.002}, {"1": 0, "64": 0})
COSTS = Costs.of({"1": 10, "4": 13, "12": 22}, {"1": 2}, {"1": 2})


@dataclass(frozen=True)
class Rounds:
    """Average tokens and costs of rounds."""

    tokens: float
    drafted_ms: float
    rows: int

    @property
    def ms(self) -> float:
        return self.drafted_ms + price(COSTS.verify, self.rows)

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


PLAIN, BAD, FAIR, GOOD = (
    Rounds(1.0, 0, 1),
    Rounds(1.2, 8, 6),
    Rounds(2.6, 8, 6),
    Rounds(3.4, 8, 6),
)
CHAIN = Rounds(2.6, 0, 4)


def run(controller, random, predicted, network, text, rounds, pace=1.0) -> list[bool]:
    """The sides that the controller chose."""
    sides = []
    for _ in range(rounds):
        sides.append(controller.choose(predicted))
        mean = network if sides[-1] else text
        tokens = 1 + int(random.poisson(mean.tokens - 1))
        controller.learn(networked=sides[-1], tokens=tokens, ms=mean.ms * pace)
    return sides


def efficiency(sides, network, text) -> float:
    """Tokens per millisecond over those of the better side alone."""
    taken = [network if side else text for side in sides]
    rate = sum(one.tokens for one in taken) / sum(one.ms for one in taken)
    return rate / max(network.rate, text.rate)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("network", "text"),
    [(GOOD, PLAIN), (FAIR, PLAIN), (BAD, PLAIN), (FAIR, CHAIN), (GOOD, CHAIN)],
)
def test_the_better_side_is_taken_and_the_other_tried(network, text, seed):
    sides = run(
        SpecGate(costs=COSTS, adapts=True), np.random.default_rng(seed), 0.0, network, text, 2000
    )
    assert efficiency(sides[100:], network, text) > 0.95
    assert 10 <= sides[100:].count(network.rate < text.rate) < 1000


@pytest.mark.parametrize("seed", range(5))
def test_rounds_with_many_expected_tokens_are_compared_separately(seed):
    controller, random = SpecGate(costs=COSTS, adapts=True), np.random.default_rng(seed)
    sides = {0.0: [], 4.0: []}
    chain = Rounds(4.5, 0, 8)
    for _ in range(200):
        sides[0.0] += run(controller, random, 0.0, GOOD, PLAIN, 10)
        sides[4.0] += run(controller, random, 4.0, GOOD, chain, 10)
    assert efficiency(sides[0.0][100:], GOOD, PLAIN) > 0.95
    assert efficiency(sides[4.0][100:], GOOD, chain) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_another_workload_changes_its_mind(seed):
    controller, random = SpecGate(costs=COSTS, adapts=True), np.random.default_rng(seed)
    run(controller, random, 0.0, GOOD, PLAIN, 500)
    assert efficiency(run(controller, random, 0.0, BAD, PLAIN, 1500)[200:], BAD, PLAIN) > 0.95
    assert efficiency(run(controller, random, 0.0, GOOD, PLAIN, 4000)[2000:], GOOD, PLAIN) > 0.95


@pytest.mark.parametrize("pace", [0.3, 1.0, 5.0])
def test_both_sides_are_tried_on_the_clock_of_this_machine(pace):
    """Whatever costs the build has measured."""
    controller, random = SpecGate(costs=COSTS, adapts=True), np.random.default_rng(0)
    sides = run(controller, random, 4.0, BAD, Rounds(4.5, 0, 8), 40, pace)
    assert sides == [True] * 10 + [False] * 30


def test_slow_outlier_rounds_do_not_change_the_choice():
    controller, random = SpecGate(costs=COSTS, adapts=True), np.random.default_rng(0)
    run(controller, random, 0.0, GOOD, PLAIN, 50)
    assert controller.choose(0.0)
    controller.learn(networked=True, tokens=3, ms=5000.0)
    assert controller.choose(0.0)


def test_pauses_get_longer_while_drafting_loses():
    costs = Costs.of({"1": 10, "2": 12}, {"1": 1}, {"1": 1})
    controller = SpecGate(costs=costs, pauses=True)
    pauses = []
    for _ in range(8):
        while not controller.is_pausing:
            controller.end_round(1, 15, 2, networked=True)  # one token in 27 ms instead of 10
        length = 0
        while controller.is_pausing:
            controller.observe_plain(SILENT)
            length += 1
        pauses.append(length)
    assert pauses == [192, 384, 768, 1024, 1024, 1024, 1024, 1024]
    for _ in range(60):
        controller.end_round(4, 2, 2, networked=True)
        assert not controller.is_pausing
    while not controller.is_pausing:
        controller.end_round(1, 15, 2, networked=True)
    assert controller.pace.network.pause == 192  # past gains do not count against it


TIGHT = Costs.of({"1": 2.4, "2": 2.6, "4": 3.0}, {"1": 0.17}, {"1": 0.31, "64": 2.0}, host_ms=0.3)


def drafted(controller, random, chance, tokens) -> float:
    """Milliseconds of `tokens` tokens at the costs of `TIGHT`; two are drafted, in two passes."""
    ms, drafted_ms, verify_ms = 0.0, 0.31 + 0.17, float(TIGHT.verify[3])
    while tokens > 0:
        if controller.is_pausing:
            controller.observe_plain(SILENT)
            tokens, ms = tokens - 1, ms + 2.4
            continue
        begins = controller.is_retrial and controller.pace.network.ms == pytest.approx(2 * 2.4)
        read_ms = 2.0 if begins else 0.0
        right = 1 + (random.random() < chance) if random.random() < chance else 0
        controller.end_round(1 + right, drafted_ms, 3, networked=True, read_ms=read_ms)
        tokens, ms = tokens - 1 - right, ms + drafted_ms + verify_ms + TIGHT.host_ms + read_ms
    return ms


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2, 0.3])
def test_a_draft_that_does_not_pay_costs_two_percent_at_most(chance):
    for seed in range(5):
        controller, random = SpecGate(costs=TIGHT, pauses=True), np.random.default_rng(seed)
        assert drafted(controller, random, chance, 512) <= 1.02 * 512 * 2.4
        assert drafted(controller, random, chance, 2048) <= 1.01 * 2048 * 2.4


def test_a_draft_that_begins_to_pay_is_back_within_a_pause():
    for seed in range(5):
        controller, random = SpecGate(costs=TIGHT, pauses=True), np.random.default_rng(seed)
        drafted(controller, random, 0.0, 4000)
        drafted(controller, random, 0.8, 1024 + 16)
        assert not controller.is_pausing
        assert drafted(controller, random, 0.8, 512) < 0.75 * 512 * 2.4
        assert not controller.is_retrial


def test_the_host_decides_where_passes_alone_would_pay():
    """1.2 tokens in 1.13 times a plain pass, and in 1.25 times with the host's part."""
    pausing = []
    for host_ms in (0.0, 1.2):
        costs = Costs.of({"1": 10, "2": 10.3}, {"1": 0}, {"1": 1}, host_ms)
        controller = SpecGate(costs=costs, pauses=True)
        for round_ in range(200):
            controller.end_round(1 + (round_ % 5 == 0), 1, 2, networked=True)
        pausing.append(controller.is_pausing)
    assert pausing == [False, True]


def test_unused_drafts_of_a_network_are_charged():
    """At T = 1 half of all rounds ended with the root alone: 7 % of HumanEval's time."""
    controller = SpecGate(costs=TIGHT, pauses=True)
    before = controller.pace.network.ms
    controller.end_round(1, 0.31, 1, networked=True)
    assert before - controller.pace.network.ms == pytest.approx(0.31 + TIGHT.host_ms)


def test_lookup_trees_pay_for_host_time():
    """When host time was free, eight requests took 4 % longer than plain decoding."""
    controller = SpecGate(costs=TIGHT, pauses=True, adapts=True)
    before = controller.pace.text.ms
    controller.end_round(2, 0.0, 3, networked=False, text=TextLookupShare(0.05, rows=2, tokens=1))
    won_ms = 2 * 2.4 - float(TIGHT.verify[3]) - TIGHT.host_ms - 0.05
    assert controller.pace.text.ms - before == pytest.approx(won_ms)


def test_rounds_of_lookups_do_not_affect_the_networks_credit():
    controller = SpecGate(costs=TIGHT, pauses=True, adapts=True)
    for _ in range(100):
        controller.end_round(1, 0, 4, networked=False)
    assert not controller.is_pausing


def looked(controller, ms=0.06) -> None:
    """A plain token after a lookup without a match."""
    text_drafts = TextDrafts()
    text_drafts.looked_s = ms / 1e3
    controller.observe_plain(text_drafts)


def test_useless_lookups_pause_and_are_retried():
    """1024 plain tokens lose 1.5 % at most, though each look takes 2.5 % of one."""
    controller, looks = SpecGate(costs=TIGHT, pauses=True, adapts=True), 0
    network, text = controller.pace.network, controller.pace.text
    network.pause = 10_000
    for _ in range(1024):
        if text.pause:
            controller.observe_plain(SILENT)
        else:
            looked(controller)
            looks += 1
    assert 0.005 < looks * 0.06 / (1024 * 2.4) < 0.015
    assert network.pause == 10_000 - 1024
    while text.pause:
        controller.observe_plain(SILENT)
    for _ in range(40):  # predictions are now right, but for every second lookup
        looked(controller)
        found = TextLookupShare(0.06, rows=2, tokens=2)
        controller.end_round(3, 0.0, 3, networked=False, text=found)
    assert not text.pause
    assert not text.is_retrial


def test_lookups_are_credited_for_their_nodes_in_a_networks_tree():
    """Credit for nodes and tokens that only the lookup predicted; the network gets the rest."""
    controller = SpecGate(costs=TIGHT, pauses=True, adapts=True)
    network, text = controller.pace.network, controller.pace.text
    before = network.ms, text.ms
    controller.end_round(2, 0.31, 3, networked=True, text=TextLookupShare(0.05, rows=1, tokens=0))
    assert text.ms - before[1] == pytest.approx(2.6 - 2.8 - 0.05)
    assert network.ms - before[0] == pytest.approx(2 * 2.4 - 2.6 - 0.31 - TIGHT.host_ms)
    before = network.ms, text.ms
    controller.end_round(2, 0.31, 3, networked=True, text=TextLookupShare(0.05, rows=2, tokens=1))
    assert text.ms - before[1] == pytest.approx(2.4 - 0.4 - 0.05)
    assert network.ms - before[0] == pytest.approx(-0.31 - TIGHT.host_ms)


def test_the_rate_follows_the_rounds_and_never_falls_below_plain_decoding():
    controller = SpecGate(costs=FREE, pauses=True)
    for _ in range(400):
        controller.end_round(5, 5, 2, networked=True)
    assert controller.rate == pytest.approx(5 / 15, rel=0.01)
    controller.pace.tokens = 0.5
    assert controller.rate == pytest.approx(1 / 10)


def test_fixed_trees_never_pause():
    controller = SpecGate(costs=FREE)
    controller.end_round(1, 1e9, 60, networked=True)
    assert not controller.is_pausing
