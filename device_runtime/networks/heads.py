"""Medusa heads: candidates for several levels from one hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgellm.core import graph_io
from edgellm.core.graph_roles import ALL_HEADS, HEADS
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import DraftSpec
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import (
    F32,
    I64,
)
from edgellm.device_runtime.runners.pass_timing import CANDIDATES, Budget, timed_by_rows
from edgellm.device_runtime.runners.runner import Runner


class HeadsPart(NamedTuple):
    """Input of one sequence for the heads; see `HeadsNetwork.candidates`."""

    feature: F32
    top_k: int


class HeadsNetwork:
    """Loaded heads."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.max_batch_size = runner.max_batch_size

    def run_batch(self, parts: Sequence[HeadsPart]) -> list[tuple[I64, F32]]:
        """`candidates` for several sequences in one pass, at most `max_batch_size`.

        All get as many candidates as the largest `top_k`.
        """
        # Device tensors stay there; only batches of several need copies on the host.
        one = parts[0].feature[None, None]
        features = one if len(parts) == 1 else np.stack([each.feature[None] for each in parts])
        maximum = max(part.top_k for part in parts)
        inputs = {graph_io.HIDDEN_TAPS: features, graph_io.TOP_K: np.array([maximum])}
        found = self._runner.run(inputs)
        ids, log_probs = found[graph_io.CANDIDATE_IDS], found[graph_io.CANDIDATE_LOG_PROBS]
        return list(zip(ids, log_probs, strict=True))

    def candidates(self, feature: F32, top_k: int) -> tuple[I64, F32]:
        """Candidates for the tokens after the newest, one head for each.

        Args:
            feature: float32 [H], hidden state of the newest position in the base's cache, whose
                logits gave the newest token.
            top_k: K, candidates of a head.

        Returns:
            Token ids int64 [N, K], best first, and their log-probabilities float32 [N, K]; valid
            until the next call.

        Raises:
            LimitError: the engine returns fewer candidates.
        """
        (found,) = self.run_batch([HeadsPart(feature, top_k)])
        return found


def open_heads(folder: Path, engine: Engine) -> HeadsNetwork:
    """Load an engine of Medusa heads; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return network(opened, engine.draft, engine.max_kv_cache_capacity)


def network(opened: Mapping[str, Runner], spec: DraftSpec, capacity: int) -> HeadsNetwork:
    """See `networks.Module`."""
    del spec, capacity
    return HeadsNetwork(opened[HEADS])


def costs(
    network: HeadsNetwork, spec: DraftSpec, max_rows: int = 0, budget: Budget | None = None
) -> dict[str, dict[str, float]]:
    """See `networks.Module`: passes of all heads, for one sequence and for full batches."""
    feature = np.random.default_rng(1).standard_normal(spec.taps_width, np.float32)
    part = HeadsPart(feature, min(spec.draft_vocab_size, max_rows or CANDIDATES))
    counts = sorted({1, network.max_batch_size})
    return {
        ALL_HEADS: timed_by_rows(lambda count: network.run_batch([part] * count), counts, budget)
    }
