"""Passes of a draft network with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime import runners
from edgellm.device_runtime.pass_costs import CANDIDATES, fastest_ms, measured_rows
from edgellm.device_runtime.runners import Runner, require_cache
from edgellm.device_runtime.sessions import F32, I64, Bool, ImageRows
from edgellm.device_runtime.sessions.pass_inputs import PassInputs
from edgellm.manifest import DecoderSpec, DraftSpec, Engine
from edgellm.roles import DRAFT, EXTEND, FUSE, STEP


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Outputs of one draft pass; arrays are valid until the session runs again."""

    token_ids: I64  # [R, K], of the base's vocabulary, best first
    log_probs: F32  # [R, K]
    hidden: F32  # [R, D], the `hidden` of these rows' children


class DraftSession:
    """A loaded draft."""

    def __init__(
        self, runner: Runner, fuse: Runner | None, spec: DecoderSpec, capacity: int
    ) -> None:
        """Without `fuse` the features are the hidden rows."""
        self.capacity = capacity
        self._runner, self._fuse, self._cache = runner, fuse, require_cache(runner)
        self._inputs = PassInputs(runner, spec, capacity)

    def fuse(self, taps: F32) -> F32:
        """Features of the base [S, T*H] as the draft's hidden rows [S, D]."""
        if self._fuse is None:
            return taps
        return self._fuse.run({contract.HIDDEN_TAPS: taps[None]})[contract.DRAFT_HIDDEN][0]

    def run(
        self,
        token_ids: I64,
        hidden: F32,
        write_index: int,
        output_rows: I64,
        *,
        top_k: int,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> DraftResult:
        """Compute S new rows, each from a token and the hidden row before it.

        Args:
            token_ids: int64 [S].
            hidden: float32 [S, D], fused features or recycled rows.
            write_index: where the rows go; the rows before are seen unless the mask rules them.
            output_rows: int64 [R], the rows that get candidates.
            top_k: candidates a row.
            position_ids: int64 [S]; None counts on from `write_index`.
            tree_mask: bool [S, M], M >= S, rules the last M rows, the new ones included; None is
                causal.

        Raises:
            LimitError: the rows do not fit into the cache, or the engine gives fewer candidates.
        """
        inputs = self._inputs.of(token_ids, write_index, output_rows, position_ids, tree_mask)
        inputs[contract.DRAFT_HIDDEN], inputs[contract.TOP_K] = hidden[None], np.array([top_k])
        found = self._runner.run(inputs)
        names = contract.CANDIDATE_IDS, contract.CANDIDATE_LOG_PROBS, contract.RECYCLED_HIDDEN
        return DraftResult(*(found[name][0] for name in names))

    def set_images(self, images: ImageRows) -> None:
        """See `DecoderSession.set_images`."""
        self._inputs.set_images(images)

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        return self._cache.read_rows(length)

    def write_rows(self, rows: NDArray[Any]) -> None:
        """See `runners.Cache`."""
        self._cache.write_rows(rows)


def open_draft(folder: Path, engine: Engine) -> DraftSession:
    """Load a draft's engine; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return session(opened, engine.draft, engine.max_kv_cache_capacity)


def session(opened: Mapping[str, Runner], spec: DraftSpec, capacity: int) -> DraftSession:
    """See `sessions.Module`."""
    return DraftSession(opened[DRAFT], opened.get(FUSE), spec.decoder, capacity)


def costs(
    session: DraftSession, spec: DraftSpec, most_rows: int = 0
) -> dict[str, dict[str, float]]:
    """See `sessions.Module`: growth, whose rows all get candidates, and rows that are fused."""
    context, measured = measured_rows(session.capacity, most_rows)
    top_k, random = (
        min(CANDIDATES, spec.draft_vocab_size, most_rows or CANDIDATES),
        np.random.default_rng(1),
    )
    steps, extensions = {}, {}
    for rows in measured:
        taps = random.standard_normal((rows, spec.taps_width), np.float32)
        hidden = np.zeros((rows, spec.decoder.hidden_size), np.float32)
        ids, last = np.arange(rows) % spec.decoder.vocab_size, np.array([rows - 1])
        grow = partial(session.run, ids, hidden, context, np.arange(rows), top_k=top_k)
        steps[str(rows)] = fastest_ms(grow)

        def extend(ids: I64 = ids, taps: F32 = taps, last: I64 = last) -> None:
            session.run(ids, session.fuse(taps), context, last, top_k=top_k)

        extensions[str(rows)] = fastest_ms(extend)
    return {STEP: steps, EXTEND: extensions}
