"""Medusa heads: candidates for some levels from one feature."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from edgellm import contract
from edgellm.device_runtime import runners
from edgellm.device_runtime.pass_costs import CANDIDATES, fastest_ms
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.sessions import F32, I64
from edgellm.manifest import Engine
from edgellm.roles import ALL_HEADS, HEADS
from edgellm.specs import DraftSpec


class HeadsSession:
    """Loaded heads."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def candidates(self, feature: F32, top_k: int) -> tuple[I64, F32]:
        """What may follow the newest token, one head for each further token.

        Args:
            feature: float32 [H], of the newest row of the base's cache, whose logits gave the
                newest token.
            top_k: K, candidates of a head.

        Returns:
            Token ids int64 [N, K], best first, and their log-probabilities float32 [N, K]; valid
            until the next call.

        Raises:
            LimitError: the engine gives fewer candidates.
        """
        inputs = {contract.HIDDEN_TAPS: feature[None, None], contract.TOP_K: np.array([top_k])}
        found = self._runner.run(inputs)
        return found[contract.CANDIDATE_IDS][0], found[contract.CANDIDATE_LOG_PROBS][0]


def open_heads(folder: Path, engine: Engine) -> HeadsSession:
    """Load an engine of Medusa heads; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return session(opened, engine.draft, engine.max_kv_cache_capacity)


def session(opened: Mapping[str, Runner], spec: DraftSpec, capacity: int) -> HeadsSession:
    """See `sessions.Module`."""
    del spec, capacity
    return HeadsSession(opened[HEADS])


def costs(
    session: HeadsSession, spec: DraftSpec, most_rows: int = 0
) -> dict[str, dict[str, float]]:
    """See `sessions.Module`: one pass of all heads."""
    feature = np.random.default_rng(1).standard_normal(spec.taps_width, np.float32)
    top_k = min(spec.draft_vocab_size, most_rows or CANDIDATES)
    return {ALL_HEADS: {"1": fastest_ms(partial(session.candidates, feature, top_k))}}
