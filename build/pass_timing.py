"""What the passes of an engine cost on this machine, measured with its own runners."""

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
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.runners.pass_timing import CONTEXT_ROWS, Budget, fastest_each_ms

Costs = dict[str, dict[str, float]]
_PREFILL_ROWS = (64, 128, 256)
_PASSES, _HOST = 0.7, 0.4  # shares of what is left of the budget: of passes, of the host's part


def measure(opened: Mapping[str, Runner], spec: Spec, plan: Plan) -> tuple[Costs, int]:
    """Costs by kind of pass, and rows per pass at which a prompt is read fastest; {} and 0 if none.

    All of it takes `BUDGET_S` seconds at most, or a single pass of one token where that is longer.

    Args:
        opened: runners of an engine by role, its main role first; their caches are overwritten.
        spec: of the engine.
        plan: of the engine.
    """
    budget = Budget()
    module = networks.find(next(iter(opened)))
    session = module.session(opened, spec, plan.kv_capacity)
    costs = module.costs(session, spec, budget=budget.part(_PASSES))
    if not isinstance(spec, DecoderSpec):
        return costs, 0
    if plan.max_verify_tree_size:
        # INT4 reads the least
        host = round_host_ms(spec.num_parameters // 2, budget.part(_HOST))
        costs |= {HOST: host} if host else {}
    return costs, _best_prefill_rows(session, spec, plan, costs[PASS], budget)


def _best_prefill_rows(
    session: DecoderNetwork,
    spec: DecoderSpec,
    plan: Plan,
    costs: Mapping[str, float],
    budget: Budget,
) -> int:
    """Rows per pass at which a long prompt is fastest, of those that the budget allows to measure.

    Large passes make better use of the GEMM kernels; small ones save attention, which computes
    the whole square of a pass, also what the causal mask then hides. One pass is measured of each
    size, in the middle of a prompt; at its beginning where the engine can go back to no other
    place: it keeps windows or states.
    """
    longest = min(CONTEXT_ROWS, plan.max_input_len)
    maximum = min(session.pass_rows or longest, longest)
    sizes = [rows for rows in (*_PREFILL_ROWS, longest) if rows < maximum] + [maximum]
    ids = np.arange(maximum) % spec.vocab_size
    restarts = spec.recurrent is not None or session.pass_rows > 0

    def prefill(rows: int) -> None:
        begin = 0 if restarts else (longest - rows) // 2
        session.run(ids[:rows], begin, np.array([0]))

    largest = max(costs, key=int)
    expected_ms = costs[largest] / int(largest) * sizes[0]
    found = {str(sizes[0]): 0.0}
    if expected_ms <= 1e3 * budget.left_s:
        found = fastest_each_ms({str(rows): partial(prefill, rows) for rows in sizes}, budget)
    best = int(min(found, key=lambda rows: found[rows] / int(rows)))
    return plan.max_input_len if best == longest else best
