"""Speculation over scripted sessions: the same ids as plain decoding, whatever is drafted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_rounds import CHOICES, COSTS, GREEDY, LOOKUPS, PROMPT, SAMPLED, SHAPES, Setup, plain
from scripted_sessions import (
    DRAFTS,
    VOCAB,
    StrictBase,
    StrictDraft,
    adversary,
    oracle,
)
from stepping import generate

from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.speculate.drafter import RETRIAL_ROWS
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits


def _sized(*costs: str) -> list[tuple[str, str]]:
    """Shapes with policies: costs only limit how much of a shape is expanded, so three suffice."""
    fixed = [(shape, "fixed") for shape in SHAPES]
    return [*fixed, *((shape, cost) for shape in ("chain", "bushy", "default") for cost in costs)]


@pytest.mark.each_change(
    "half_right-*",
    "guesser-chain-*",
    "guesser-bushy-*",
    "broken-default-*",
    "oracle-default-fair-*",
    "adversary-cut-*",
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("shape", "policy", "with_text"),
    [
        *((shape, policy, shape == "bushy") for shape, policy in _sized("free", "fair", "dear")),
        *(("default", policy, True) for policy in ("fixed", "free", "fair", "dear")),
    ],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_token_ids_equal_plain_decoding(draft, shape, policy, with_text):
    setup = Setup(SHAPES[shape], policy, ("ngram", "suffix") * with_text, draft=draft)
    for params in (GREEDY, SAMPLED):
        for prompt in (PROMPT, [7], list(range(20)) * 2):  # outputs of one drafter, one by one
            assert setup.ids(prompt, params, 30) == plain(prompt, params, 30)
    assert max(setup.base.tree_sizes) <= SHAPES[shape].verify_size


@pytest.mark.each_change(
    "half_right-*", "broken-chain-*", "oracle-bushy-*", "adversary-default-fair"
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("shape", "policy"), _sized("fair"))
@pytest.mark.parametrize("draft", DRAFTS)
def test_token_ids_equal_plain_decoding_with_a_draft_model(draft, shape, policy):
    lookups = ("suffix",) if shape == "bushy" else ()
    setup = Setup(SHAPES[shape], policy, lookups, draft=draft, is_model=True)
    for params in (GREEDY, SAMPLED):
        for prompt in (PROMPT, [7], list(range(20)) * 2):
            assert setup.ids(prompt, params, 30) == plain(prompt, params, 30)
    assert max(setup.base.tree_sizes) <= SHAPES[shape].verify_size


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_draft_model_that_is_the_base_is_always_right(top_k):
    """This requires that its cache follows the accepted path."""
    setup = Setup(TreeLimits(top_k=top_k, steps=5, verify_size=1 + 5 * top_k), is_model=True)
    rounds = setup.rounds(max_tokens=61)
    assert [len(found.token_ids) for found in rounds] == [1, *[6] * 10]
    assert top_k > 1 or max(setup.session.pass_rows[1:]) == 2  # the leaf and the bonus
    assert setup.ids(params=SAMPLED, max_tokens=61) == plain(params=SAMPLED, max_tokens=61)


@pytest.mark.parametrize("is_model", [False, True])
def test_rounds_without_the_network_are_caught_up_with(is_model):
    """The network prefills in one pass what was committed while it was paused."""
    setup = Setup(
        TreeLimits(top_k=2, steps=4, verify_size=9),
        "free",
        ("suffix",),
        is_model=is_model,
        adapts=True,
    )
    closed = [*[False] * 9, *[True] * 9] * 9
    setup.learned.controller.chooses_network = lambda _: closed.pop()
    rounds = setup.rounds(max_tokens=80)
    assert [token for one in rounds for token in one.token_ids] == plain(max_tokens=80)
    assert max(len(one.tree) for one in rounds[1:]) > 1


def test_waiting_positions_respect_the_engines_pass_limit():
    """After a long pause."""
    setup = Setup(TreeLimits(top_k=2, steps=4, verify_size=9), "free", ("suffix",), adapts=True)
    setup.rows.max_rows = 7
    closed = [*[True] * 9, *[False] * 30]
    setup.learned.controller.chooses_network = lambda _: closed.pop()
    rounds = setup.rounds(max_tokens=60)
    assert [token for one in rounds for token in one.token_ids] == plain(max_tokens=60)
    assert max(setup.session.extensions[1:]) == 7


def test_chains_extend_and_trees_are_recomputed_each_level():
    for top_k, passes in ((1, [1, 1, 1]), (2, [2, 4, 6])):
        setup = Setup(TreeLimits(top_k=top_k, steps=4, verify_size=99), is_model=True)
        setup.rounds(max_tokens=6)
        assert setup.session.pass_rows == [len(PROMPT) + 1, *passes]


@pytest.mark.parametrize(("top_k", "first"), [(1, [1, 1, 1]), (2, [1, 3, 5])])
def test_a_level_costs_what_its_pass_computes(top_k, first):
    """One token for a chain; for a tree all tokens so far."""
    table = {str(rows): float(rows) for rows in range(1, 65)}
    setup, charged = Setup(TreeLimits(top_k=top_k, steps=4, verify_size=99), is_model=True), []
    setup.costs = Costs.of({"1": 1}, table, table)
    frontier = setup.learned.policy.frontier
    setup.learned.policy.frontier = lambda pool, newest, prices: (
        charged.append(prices[:3].tolist()) or frontier(pool, newest, prices)
    )
    setup.rounds(max_tokens=6)
    assert [prices[0] for prices in charged] == first
    for level, prices in enumerate(charged):
        assert prices[1:] == [level * top_k + 2, level * top_k + 3]


def test_unknown_token_ids_disable_the_draft_model():
    setup = Setup(is_model=True, capacity=60)
    setup.options["num_readable"] = 9
    assert setup.ids() == plain()
    assert setup.session.pass_rows == []  # the prompt has a 9
    setup.options |= {"num_readable": VOCAB, "num_candidates": 5}
    found = setup.rounds()
    assert [t for one in found for t in one.token_ids] == plain()
    assert max(int(one.tree.token_ids[1:].max()) for one in found[1:] if len(one.tree) > 1) < 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("capacity", [41, 128])
@pytest.mark.parametrize("draft", DRAFTS)
def test_token_ids_of_static_trees_equal_plain_decoding(draft, capacity):
    limits = SpecOptions(choices=CHOICES).limits(60)
    setup = Setup(limits, "static", capacity=capacity, draft_capacity=60, draft=draft)
    for params in (GREEDY, SAMPLED):
        for prompt in (PROMPT, [7], list(range(10)) * 2):
            maximum = min(capacity - len(prompt) + 1, 40)
            assert setup.ids(prompt, params, maximum) == plain(prompt, params, maximum)
    assert max(setup.base.tree_sizes) == len(CHOICES) + 1


@pytest.mark.each_change("chain-*", "default-*", "cut-fair-*")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lookups", [("ngram",), ("suffix",), ("ngram", "suffix")], ids=str)
@pytest.mark.parametrize("policy", ["fixed", "fair"])
@pytest.mark.parametrize("shape", SHAPES)
def test_token_ids_equal_plain_decoding_without_a_network(shape, policy, lookups):
    setup = Setup(SHAPES[shape], policy, lookups, draft=None)
    for params in (GREEDY, SAMPLED):
        for prompt in (PROMPT, [7], list(range(20)) * 2):
            assert setup.ids(prompt, params, 30) == plain(prompt, params, 30)
    assert max(setup.base.tree_sizes) <= SHAPES[shape].verify_size
    assert shape == "one_node" or policy != "fixed" or max(setup.base.tree_sizes) > 1


@pytest.mark.parametrize(("shape", "size"), [("one_node", 1), ("bushy", 20), ("default", 60)])
def test_fixed_trees_have_the_size_of_the_limits(shape, size):
    setup = Setup(SHAPES[shape])
    sizes = [len(found.tree) for found in setup.rounds() if found.tree is not None]
    assert sizes[0] == size


def test_the_oracle_is_always_right_and_the_adversary_never():
    rounds = Setup(TreeLimits(top_k=2, steps=5, verify_size=11)).rounds(max_tokens=61)
    assert [len(found.token_ids) for found in rounds] == [1, *[6] * 10]
    assert all(len(found.path) == 6 for found in rounds[1:])
    rounds = Setup(draft="adversary").rounds(max_tokens=20)
    assert [found.path for found in rounds[1:]] == [(0,)] * 19


def test_rounds_report_accepted_nodes():
    for found in Setup(TreeLimits(top_k=3, steps=4, verify_size=20), draft="half_right").rounds()[
        1:
    ]:
        assert found.tree is not None
        drafted = found.tree.token_ids[list(found.path[1:])].tolist()
        assert list(found.token_ids[:-1]) == drafted
        assert len(found.confidences) == len(found.tree)
        assert found.confidences[0] == 1


@pytest.mark.parametrize("policy", ["fixed", "free", "fair"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13])
def test_max_tokens_is_never_exceeded(max_tokens, policy):
    setup = Setup(policy=policy)
    assert setup.ids(max_tokens=max_tokens) == plain(max_tokens=max_tokens)
    assert len(setup.session.extensions) == 0 or max_tokens > 2


@pytest.mark.parametrize("policy", ["fixed", "free"])
@pytest.mark.parametrize("capacity", [10, 11, 12, 20, 37, 66])
def test_the_cache_is_filled_to_its_last_position(capacity, policy):
    """Trees are clamped to the free positions, down to one."""
    setup = Setup(policy=policy, capacity=capacity, draft="half_right")
    maximum = capacity - len(PROMPT) + 1  # the last token is not written
    assert setup.ids(max_tokens=maximum) == plain(max_tokens=maximum)
    setup = Setup(policy=policy, capacity=capacity, draft="adversary")
    assert setup.ids(max_tokens=maximum) == plain(max_tokens=maximum)
    sizes = setup.base.tree_sizes
    assert maximum < 4 or sizes[-3] <= 3
    assert maximum < 3 or sizes[-2] <= 2  # one position besides the root was free
    assert maximum < 2 or sizes[-1] == 1


@pytest.mark.parametrize("draft_capacity", [1, 5, 9, 10, 12, 30, 31])
@pytest.mark.parametrize("prefill_rows", [4, 64])
def test_a_draft_cache_smaller_than_the_bases(draft_capacity, prefill_rows):
    setup = Setup(draft_capacity=draft_capacity, prefill_rows=prefill_rows)
    for prompt in (PROMPT, [7, 7], list(range(20))):
        assert setup.ids(prompt) == plain(prompt)


@pytest.mark.parametrize("draft", ["oracle", "half_right"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9])
def test_prompts_of_several_chunks(rows, draft):
    setup = Setup(prefill_rows=rows, draft=draft)
    assert setup.ids() == plain()
    assert setup.session.extensions[0] in (rows, len(PROMPT))
    assert setup.ids(params=SAMPLED) == plain(params=SAMPLED)


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    limits=st.builds(
        TreeLimits, top_k=st.integers(1, VOCAB - 1), steps=st.integers(1, 6),
        verify_size=st.integers(1, 60),
    ),
    policy=st.sampled_from(["fixed", *COSTS]),
    lookups=st.sets(st.sampled_from(sorted(LOOKUPS))).map(tuple),
    draft=st.sampled_from([*sorted(DRAFTS), None]),
    is_model=st.booleans(),
    adapts=st.booleans(),
    room=st.integers(1, 40),
    draft_capacity=st.integers(1, 80),
    prefill_rows=st.integers(1, 40),
    params=st.builds(
        SamplingParams, temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_p=st.sampled_from([0.7, 1.0]), top_k=st.sampled_from([0, 1, 4]),
        seed=st.integers(0, 99),
    ),
)  # fmt: skip
def test_token_ids_equal_plain_decoding_for_any_settings(
    prompt, limits, policy, lookups, draft, is_model, adapts, room, draft_capacity, prefill_rows,
    params,
):  # fmt: skip
    setup = Setup(
        limits, policy, lookups, len(prompt) + room, draft_capacity, prefill_rows, draft, is_model,
        adapts,
    )  # fmt: skip
    assert setup.ids(prompt, params, room) == plain(prompt, params, room)


def test_pauses_end_and_the_draft_catches_up():
    """A losing draft pauses; tokens committed meanwhile are prefilled in one pass."""
    setup = Setup(policy="dear", draft="adversary", capacity=400, draft_capacity=400)
    assert setup.ids([5], max_tokens=300) == _plain_of(300)
    assert len(setup.session.extensions) < 100
    assert max(setup.session.extensions) == RETRIAL_ROWS


def test_a_losing_draft_model_pauses_too():
    setup = Setup(policy="dear", draft="adversary", capacity=400, draft_capacity=400, is_model=True)
    assert setup.ids([5], max_tokens=300) == _plain_of(300)
    assert len(setup.session.pass_rows) < 100
    assert max(setup.session.pass_rows) >= 32


def test_a_pause_across_a_prompt_is_caught_up_with_in_two_passes():
    setup = Setup(policy="free")
    setup.learned.controller.pace.network.pause = 10
    prompt = list(range(20))
    assert setup.ids(prompt) == plain(prompt)
    assert setup.session.extensions[:2] == [20, 10]


def _plain_of(count: int) -> list[int]:
    base = StrictBase(400)
    return list(generate(base, [5], Sampler(params=GREEDY), count, Profile(), prefill_rows=64))


def test_lookups_accept_in_repetitive_text():
    """With a draft that is always wrong, all accepted tokens come from lookups."""

    def loop(context):
        logits = np.zeros(VOCAB, np.float32)
        logits[(context[-1] + 1) % 6] = 9
        return logits

    for lookups, draft in (
        ((), "adversary"), (("ngram",), "adversary"), (("ngram",), None), (("suffix",), None)
    ):  # fmt: skip
        setup = Setup(
            TreeLimits(top_k=2, steps=6, verify_size=16, text_steps=9), lookups=lookups, draft=draft
        )
        setup.base.logits_of = loop
        if draft is not None:
            setup.session.draft = lambda _: ([23, 22], [1e-4, 1e-5])
        rounds = setup.rounds(max_tokens=50)
        assert [t for found in rounds for t in found.token_ids] == [
            at % 6 for at in range(50)
        ]  # PROMPT ends with 5
        longest = max(len(found.path) for found in rounds)
        # The loop's last repetition has six tokens; the automaton continues to its ninth level.
        assert longest == {(): 1, ("ngram",): 7, ("suffix",): 10}[lookups]


def test_later_requests_find_an_earlier_output():
    setup = Setup(TreeLimits(top_k=2, steps=8, verify_size=16), lookups=("suffix",), draft=None)
    first, again = (setup.rounds(max_tokens=40) for _ in range(2))
    assert len(first) > 30
    assert len(again) < 8
    assert [t for one in first for t in one.token_ids] == plain()


def test_the_strict_sessions_detect_errors():
    """A mask, position, hidden state or compaction that is off by one fails."""
    base = StrictBase(16)
    base.run(np.array([1, 2, 3]), 0, np.array([2]))
    rows, ids = np.arange(3), np.array([4, 5, 6])
    good = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    positions = np.array([3, 4, 4])
    for mask, place in (
        (np.tri(3, dtype=bool), positions),
        (good, positions + 1),
        (np.eye(3, dtype=bool), positions),
        (np.ones((3, 3), bool), positions),
    ):
        with pytest.raises(AssertionError):
            base.run(ids, 3, rows, position_ids=place, tree_mask=mask)
    base.run(ids, 3, rows, position_ids=positions, tree_mask=good)
    with pytest.raises(AssertionError):
        base.run(ids[:1], 4, rows[:1])
    with pytest.raises(AssertionError):
        base.compact(3, np.array([0, 1, 2]))
    base.compact(3, np.array([0, 2]))
    assert [token for token, _ in base.rows] == [1, 2, 3, 4, 6]
    for draft in (oracle, adversary):
        features = base.run(np.array([1, 2, 3]), 0, np.array([2])).taps
        session = StrictDraft(16, draft)
        with pytest.raises(AssertionError):
            session.run(np.array([2, 3]), session.fuse(features[1:]), 0, np.array([1]), top_k=2)
