"""Parts of all tree drafters: merged lookups, and outcomes by source."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
from stepping import by_cost, learned_of

from edgellm.device_runtime.speculate.drafter import ImageIds, TextDrafter
from edgellm.device_runtime.speculate.drafters import ngram
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits
from edgellm.device_runtime.speculate.shared_passes import run
from edgellm.device_runtime.speculate.text_lookup import Continuation, LearnedLookup


@dataclass
class Saying:
    """A lookup with a fixed prediction, which records its input."""

    tokens: list[int]
    confidence: float = 0.5
    maximum: int = 8
    received: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def end(self, token_ids) -> None:
        self.ended = [*self.received, *token_ids]

    def extend(self, token_ids) -> None:
        self.received += token_ids

    def continuations(self) -> list[Continuation]:
        return [Continuation(self.tokens, [self.confidence] * len(self.tokens))]


class Noting(Calibration):
    """Records the outcomes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[tuple[list[float], list[int]]] = []

    def learn(self, confidences, accepted) -> None:
        self.learned.append(([*confidences], [*accepted]))


def drafter_of(*said: list[int], **options) -> TextDrafter:
    limits = TreeLimits(top_k=4, steps=6, verify_size=20)
    chances = (0.5, 0.4, 0.3)
    lookups = tuple(
        LearnedLookup(functools.partial(Saying, tokens, chance), Noting())
        for tokens, chance in zip(said, chances, strict=False)
    )
    learned = dataclasses.replace(learned_of(FixedTree(limits)), lookups=lookups)
    return begun(TextDrafter(learned, limits, **options))


def begun(drafter: TextDrafter) -> TextDrafter:
    drafter.begin([])
    return drafter


def tree_paths(tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return paths


def test_two_lookups_merge_into_one_tree():
    tree = run(drafter_of([1, 2, 3], [1, 4]).propose(9, 10, 10))
    assert tree.token_ids[0] == 9
    assert sorted(tree_paths(tree)) == [(), (1,), (1, 2), (1, 2, 3), (1, 4)]
    assert sorted(tree_paths(run(drafter_of([1, 2, 3], [1, 4]).propose(9, 10, 2)))) == [
        (),
        (1,),
        (1, 2),
        (1, 4),
    ]
    assert len(run(drafter_of([1, 2, 3], [1, 4]).propose(9, 0, 10))) == 1
    assert len(run(drafter_of([1, 2, 3], [1, 4]).propose(9, 10, 0))) == 1


def test_token_of_two_lookups_has_the_higher_score():
    """The first lookup would have cut the chain at a position that costs 0.45 tokens."""
    limits, costs = TreeLimits(top_k=4, steps=6, verify_size=20), Costs.of({"1": 10, "20": 105})
    said = [([1, 2], 0.3), ([1, 2, 3], 0.9)]
    lookups = tuple(
        LearnedLookup(functools.partial(Saying, tokens, chance), Calibration(prior_weight=1e6))
        for tokens, chance in said
    )
    drafter = begun(
        TextDrafter(dataclasses.replace(by_cost(limits, costs), lookups=lookups), limits)
    )
    assert not drafter.is_paused
    assert run(drafter.propose(9, 20, 10)).token_ids.tolist() == [9, 1, 2, 3]


def test_outcomes_update_the_source_that_proposed():
    """A duplicate counts for its first source; a child of a rejected node counts for none."""
    drafter = drafter_of([1, 2, 3], [1, 4, 5], [6, 7])
    tree = run(drafter.propose(9, 20, 10))
    paths = tree_paths(tree)
    drafter.learn(tree, [paths.index(path) for path in [(), (1,), (1, 4)]], 3)
    first, second, third = (source.calibration.learned for source in drafter._text_drafts.sources)
    assert first == [([0.5, 0.5], [1, 0])]
    assert [sorted(zip(*learned, strict=True)) for learned in second] == [[(0.4, 0), (0.4, 1)]]
    assert third == [([0.3], [0])]
    assert drafter.confidences(tree)[paths.index((6,))] == 0.3


def test_lookups_receive_all_tokens_but_images():
    drafter = drafter_of([1], image_ids=ImageIds(100, None))
    (source,) = drafter._text_drafts.sources
    drafter.remember([5, 100, 101, 6])
    assert source.lookup.received == []  # until it is called
    run(drafter.propose(6, 10, 10))
    assert source.lookup.received == [5, 6]
    drafter.remember([100, 7])
    drafter.end()
    assert (source.lookup.received, source.lookup.ended) == ([5, 6], [5, 6, 7])


@pytest.mark.parametrize(("last_ms", "size"), [(10.5, 7), (44.5, 4), (58, 1)])
def test_chains_are_as_long_as_they_pay(last_ms, size):
    """A token is worth 8.3 ms: 0.12 tokens a millisecond, a fifth more than plain decoding."""
    costs = Costs.of({"1": 10, "7": last_ms, "20": 99})
    limits = TreeLimits(top_k=4, steps=6, verify_size=20)
    learned = by_cost(limits, costs, lookups=[lambda: Saying([1, 2, 3, 4, 5, 6], 0.9)])
    drafter = begun(TextDrafter(learned, limits))
    assert len(run(drafter.propose(9, 20, 10))) == size


def test_a_losing_lookup_pauses():
    costs = Costs.of({"1": 10, "2": 11, "7": 14})
    limits, sure = TreeLimits(top_k=4, steps=6, verify_size=20), Calibration(prior_weight=1e6)
    lookup = LearnedLookup(lambda: Saying([1, 2, 3], 0.95), Calibration(prior_weight=1e6))
    learned = dataclasses.replace(by_cost(limits, costs, sure), lookups=(lookup,))
    drafter = begun(TextDrafter(learned, limits))
    sizes = []
    for _ in range(212):  # rounds lose 2.2 ms and a lookup; a trial may lose 20 ms
        tree = run(drafter.propose(9, 20, 10))
        sizes.append(len(tree))
        drafter.learn(tree, [0], 1)
    assert [size > 1 for size in sizes] == [True] * 10 + [False] * 192 + [True] * 10


def test_lookups_draft_while_the_network_pauses():
    """They also use the text since the pause began."""
    limits, costs = TreeLimits(top_k=4, steps=6, verify_size=20), Costs.of({"1": 10, "7": 14})
    learned = by_cost(limits, costs, lookups=[ngram.remember()], adapts=True)
    learned.controller.pace.network.pause = 100
    drafter, no_taps = begun(TextDrafter(learned, limits)), np.zeros((1, 0), np.float32)
    rests = []
    for token_id in (1, 2, 3, 4, 9, 1, 2, 3):
        rests.append(drafter.is_paused)
        drafter.observe_plain(token_id, no_taps)
    assert all(rests[:6])
    assert not drafter.is_paused
    assert len(run(drafter.propose(3, 20, 10))) > 1


def test_paused_lookups_receive_no_text():
    limits, costs = TreeLimits(top_k=4, steps=6, verify_size=20), Costs.of({"1": 10, "7": 14})
    learned = by_cost(limits, costs, lookups=[ngram.remember()])
    text = learned.controller.pace.text
    text.pause = 6
    drafter, no_taps = begun(TextDrafter(learned, limits)), np.zeros((1, 0), np.float32)
    (source,) = drafter._text_drafts.sources
    for token_id in (1, 2, 3, 4, 9, 1):
        assert drafter.is_paused
        drafter.observe_plain(token_id, no_taps)
        assert source.lookup.continuations() == []
    drafter.remember([2, 3, 4])
    assert text.pause == 0
    assert not drafter.is_paused
    assert run(drafter.propose(4, 20, 10)).token_ids.tolist()[:4] == [4, 9, 1, 2]
