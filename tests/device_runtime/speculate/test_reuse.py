"""Reuse of cached positions between requests, over sessions that check every pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sessions import DRAFTS, VOCAB, StrictBase, StrictDraft, recorded
from stepping import by_cost, generate, learned_of, speculate

from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.prefix_cache.pinned_prefixes import PinnedPrefixes, count_common
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import RETRIAL_ROWS
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.drafters.ngram import NgramLookup
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits

CAPACITY = 96
LIMITS = TreeLimits(top_k=3, steps=4, verify_size=12)
FREE = Costs.of({"1": 10, "64": 10.01}, {"1": 0.01, "64": 0.02}, {"1": 0.01, "64": 0.02})
DEAR = Costs.of({"1": 10, "2": 30, "64": 900}, {"1": 8, "64": 50}, {"1": 8, "64": 50})
GREEDY, SAMPLED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=0, seed=3),
)


class BrokenPassError(Exception):
    """A pass that fails."""


@dataclass
class Chat:
    """A base and a draft that run one prompt after another, and their expected caches."""

    draft: str = "half_right"
    policy: str = "fixed"
    prefill_rows: int = 64
    draft_capacity: int = CAPACITY
    text: list[int] = field(default_factory=list)  # of the last prompt and its output
    in_base: list[int] = field(default_factory=list)  # tokens with cached positions
    in_draft: list[int] = field(default_factory=list)  # tokens up to its last position

    def __post_init__(self) -> None:
        self.base = StrictBase(CAPACITY)
        self.session = recorded(self.base)
        self.draft_session = StrictDraft(self.draft_capacity, DRAFTS[self.draft])
        self.caches = DraftKVCaches(network=self.draft_session, round_rows=LIMITS.steps + 1)
        self.draft_kv = self.caches.new_kv()
        self.learned = {params: self._nothing_learned() for params in (GREEDY, SAMPLED)}

    @property
    def kvs(self):
        """KV caches of the base and the draft."""
        return [self.session.kv, self.draft_kv]

    def _nothing_learned(self):
        if self.policy == "fixed":
            return learned_of(FixedTree(LIMITS), lookups=[NgramLookup])
        return by_cost(LIMITS, {"free": FREE, "dear": DEAR}[self.policy], lookups=[NgramLookup])

    def ask(
        self, prompt, *, speculates=False, params=GREEDY, count=12, stop_after=None, breaks=None
    ):
        """Run one request and return its tokens; set `reused`, the positions not computed.

        The caller stops after `stop_after` rounds; pass `breaks` of the base fails.
        """
        kvs = self.kvs if speculates else self.kvs[:1]
        held = min(kv.num_cached(prompt) for kv in kvs)
        self.reused = min(held, len(prompt) - 1)
        self.base.passes.clear()
        self._break_base(breaks)
        run = self._speculated if speculates else self._plain
        tokens, rounds = [], run(prompt, params, count)
        try:
            for at, found in enumerate(rounds):
                tokens += found
                if at == stop_after:
                    break
        except BrokenPassError:
            pass
        self._remember(prompt, tokens, speculates=speculates)
        return tokens

    def _plain(self, prompt, params, count):
        for token in generate(
            self.session, prompt, Sampler(params=params), count, Profile(),
            prefill_rows=self.prefill_rows, reused=self.reused,
        ):  # fmt: skip
            yield [token]

    def _speculated(self, prompt, params, count):
        drafter = EagleDrafter(
            caches=self.caches,
            learned=self.learned[params],
            limits=LIMITS,
            costs=FREE,
            max_tree_rows=12,
        )
        drafter.use_kv(self.draft_kv)
        for found in speculate(
            self.session, drafter, prompt, Sampler(params=params), count, Profile(),
            prefill_rows=self.prefill_rows, reused=self.reused,
        ):  # fmt: skip
            yield list(found.token_ids)

    def _break_base(self, breaks) -> None:
        def run(*arguments, **options):
            if len(self.base.passes) == breaks:
                raise BrokenPassError
            return StrictBase.run(self.base, *arguments, **options)

        self.base.run = run

    def _remember(self, prompt, tokens, *, speculates) -> None:
        self.text = [*prompt, *tokens]
        if tokens:
            self.in_base = self.text[:-1]
        else:  # it failed in the prompt
            pieces = len(self.base.passes)
            self.in_base = prompt[: self.reused + pieces * self.prefill_rows]
        if speculates:
            self.in_draft = self.text if tokens else prompt[: len(self.in_base) + 1]

    def expected(self, prompt, *, speculates) -> int:
        """Number of positions that must be reused for a prompt."""
        common = count_common(self.in_base, prompt)
        if speculates:
            common = min(common, self._expected_of_draft(prompt))
        return min(common, len(prompt) - 1)

    def _expected_of_draft(self, prompt) -> int:
        common = count_common(self.in_draft, prompt)
        is_waiting = len(self.draft_kv._keys) <= common < min(len(self.in_draft), len(prompt))
        return common if is_waiting else max(common - 1, 0)


def alone(prompt, params=GREEDY, count=12) -> list[int]:
    return list(
        generate(
            StrictBase(CAPACITY), prompt, Sampler(params=params), count, Profile(), prefill_rows=64
        )
    )


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "eagle"])
def test_a_second_turn_computes_only_new_tokens(speculates):
    chat = Chat()
    tokens = chat.ask(PROMPT, speculates=speculates)
    assert chat.reused == 0
    turn = [*PROMPT, *tokens, 7, 8]
    assert chat.ask(turn, speculates=speculates) == alone(turn)
    assert chat.reused == len(PROMPT) + len(tokens) - 1
    assert chat.base.passes[0] == (chat.reused, 3)  # the output's last token and the question
    assert chat.ask(turn, speculates=speculates) == alone(turn)
    assert chat.base.passes[0] == (chat.reused, 1) == (len(turn) - 1, 1), "asked again"


def test_cached_draft_position_fixes_its_next_token():
    """As if the next prompt lacks the stop token of an output."""
    chat = Chat()
    tokens = chat.ask(PROMPT, speculates=True)
    fork, turn = chat.draft_kv.fork(), [*PROMPT, *tokens[:-1], 21, 22]
    assert chat.ask(turn, speculates=True) == alone(turn)
    assert chat.reused == fork.num_cached(chat.text) == len(turn) - 2
    chat.ask(PROMPT, speculates=True)
    other = [*PROMPT[:6], 20, 21]
    assert chat.ask(other, speculates=True) == alone(other)
    assert chat.reused == 5
    chat.ask(PROMPT, speculates=True)
    assert chat.ask(other) == alone(other)
    assert chat.reused == 6


def test_hidden_states_that_the_draft_missed_are_computed_again():
    """After a plain request the draft's cache still holds the request before."""
    chat = Chat()
    tokens = chat.ask(PROMPT, speculates=True)
    first = [*PROMPT, *tokens, 7]
    tokens = chat.ask(first)
    assert chat.reused == len(first) - 2
    second = [*first, *tokens, 8]
    assert chat.ask(second, speculates=True) == alone(second)
    assert chat.reused == len(first) - 2  # up to the draft's last token
    assert chat.draft_session.extensions[-1] <= LIMITS.steps + 1
    assert chat.draft_kv.num_cached(chat.text) == len(chat.text) - 1


def test_a_pause_of_drafting_loses_no_hidden_states():
    """Hidden states are stored across requests, until the draft resumes."""
    chat = Chat(policy="dear")
    network = chat.learned[GREEDY].controller.pace.network
    network.pause, prompt = 500, PROMPT
    for turn in range(3):
        tokens = chat.ask(prompt, speculates=True)
        assert tokens == alone(prompt)
        assert chat.reused == (len(prompt) - 2 if turn else 0)
        assert chat.draft_kv.length == 0
        assert chat.draft_kv.num_cached(chat.text) == len(chat.text) - 1
        prompt = [*prompt, *tokens, 7]
    network.pause = 0
    assert chat.ask(prompt, speculates=True) == alone(prompt)
    assert chat.reused == len(prompt) - 2
    assert chat.draft_kv.length > chat.reused


def test_a_retrial_prefills_only_the_newest_positions():
    """The others count as cached: the base need not compute them again for the draft."""
    chat, prompt = Chat(policy="free"), [at % 20 for at in range(75)]
    chat.learned[GREEDY].controller.pace.network.is_retrial = True
    tokens = chat.ask(prompt, speculates=True, count=6)
    assert tokens == alone(prompt, count=6)
    assert chat.draft_session.extensions[0] == RETRIAL_ROWS
    assert chat.draft_kv.num_cached(chat.text) == len(chat.text) - 1
    assert RETRIAL_ROWS <= chat.draft_kv.length <= len(chat.text) - 1 - (75 - RETRIAL_ROWS)
    assert len(chat.draft_kv.pin(chat.text).values) == 0, "its first positions are not there"
    fork = chat.draft_kv.fork()
    chat.draft_kv.begin([5, 6, 7])
    assert fork.num_cached(chat.text) == len(chat.text) - 1
    fork.begin(prompt[:5])
    assert (fork.length, fork.num_cached(prompt)) == (0, 4)


def test_different_first_tokens_distinguish_prompts():
    """All next tokens are equal, but no pair of a token and its next token is."""
    chat = Chat()
    chat.ask([1, 5, 6, 7, 8], speculates=True)
    assert chat.draft_kv.num_cached([2, 5, 6, 7, 8]) == 0
    assert chat.ask([2, 5, 6, 7, 8], speculates=True) == alone([2, 5, 6, 7, 8])


TURNS = st.lists(
    st.tuples(
        st.floats(0, 1),  # how much of the previous text is continued
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        st.sampled_from([(False, GREEDY), (True, GREEDY), (True, SAMPLED)]),
        st.integers(1, 14),  # tokens
        st.sampled_from([None, None, 0, 1, 2]),  # requested rounds
        st.sampled_from([None, None, None, 0, 1, 2, 5]),  # the pass that fails
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=150)
@given(
    turns=TURNS,
    draft=st.sampled_from(["oracle", "adversary", "half_right"]),
    policy=st.sampled_from(["fixed", "free", "dear"]),
    prefill_rows=st.integers(1, 20),
    draft_capacity=st.sampled_from([5, 30, CAPACITY]),
)
def test_any_sequence_of_requests(turns, draft, policy, prefill_rows, draft_capacity):
    chat = Chat(draft, policy, prefill_rows, draft_capacity)
    for share, new, (speculates, params), count, stop_after, breaks in turns:
        prompt = [*chat.text[: min(round(share * len(chat.text)), 60)], *new]
        expected = chat.expected(prompt, speculates=speculates)
        tokens = chat.ask(
            prompt, speculates=speculates, params=params, count=count, stop_after=stop_after,
            breaks=breaks,
        )  # fmt: skip
        assert chat.reused == expected
        fresh = alone(prompt, params, count)
        assert tokens == (fresh if stop_after is None and breaks is None else fresh[: len(tokens)])
        assert chat.base.passes[:1] in ([], [(expected, min(prefill_rows, len(prompt) - expected))])


@pytest.mark.parametrize("breaks", range(4))
def test_a_failed_draft_pass_drops_only_unwritten_positions(breaks, monkeypatch):
    chat = Chat(prefill_rows=6)
    run, passes = chat.draft_session.run, []

    def broken(*arguments, **options):
        passes.append(1)
        if len(passes) > breaks:
            raise BrokenPassError
        return run(*arguments, **options)

    monkeypatch.setattr(chat.draft_session, "run", broken)
    tokens = chat.ask(PROMPT, speculates=True)
    monkeypatch.setattr(chat.draft_session, "run", run)
    written = [0, 6, 9, 9][breaks]  # two chunks of the prompt, then a tree
    assert chat.draft_kv.length == written
    turn = [*PROMPT, *tokens, 7]
    assert chat.ask(turn, speculates=True) == alone(turn)
    assert chat.reused == written


def test_prefix_cache_restores_both_caches():
    chat, kept = Chat(policy="dear"), PinnedPrefixes()
    chat.learned[GREEDY].controller.pace.network.pause = 500
    chat.ask(PROMPT, speculates=True)
    assert kept.pin(PROMPT[:7], chat.kvs)
    assert chat.draft_kv.length >= 6, "what waits is written before it is kept"
    for speculates in (False, True, True):
        chat.ask([20, 21, 22, 23, 20, 21, 22, 23], speculates=speculates)
        usable, found = kept.find([*PROMPT[:7], 11], 2)
        assert usable == 6
        found.restore(usable, chat.kvs)
        assert chat.session.kv.num_cached(PROMPT) == 6
        assert chat.draft_kv.num_cached(PROMPT) == 6
        turn = [*PROMPT[:7], 11]
        assert chat.ask(turn, speculates=speculates) == alone(turn)
        assert chat.reused == 6


def test_cached_prefix_continues_with_another_token():
    chat, kept = Chat(), PinnedPrefixes()
    chat.ask(PROMPT, speculates=True)
    kept.pin(PROMPT[:7], chat.kvs)
    turn = [*PROMPT[:6], 21, 22]
    assert [kept.find(turn, caches)[0] for caches in (1, 2)] == [6, 5]
    assert kept.find([*PROMPT[:3], 21], 1)[0] == 3
    assert kept.find([21], 1) == (0, None)
    _, found = kept.find(turn, 2)
    chat.ask([20, 21], speculates=True)
    found.restore(5, chat.kvs)
    assert (chat.session.kv.num_cached(PROMPT), chat.draft_kv.num_cached(PROMPT)) == (5, 5)
    assert chat.ask(turn, speculates=True) == alone(turn)
    assert chat.reused == 5


def test_oldest_prefixes_are_evicted():
    chat = Chat()
    kept = PinnedPrefixes(limit_bytes=2 * 4 * 16)  # two of four rows, of two int64 each
    prompts = [[first, 1, 2, 3, 4] for first in (5, 6, 7)]
    for prompt in prompts:
        chat.ask(prompt)
        assert kept.pin(prompt, chat.kvs[:1])
        kept.find(prompts[0], 1)
    assert [kept.find(prompt, 1)[0] for prompt in prompts] == [4, 0, 4]
    chat.ask([*PROMPT, 1, 2])
    assert not kept.pin([*PROMPT, 1, 2], chat.kvs[:1]), "too large: nothing is forgotten for it"
    assert [kept.find(prompt, 1)[0] for prompt in prompts] == [4, 0, 4]


def test_evicted_positions_are_not_reused():
    chat, kept = Chat(), PinnedPrefixes()
    chat.ask(PROMPT)
    chat.ask([*PROMPT[:2], 20, 21])
    kept.pin(PROMPT[:7], chat.kvs[:1])
    assert kept.find(PROMPT, 1)[0] == 2
    chat.ask(PROMPT)
    kept.pin(PROMPT[:7], chat.kvs[:1])
    assert kept.find(PROMPT, 1)[0] == 6


def test_waiting_hidden_states_are_dropped_when_a_prefix_is_loaded():
    chat = Chat(policy="dear")
    chat.learned[GREEDY].controller.pace.network.pause = 500
    chat.ask([5, 6, 7], speculates=True)
    saved = chat.draft_kv.pin([5, 6, 7])
    chat.ask([8, 6, 7], speculates=True)
    chat.draft_kv.restore(saved, 2, [5, 6, 7])
    assert not chat.draft_kv.has_waiting
    assert chat.draft_kv.num_cached([5, 6, 7, 6, 7]) == 2


def test_a_tree_without_a_path_is_no_text(monkeypatch):
    """A failure between verification and compaction leaves the earlier positions."""
    chat = Chat()

    def broken(*_):
        raise BrokenPassError

    monkeypatch.setattr(chat.base, "compact", broken)
    tokens = chat.ask(PROMPT, speculates=True)
    assert chat.base.passes[1][1] > 1
    assert chat.session.kv.num_cached([*PROMPT, *tokens]) == len(PROMPT)
    monkeypatch.undo()
    turn = [*PROMPT, *tokens, 7]
    assert chat.ask(turn, speculates=True) == alone(turn)
    assert chat.reused == len(PROMPT)


def test_accepted_path_is_recorded():
    session, text = recorded(StrictBase(16)), [1, 2, 3, 4, 5]
    session.run(np.array(text[:3]), 0, np.array([2]))
    session.run(
        np.array(text[3:]), 3, np.arange(2), position_ids=np.array([3, 4]),
        tree_mask=np.tri(2, dtype=np.bool_),
    )  # fmt: skip
    assert session.kv.num_cached(text) == 3
    session.kv.compact(3, np.arange(2))
    assert session.kv.num_cached(text) == 5


def test_the_record_follows_a_compaction():
    class Still(StrictBase):
        def compact(self, length, rows): ...

    session = recorded(Still(16))
    session.run(np.array([1, 2, 3, 4]), 0, np.array([3]))
    session.kv.compact(0, np.array([0, 2]))
    assert session.kv.num_cached([1, 3, 4]) == session.kv.num_cached([1, 3]) == 2
    session.run(np.array([5]), 2, np.array([0]))
    assert session.kv.num_cached([1, 3, 5]) == 3


def test_record_ends_at_unknown_positions():
    base = StrictBase(16)
    session = recorded(base)
    base.run(np.array([1, 2]), 0, np.array([1]))
    session.run(np.array([3]), 2, np.array([0]))
    assert session.kv.num_cached([1, 2, 3]) == session.kv.num_cached([3]) == 0
