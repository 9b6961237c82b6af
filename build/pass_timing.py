"""Timing of an engine's passes on this machine, with its own runners."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from edgellm.build.plan import Plan
from edgellm.core.graph_roles import HOST, PASS
from edgellm.core.manifest import Spec
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime import networks
from edgellm.device_runtime.engine.spec_overhead import round_host_ms
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.pass_timing import CONTEXT_ROWS, Budget, fastest_each_ms
from edgellm.device_runtime.runners.runner import Runner

Costs = dict[str, dict[str, float]]
_PREFILL_ROWS = (64, 128, 256)
_PASSES, _HOST = 0.7, 0.4  # shares of the remaining budget: passes, the host's part


def measure(opened: Mapping[str, Runner], spec: Spec, plan: Plan) -> tuple[Costs, int]:
    """Milliseconds by kind of pass, and the fastest chunk size of prefill; {} and 0 if none.

    This takes `BUDGET_S` seconds at most, or one pass of one token if that is longer.

    Args:
        opened: runners of an engine by role, its main role first; their caches are overwritten.
        spec: of the engine.
        plan: of the engine.
    """
    budget = Budget()
    module = networks.find(next(iter(opened)))
    network = module.network(opened, spec, plan.kv_capacity)
    costs = module.costs(network, spec, budget=budget.part(_PASSES))
    if not isinstance(spec, DecoderSpec):
        return costs, 0
    if plan.max_verify_tree_size:
        # INT4 reads the least
        host = round_host_ms(spec.num_parameters // 2, budget.part(_HOST))
        costs |= {HOST: host} if host else {}
    return costs, _best_prefill_rows(network, spec, plan, costs[PASS], budget)


def _best_prefill_rows(
    network: DecoderNetwork,
    spec: DecoderSpec,
    plan: Plan,
    costs: Mapping[str, float],
    budget: Budget,
) -> int:
    """Chunk size at which a long prompt is fastest, among those that fit the time budget.

    Large chunks use GEMM kernels better. Small chunks save attention, which computes the whole
    square of a pass, masked scores included. One pass of each size is timed, in the middle of a
    prompt; at its start if the cache cannot be truncated there (windows, recurrent states).
    """
    longest = min(CONTEXT_ROWS, plan.max_input_len)
    maximum = min(network.max_pass_tokens or longest, longest)
    sizes = [rows for rows in (*_PREFILL_ROWS, longest) if rows < maximum] + [maximum]
    ids = np.arange(maximum) % spec.vocab_size
    restarts = spec.recurrent is not None or network.max_pass_tokens > 0

    def prefill(rows: int) -> None:
        begin = 0 if restarts else (longest - rows) // 2
        network.run(ids[:rows], begin, np.array([0]))

    largest = max(costs, key=int)
    expected_ms = costs[largest] / int(largest) * sizes[0]
    found = {str(sizes[0]): 0.0}
    if expected_ms <= 1e3 * budget.left_s:
        found = fastest_each_ms({str(rows): partial(prefill, rows) for rows in sizes}, budget)
    best = int(min(found, key=lambda rows: found[rows] / int(rows)))
    return plan.max_input_len if best == longest else best
