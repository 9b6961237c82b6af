"""Sequences over scripted sessions, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator

from scripted_sessions import recorded

from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.engine.step import step
from edgellm.device_runtime.speculate.acceptance import Round, accept_exactly
from edgellm.device_runtime.speculate.drafter import SpecState
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.tree_policy import CostAwareTree
from edgellm.device_runtime.speculate.text_lookup import LearnedLookup


class FixedSlot(KVCacheManager):
    """A kv_cache_manager that begins after some positions of a prompt."""

    def __init__(self, session, prefill_rows, reused=0) -> None:
        super().__init__(
            base=session if hasattr(session, "new_kv") else recorded(session),
            prefill_rows=prefill_rows,
        )
        self.num_reused = reused

    def _kvs_for(self, sequence):
        del sequence
        return self.num_reused, (self.base.kv,)


def generate(
    session, prompt, sampler, max_tokens, profile, *, prefill_rows, reused=0
) -> Iterator[int]:
    """The tokens of plain decoding."""
    sequence = Sequence(
        prompt=Prompt(list(prompt)), sampler=sampler, max_tokens=max_tokens, profile=profile
    )
    kv_cache_manager = FixedSlot(session, prefill_rows, reused)
    while not sequence.is_over:
        for (one,) in filter(None, step(kv_cache_manager, [sequence])):
            yield from one.token_ids


def speculate(
    session, drafter, prompt, sampler, max_tokens, profile, *, prefill_rows, accept=accept_exactly,
    reused=0,
) -> Iterator[Round]:  # fmt: skip
    """Run the rounds of a request."""
    sequence = Sequence(
        prompt=Prompt(list(prompt)),
        sampler=sampler,
        max_tokens=max_tokens,
        profile=profile,
        drafter=drafter,
        accept=accept,
    )
    kv_cache_manager = FixedSlot(session, prefill_rows, reused)
    while not sequence.is_over:
        for (one,) in filter(None, step(kv_cache_manager, [sequence])):
            yield one.round


def learned_of(policy, costs=None, lookups=(), *, adapts=False, controller=None) -> SpecState:
    """Nothing learned yet; `lookups` start those of a request."""
    if controller is None:
        controller = SpecGate(costs=costs or Costs.of({"1": 1.0}), adapts=adapts)
    return SpecState(
        policy=policy, controller=controller, lookups=tuple(map(LearnedLookup, lookups))
    )


def by_cost(limits, costs, calibration=None, lookups=(), *, adapts=False) -> SpecState:
    """Nothing learned yet; trees are sized by cost, drafting pauses."""
    controller = SpecGate(costs=costs, pauses=True, adapts=adapts)
    policy = CostAwareTree(
        limits=limits, costs=costs, calibration=calibration or Calibration(), controller=controller
    )
    return learned_of(policy, lookups=lookups, controller=controller)
