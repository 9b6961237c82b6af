"""Host time of a speculative round beyond a plain token: real steps with precomputed outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sized
from typing import cast

import numpy as np

from edgellm.core.graph_io import (
    HIDDEN_TAPS,
    LOGITS,
    TOKEN_IDS,
    TOP_LOGITS,
)
from edgellm.device_runtime.arrays import F32, I64
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.engine.step import step
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult, SequencePart
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart, DraftResult
from edgellm.device_runtime.runners.pass_timing import Budget
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafter import Drafter, SpecState
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.policy.tree_policy import CostAwareTree, TreeLimits

# Small trees, as where drafting hardly pays: there this time decides.
_LIMITS = TreeLimits(top_k=10, steps=2, verify_size=4)
_NO_CHANCE = 0.01  # probability of a candidate
_HIDDEN, _TAPS, _CAPACITY = 512, 3, 1 << 20
_UNTIMED, _REPEATS = 2, 15  # rounds: a prompt and a warm-up; timed ones
_CACHES_BYTES = 64 << 20  # read by a pass, to evict the host's code from all CPU caches


class _ReadyKV:
    """A fake `SequenceKV`."""

    min_length = 0

    def __init__(self) -> None:
        self.adapter = self.images = None

    def truncate(self, length: int) -> None:
        pass

    def begin(self, prompt_tokens: int, cached: int, checkpoints: Iterable[int]) -> int:
        del prompt_tokens, checkpoints
        return cached

    def end(self, length: int) -> None:
        pass

    def compact(self, length: int, rows: I64) -> None:
        pass


class _ReadyBase:
    """A fake `DecoderNetwork` that always picks the draft's first candidate; passes read memory."""

    capacity, max_batch_size, max_pass_tokens, state_bytes = _CAPACITY, 1, 0, 0

    def __init__(self, weights: F32) -> None:
        self._weights, self.spent_s = weights, 0.0
        self._taps = np.zeros((1, 16, _TAPS * _HIDDEN), np.float32)
        self._outputs = {
            TOKEN_IDS: np.zeros((1, 16), np.int64),
            TOP_LOGITS: np.zeros((1, 16), np.float32),
            LOGITS: np.zeros((1, 16, 1), np.float32),
        }

    def run_batch(self, parts: Sized[SequencePart]) -> list[PassResult]:
        start = time.perf_counter()
        self._weights.sum()
        self.spent_s += time.perf_counter() - start
        (part,) = parts
        rows = len(part.token_ids)
        return [PassResult({**self._outputs, HIDDEN_TAPS: self._taps[:, :rows]}, rows)]

    def new_kv(self) -> _ReadyKV:
        return _ReadyKV()

    def on_shortage(self, evict: object) -> None:
        pass


class _ReadyDraft:
    """A fake `DraftNetwork` with constant candidates; the first has probability `chance`."""

    capacity, max_batch_size, max_pass_tokens, max_text_tokens = _CAPACITY, 1, 0, 0

    def __init__(self, chance: float) -> None:
        self._ids = np.tile(np.arange(_LIMITS.top_k), (16, 1))
        chances = np.tile(chance * 0.5 ** np.arange(_LIMITS.top_k), (16, 1))
        self._log_probs = np.log(chances).astype(np.float32)
        self._hidden = np.zeros((16, _HIDDEN), np.float32)

    def new_kv(self) -> _ReadyKV:
        return _ReadyKV()

    def run_batch(self, parts: Sized[DraftPart]) -> list[DraftResult]:
        (part,) = parts
        rows = len(part.output_rows)
        return [DraftResult(self._ids[:rows], self._log_probs[:rows], self._hidden[:rows])]


def _drafter(chance: float) -> Drafter:
    """A drafter whose trees are always full, or, with a small chance, always the root."""
    cheap = Costs.of({"1": 1.0, "64": 7.3})  # a token pays at a probability of 0.1
    controller = SpecGate(costs=cheap)
    policy = CostAwareTree(
        limits=_LIMITS, costs=cheap, calibration=Calibration(), controller=controller
    )
    caches = DraftKVCaches(
        network=cast(DraftNetwork, _ReadyDraft(chance)), round_rows=_LIMITS.round_rows
    )
    maximum = _LIMITS.draft_rows
    return EagleDrafter(
        caches=caches,
        learned=SpecState(policy=policy, controller=controller),
        limits=_LIMITS,
        costs=cheap,
        max_tree_rows=maximum,
    )


def _steps_ms(weights: F32, drafter: Drafter | None) -> Iterator[float]:
    """Host milliseconds of each step of an endless greedy sequence."""
    base = _ReadyBase(weights)
    kv_cache_manager = KVCacheManager(base=cast(DecoderNetwork, base), prefill_rows=16)
    sampler = Sampler(params=SamplingParams(temperature=0.0))
    sequence = Sequence(
        prompt=Prompt([0, 0]), sampler=sampler, max_tokens=_CAPACITY // 2, drafter=drafter
    )
    while True:
        start, base.spent_s = time.perf_counter(), 0.0
        step(kv_cache_manager, [sequence])
        yield (time.perf_counter() - start - base.spent_s) * 1e3


def memory_bytes(num_bytes: int) -> int:
    """Memory that `round_host_ms` takes, if a pass reads `num_bytes`."""
    return max(min(num_bytes, _CACHES_BYTES), 4)


def round_host_ms(num_bytes: int, budget: Budget | None = None) -> dict[str, float]:
    """Host milliseconds of a speculative round beyond those of a plain token, without passes.

    Args:
        num_bytes: that a pass reads.
        budget: time limit; None: the default.

    Returns:
        By the tokens that the base verifies: 1, if the draft proposed nothing, or 2 and more; {} if
        the budget does not allow a single timed round.
    """
    budget = budget or Budget()
    kinds = None, _drafter(_NO_CHANCE), _drafter(0.5)
    weights = np.ones(memory_bytes(num_bytes) // 4, np.float32)  # once: small machines build, too
    steps = [_steps_ms(weights, drafter) for drafter in kinds]
    rounds: list[list[float]] = []
    took_s, left_s = 0.0, budget.left_s
    while len(rounds) < _UNTIMED + _REPEATS and took_s < left_s:
        rounds.append([next(each) for each in steps])
        before_s, left_s = left_s, budget.left_s
        took_s = before_s - left_s  # the next one takes no longer
    if len(rounds) <= _UNTIMED:
        return {}
    # The median, since cold code has no fastest run.
    plain, vain, tree = map(statistics.median, zip(*rounds[_UNTIMED:], strict=True))
    vain = max(vain - plain, 0.0)
    return {"1": round(vain, 4), "2": round(max(tree - plain, vain), 4)}
