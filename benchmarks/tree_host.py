"""Host time of the tree logic in a round: grow, select, mask, accept, compact.

    python benchmarks/tree_host.py

The passes themselves are replaced by prepared arrays; what is left is the Python and numpy around
them, for the largest tree (60 nodes, top-k 10, 6 levels) and for a small one.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from edgellm.contract import LOGITS, TOKEN_IDS
from edgellm.device_runtime.runners.onnxruntime_cpu.cache import HostCache
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.sessions.decoder import PassResult
from edgellm.device_runtime.sessions.draft import DraftResult
from edgellm.device_runtime.speculate.accept import accept_exactly
from edgellm.device_runtime.speculate.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.controller import Controller
from edgellm.device_runtime.speculate.costs import Costs
from edgellm.device_runtime.speculate.draft_cache import CommittedRows
from edgellm.device_runtime.speculate.drafter import Learned
from edgellm.device_runtime.speculate.drafters.eagle import EagleDrafter
from edgellm.device_runtime.speculate.policy import CostAwareTree, FixedTree, TreeLimits
from edgellm.manifest import KVCacheSpec

VOCABULARY, HIDDEN, ROUNDS = 49152, 576, 400


class ReadyDraft:
    """Answers every pass with prepared candidates, at once."""

    capacity = 4096

    def __init__(self, top_k: int) -> None:
        random = np.random.default_rng(0)
        self._ids = random.integers(0, VOCABULARY, (64, top_k))
        logits = -np.sort(random.exponential(3.0, (64, top_k)), axis=1)
        self._log_probs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype("f4")
        self._hidden = np.zeros((64, HIDDEN), np.float32)

    def fuse(self, taps: np.ndarray) -> np.ndarray:
        return taps

    def run(self, token_ids, hidden, write_index, output_rows, **_):  # noqa: ANN001, ANN003, ANN201, ARG002
        rows = len(output_rows)
        return DraftResult(self._ids[:rows], self._log_probs[:rows], self._hidden[:rows])


def measure(limits: TreeLimits, *, fixed: bool) -> tuple[float, float]:
    """Median milliseconds of a round, and its nodes."""
    free = Costs(np.full(128, 1.0), np.full(128, 1e-6), np.full(128, 1e-6))  # all rows pay
    controller = Controller(free, pauses=not fixed)
    policy = FixedTree(limits) if fixed else CostAwareTree(limits, free, Calibration(), controller)
    rows = CommittedRows(ReadyDraft(limits.top_k), limits.steps + 1)
    drafter = EagleDrafter(rows, Learned(policy, controller), limits, free, max_tree_rows=60)
    cache = HostCache(KVCacheSpec(30, 3, 64, "float32"), 2048)
    sampler = Sampler(SamplingParams(temperature=0.0))
    random = np.random.default_rng(1)
    picks = random.integers(0, VOCABULARY, 64)
    logits = np.zeros((64, VOCABULARY), np.float32)
    times, nodes = [], []
    for _ in range(ROUNDS):
        drafter.begin([0])
        drafter.observe(np.array([1, 2]), np.zeros((2, HIDDEN), np.float32))
        drafter.catch_up()
        start = time.perf_counter()
        tree = drafter.propose(5, 1000, 100)
        tree.layout()
        picks[0] = tree.token_ids[1]  # the path has a node or two
        result = PassResult({TOKEN_IDS: picks[None], LOGITS: logits[None]}, len(picks))
        outcome = accept_exactly(tree, result, sampler)
        path = np.asarray(outcome.path)
        cache.compact(100, np.array([0, 3, 7]))
        drafter.learn(tree, outcome.path, len(path) + 1)
        times.append((time.perf_counter() - start) * 1e3)
        nodes.append(len(tree))
    return statistics.median(times), statistics.fmean(nodes)


def main() -> None:
    for name, limits in (
        ("60 nodes, top-k 10, 6 levels", TreeLimits()),
        ("16 nodes, top-k 4, 4 levels", TreeLimits(4, 4, 16)),
    ):
        for fixed in (True, False):
            ms, nodes = measure(limits, fixed=fixed)
            kind = "fixed" if fixed else "cost-aware"
            print(f"{name:30} {kind:10} {nodes:5.1f} nodes {ms:6.3f} ms a round")


if __name__ == "__main__":
    main()
