"""Rounds of a drafter over scripted sessions, and the tokens of plain decoding."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from scripted_sessions import DRAFTS, VOCAB, StrictBase, StrictDraft, StrictModel, recorded
from stepping import by_cost, generate, learned_of, speculate

from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.speculate.acceptance import Round
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import TextDrafter
from edgellm.device_runtime.speculate.drafters import ngram, suffix
from edgellm.device_runtime.speculate.drafters.draft import LatestKV, ModelDrafter
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.static_tree import StaticTree
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=0, seed=11)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SHAPES = {
    "one_node": TreeLimits(top_k=10, steps=6, verify_size=1),
    "two_nodes": TreeLimits(top_k=1, steps=1, verify_size=2),
    "chain": TreeLimits(top_k=1, steps=7, verify_size=8),
    "wide": TreeLimits(top_k=12, steps=1, verify_size=13),
    "bushy": TreeLimits(top_k=3, steps=4, verify_size=20),
    "cut": TreeLimits(top_k=8, steps=5, verify_size=4),
    "default": TreeLimits(top_k=10, steps=6, verify_size=60),
}
FREE = Costs.of({"1": 10, "64": 10.01}, {"1": 0.01, "64": 0.02}, {"1": 0.01, "64": 0.02})
LOOKUPS = {"ngram": ngram.remember, "suffix": suffix.remember}
CHOICES = ((0,), (0, 0), (1,), (2,), (0, 2), (0, 0, 0), (2, 0), (2, 0, 1), (2, 0, 1, 0))
COSTS = {
    "free": FREE,
    "fair": Costs.of({"1": 10, "8": 14, "64": 60}, {"1": 1, "64": 9}, {"1": 1, "64": 9}),
    "dear": Costs.of({"1": 10, "2": 30, "64": 900}, {"1": 8, "64": 50}, {"1": 8, "64": 50}),
}


@dataclass
class Setup:
    """Parameters of a run."""

    limits: TreeLimits = SHAPES["default"]
    policy: str = "fixed"
    lookups: tuple[str, ...] = ()
    capacity: int = 128
    draft_capacity: int = 128
    prefill_rows: int = 64
    draft: str | None = "oracle"  # None: lookups in the text draft
    is_model: bool = False  # an ordinary model drafts, not EAGLE's
    adapts: bool = False  # some rounds go without the network

    def __post_init__(self) -> None:
        self.base = StrictBase(self.capacity)
        costs = COSTS.get(self.policy, FREE)
        starts = [LOOKUPS[name]() for name in self.lookups]
        if self.policy in ("fixed", "static"):
            policy = FixedTree(self.limits) if self.policy == "fixed" else StaticTree(CHOICES)
            self.learned = learned_of(policy, costs, starts, adapts=self.adapts)
        else:
            self.learned = by_cost(self.limits, costs, lookups=starts, adapts=self.adapts)
        if self.draft is None:
            self.start = lambda: TextDrafter(self.learned, self.limits)
            return
        if self.is_model:
            self.session = StrictModel(self.draft_capacity, DRAFTS[self.draft])
            model, self.options = recorded(self.session), {"num_candidates": VOCAB}
            self.options |= {"num_readable": VOCAB, "prefill_rows": self.prefill_rows}
            self.costs, latest = costs, LatestKV(model)
            self.start = lambda: ModelDrafter(
                network=model,
                latest=latest,
                learned=self.learned,
                limits=self.limits,
                costs=self.costs,
                **self.options,
            )
            return
        self.session = StrictDraft(self.draft_capacity, DRAFTS[self.draft])
        self.rows = DraftKVCaches(network=self.session, round_rows=self.limits.steps + 1)
        self.start = lambda: EagleDrafter(
            caches=self.rows,
            learned=self.learned,
            limits=self.limits,
            costs=costs,
            max_tree_rows=self.limits.draft_rows,
        )

    def rounds(self, prompt=PROMPT, params=GREEDY, max_tokens=40) -> list[Round]:
        return list(
            speculate(
                self.base, self.start(), prompt, Sampler(params=params), max_tokens, Profile(),
                prefill_rows=self.prefill_rows,
            )
        )  # fmt: skip

    def ids(self, *arguments, **options) -> list[int]:
        return [t for found in self.rounds(*arguments, **options) for t in found.token_ids]


def plain(prompt=PROMPT, params=GREEDY, max_tokens=40) -> list[int]:
    return list(_plain(tuple(prompt), params, max_tokens))


@functools.cache  # hundreds of cases need the same few outputs
def _plain(prompt, params, max_tokens) -> tuple[int, ...]:
    base = StrictBase(128)
    tokens = generate(
        base, list(prompt), Sampler(params=params), max_tokens, Profile(), prefill_rows=64
    )
    return tuple(tokens)
