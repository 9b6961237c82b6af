"""What the passes of an engine cost on this machine, measured with its own runners."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from edgellm.build.plan import Plan
from edgellm.device_runtime import sessions
from edgellm.device_runtime.engine.round_host import round_host_ms
from edgellm.device_runtime.pass_costs import CONTEXT_ROWS, fastest_ms
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.sessions.decoder import DecoderSession
from edgellm.manifest import Spec
from edgellm.roles import HOST
from edgellm.specs import DecoderSpec

Costs = dict[str, dict[str, float]]
_PREFILL_ROWS = (64, 128, 256)


def measure(opened: Mapping[str, Runner], spec: Spec, plan: Plan) -> tuple[Costs, int]:
    """Costs by kind of pass, and rows per pass at which a prompt is read fastest; {} and 0 if none.

    Args:
        opened: runners of an engine by role, its main role first; their caches are overwritten.
        spec: of the engine.
        plan: of the engine.
    """
    module = sessions.find(next(iter(opened)))
    session = module.session(opened, spec, plan.kv_capacity)
    costs = module.costs(session, spec)
    if not isinstance(spec, DecoderSpec):
        return costs, 0
    if plan.max_verify_tree_size:
        costs[HOST] = round_host_ms(spec.num_parameters // 2)  # INT4 reads the least
    return costs, _best_prefill_rows(session, spec.vocab_size, plan)


def _best_prefill_rows(session: DecoderSession, vocab_size: int, plan: Plan) -> int:
    """Rows per pass at which a long prompt is fastest.

    Large passes make better use of the GEMM kernels; small ones save attention, which computes
    the whole square of a pass, also what the causal mask then hides.
    """
    prompt = np.arange(min(CONTEXT_ROWS, plan.max_input_len)) % vocab_size
    smaller = [rows for rows in _PREFILL_ROWS if rows < len(prompt)]
    most = session.pass_rows or len(prompt)

    def prefill(rows: int) -> None:
        for begin in range(0, len(prompt), rows):
            session.run(prompt[begin : begin + rows], begin, np.array([0]))

    measured = [rows for rows in (*smaller, len(prompt)) if rows <= most]
    costs = {rows: fastest_ms(partial(prefill, rows), 3) for rows in measured}
    best = min(costs, key=costs.__getitem__)
    return plan.max_input_len if best == len(prompt) else best
