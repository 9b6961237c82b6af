"""Concurrent sequences of one engine: outputs equal single ones, in any order of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_blocks import StrictBlocks
from scripted_heads import StrictHeads
from scripted_sessions import (
    DRAFTS,
    VOCAB,
    DraftText,
    StrictBase,
    StrictDraft,
    StrictModel,
    recorded,
)
from stepping import by_cost, learned_of

from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.engine.step import step
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import TextDrafter
from edgellm.device_runtime.speculate.drafters import ngram, suffix
from edgellm.device_runtime.speculate.drafters.block import BlockDrafter
from edgellm.device_runtime.speculate.drafters.draft import LatestKV, ModelDrafter
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.drafters.medusa import MedusaDrafter
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits

GREEDY, SAMPLED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=0, seed=3),
)
CAPACITY, LIMITS = 96, TreeLimits(top_k=3, steps=4, verify_size=12)
FAIR = Costs.of({"1": 10, "8": 14, "64": 60}, {"1": 1, "64": 9}, {"1": 1, "64": 9})
SCRIPTED = ["plain", "text", "eagle", "draft", "medusa", "block"]


@dataclass
class Rig:
    """An engine with recorded passes, and its drafters."""

    drafts: str
    by_cost: bool = False
    lookups: bool = False
    reuses_context: bool = False
    caches: tuple = ()
    started: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base, draft = StrictBase(CAPACITY), DRAFTS["half_right"]
        starts = [ngram.remember(), suffix.remember()]
        starts = starts if self.lookups or self.drafts == "text" else []
        if self.by_cost:
            learned = by_cost(LIMITS, FAIR, lookups=starts, adapts=self.drafts != "text")
        else:
            learned = learned_of(FixedTree(LIMITS), FAIR, starts)
        if self.drafts == "eagle":
            caches = DraftKVCaches(
                network=StrictDraft(CAPACITY, draft), round_rows=LIMITS.steps + 1
            )
            self.caches = (caches,)
        if self.drafts == "block":
            blocks = StrictBlocks(CAPACITY, draft, LIMITS.steps + 1, links=8)
            caches = DraftKVCaches(network=blocks, round_rows=LIMITS.round_rows)
            self.caches = (caches,)
        model = recorded(StrictModel(CAPACITY, draft))
        latest = LatestKV(model)
        heads = StrictHeads(self.base, draft, LIMITS.steps, is_shared=True)
        self.start = {
            "plain": lambda: None,
            "text": lambda: TextDrafter(learned, LIMITS),
            "eagle": lambda: EagleDrafter(
                caches=caches, learned=learned, limits=LIMITS, costs=FAIR, max_tree_rows=12
            ),
            "draft": lambda: ModelDrafter(
                network=model,
                latest=latest,
                learned=learned,
                limits=LIMITS,
                costs=FAIR,
                num_candidates=VOCAB,
                num_readable=VOCAB,
                prefill_rows=64,
            ),
            "medusa": lambda: MedusaDrafter(
                network=heads, learned=learned, limits=LIMITS, costs=FAIR
            ),
            "block": lambda: BlockDrafter(
                caches=caches,
                block=blocks.block,
                learned=learned,
                limits=LIMITS,
                costs=FAIR,
                num_candidates=8,
            ),
        }[self.drafts]
        self.kv_cache_manager = KVCacheManager(
            base=recorded(self.base),
            prefill_rows=4,
            drafts=self.caches,
            reuses_context=self.reuses_context,
        )

    def begin(self, prompt: list[int], sampling: SamplingParams, count: int) -> Sequence:
        sampler = Sampler(params=sampling, prompt=prompt)
        return Sequence(
            prompt=Prompt(prompt), sampler=sampler, max_tokens=count, drafter=self.start()
        )

    def finish(self, sequence: Sequence) -> Sequence:
        while not sequence.is_over:
            step(self.kv_cache_manager, [sequence])
        return sequence


def alone(prompt, sampling, count, drafts="plain") -> Sequence:
    rig = Rig(drafts)
    return rig.finish(rig.begin(prompt, sampling, count))


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 8),  # tokens that all prompts begin with
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        st.sampled_from([GREEDY, SAMPLED]),
        st.integers(1, 16),
    ),
    min_size=2,
    max_size=4,
)


@pytest.mark.each_change("plain", "eagle", "text")
@pytest.mark.parametrize("drafts", SCRIPTED)
@settings(max_examples=40)
@given(
    asked=REQUESTS, order=st.randoms(use_true_random=False), reuses=st.booleans(),
    is_by_cost=st.booleans(), lookups=st.booleans(), drops=st.booleans(),
)  # fmt: skip
def test_outputs_do_not_depend_on_the_order_of_steps(
    drafts, asked, order, reuses, is_by_cost, lookups, drops
):
    rig = Rig(drafts, is_by_cost, lookups, reuses)
    requests = [([3, 1, 4, 1, 5, 9, 2, 6][:shared] + own, *rest) for shared, own, *rest in asked]
    sequences = [rig.begin(*request) for request in requests]
    if drops:
        sequences[-1].max_tokens += 4  # which it does not reach
    active = list(sequences)
    while active:
        some = order.sample(active, order.randint(1, len(active)))
        step(rig.kv_cache_manager, some)
        if drops and sequences[-1].token_ids and not sequences[-1].is_over:
            sequences[-1].close()
        active = [one for one in active if not one.is_over]
    for sequence, request in zip(sequences[: len(sequences) - drops], requests, strict=False):
        assert sequence.token_ids == alone(*request).token_ids
        if not (is_by_cost or lookups or drafts in ("plain", "text")):  # nothing was learned
            assert sequence.profile.rounds == alone(*request, drafts).profile.rounds


def test_a_single_sequence_is_never_swapped_out(monkeypatch):
    rig = Rig("eagle")
    for session in (StrictBase, DraftText):
        monkeypatch.delattr(session, "read")
        monkeypatch.delattr(session, "write")
    expected = alone([3, 1, 4], GREEDY, 12).token_ids
    for _ in range(2):
        assert rig.finish(rig.begin([3, 1, 4], GREEDY, 12)).token_ids == expected


# ------------------------------------------------------------------------------ tiny engines
PROMPTS = ["w20 w21 w22 w23 w24 w25", "w20 w21 w22 w40", "w50 w51"]
WAYS = {
    "plain": None,
    "eagle": SpecOptions(tree="fixed"),
    "eagle_by_cost": SpecOptions(lookups=("ngram", "suffix")),
    "text": SpecOptions(network=None, lookups=("ngram", "suffix"), tree="fixed"),
    "draft": "draft",
    "medusa": SpecOptions(tree="fixed"),
    "auto": SpecOptions(network="auto"),
}


@pytest.mark.each_change("*-reuse", "plain-")
@pytest.mark.parametrize("reuses", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("way", WAYS)
def test_interleaved_outputs_equal_single_ones(eagle_pairs, way, reuses):
    """Two or three outputs, iterated over alternately by `next`."""
    engine = eagle_pairs("medusa" if way == "medusa" else "eagle3").engine
    spec = WAYS[way]
    if spec == "draft":
        spec = SpecOptions(
            network="draft",
            draft_engine_dir=eagle_pairs("medusa").engine,
            tree="fixed",
            top_k=2,
            steps=3,
        )
    llm = LLM(engine, spec=spec, context_reuse=reuses)
    kinds = [
        GREEDY,
        SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=7),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=5),
    ]
    asks = [
        {"prompt": prompt, "sampling": kinds[at], "max_generate_length": 24, "stop": ["w77"]}
        for at, prompt in enumerate(PROMPTS)
    ]
    expected = []
    for ask in asks:
        answer = llm.generate(**ask, speculative=False)
        list(answer)
        expected.append((answer.token_ids, answer.text, answer.finish_reason))
    for seed, count in ((0, 2), (1, 3), (2, 3)):
        order = random.Random(seed)
        answers = [
            llm.generate(**ask, speculative=seed < 2 or at > 0)
            for at, ask in enumerate(asks[:count])
        ]
        active = [iter(answer) for answer in answers]
        while active:
            steps = order.choice(active)
            if next(steps, None) is None:
                active.remove(steps)
        found = [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers]
        assert found == expected[:count]
