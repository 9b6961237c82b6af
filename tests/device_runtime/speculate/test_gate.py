"""Rounds with the network and without: what gives more is taken, the other tried at times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from edgellm.device_runtime.speculate.gate import NetworkGate
from edgellm.device_runtime.speculate.policy import Costs, price

COSTS = Costs.of({"1": 10, "4": 13, "12": 22}, {"1": 2}, {"1": 2})


@dataclass(frozen=True)
class Rounds:
    """What rounds of a side give on average."""

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
    Rounds(1.0, 0, 1), Rounds(1.2, 8, 6), Rounds(2.6, 8, 6), Rounds(3.4, 8, 6)
)  # fmt: skip
CHAIN = Rounds(2.6, 0, 4)


def run(gate, random, foreseen, network, text, rounds, pace=1.0) -> list[bool]:
    """The sides that the gate chose."""
    sides = []
    for _ in range(rounds):
        sides.append(gate.opens(foreseen))
        mean = network if sides[-1] else text
        tokens = 1 + int(random.poisson(mean.tokens - 1))
        gate.learn(networked=sides[-1], tokens=tokens, ms=mean.ms * pace)
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
    sides = run(NetworkGate(COSTS), np.random.default_rng(seed), 0.0, network, text, 2000)
    assert efficiency(sides[100:], network, text) > 0.95
    assert 10 <= sides[100:].count(network.rate < text.rate) < 1000


@pytest.mark.parametrize("seed", range(5))
def test_rounds_in_which_the_text_foresees_much_are_judged_apart(seed):
    gate, random = NetworkGate(COSTS), np.random.default_rng(seed)
    sides = {0.0: [], 4.0: []}
    chain = Rounds(4.5, 0, 8)
    for _ in range(200):
        sides[0.0] += run(gate, random, 0.0, GOOD, PLAIN, 10)
        sides[4.0] += run(gate, random, 4.0, GOOD, chain, 10)
    assert efficiency(sides[0.0][100:], GOOD, PLAIN) > 0.95
    assert efficiency(sides[4.0][100:], GOOD, chain) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_another_workload_changes_its_mind(seed):
    gate, random = NetworkGate(COSTS), np.random.default_rng(seed)
    run(gate, random, 0.0, GOOD, PLAIN, 500)
    assert efficiency(run(gate, random, 0.0, BAD, PLAIN, 1500)[200:], BAD, PLAIN) > 0.95
    assert efficiency(run(gate, random, 0.0, GOOD, PLAIN, 4000)[2000:], GOOD, PLAIN) > 0.95


@pytest.mark.parametrize("pace", [0.3, 1.0, 5.0])
def test_both_sides_are_tried_on_the_clock_of_this_machine(pace):
    """Whatever the build said that passes cost."""
    gate, random = NetworkGate(COSTS), np.random.default_rng(0)
    sides = run(gate, random, 4.0, BAD, Rounds(4.5, 0, 8), 40, pace)
    assert sides == [True] * 10 + [False] * 30


def test_a_pause_of_the_machine_is_no_judgement():
    gate, random = NetworkGate(COSTS), np.random.default_rng(0)
    run(gate, random, 0.0, GOOD, PLAIN, 50)
    assert gate.opens(0.0)
    gate.learn(networked=True, tokens=3, ms=5000.0)
    assert gate.opens(0.0)
