"""Passes of a block drafter: they commit tokens of the text and predict a block after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.graph_roles import BLOCK, FUSE, PREDICT
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import BlockSpec, DecoderSpec, DraftSpec
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart, DraftResult
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.pass_timing import (
    CANDIDATES,
    Budget,
    measured_rows,
    timed_by_rows,
)
from edgellm.device_runtime.runners.runner import Runner


class BlockNetwork(DraftNetwork):
    """A loaded block drafter.

    A part of a pass commits positions with hidden states. A block of `len(output_rows)` tokens
    follows: the last token and mask tokens. Its KV is not kept.
    """

    def __init__(
        self, *, runner: Runner, fuse: Runner, spec: DecoderSpec, block: BlockSpec, capacity: int
    ) -> None:
        """`capacity`: positions of the cache; the last are for the block."""
        super().__init__(
            runner=runner, fuse=fuse, spec=spec, capacity=capacity, num_trailing=block.size
        )
        self.block = block
        longest = capacity if block.window is None else min(capacity, block.window)
        self.capacity = longest - block.size

    def run_batch(self, parts: Sequence[DraftPart]) -> list[DraftResult]:
        """Commit tokens of several sequences, and predict blocks.

        Args:
            parts: at most `max_batch_size`, with hidden states, without positions and masks.

        Raises:
            LimitError: the cache is too small, or the engine returns fewer candidates.
        """
        inputs = [
            self._block_inputs(part, hidden)
            for part, hidden in zip(parts, self._fused(parts), strict=True)
        ]
        rows = [each[graph_io.INPUT_IDS].shape[1] for each in inputs]
        caches = self._swapper.allocate(
            [(part.kv, part.write_index, count) for part, count in zip(parts, rows, strict=True)]
        )
        found = self._runner.run_batch(list(zip(caches, inputs, strict=True)))
        for part in parts:
            part.kv.length = part.write_index + len(part.token_ids)
        return [_result(outputs) for outputs in found]

    def _block_inputs(self, part: DraftPart, hidden: F32) -> dict[str, NDArray[Any]]:
        text, size = len(hidden), len(part.output_rows)
        ids = np.full(text + size, self.block.mask_token_id)
        ids[: text + 1] = part.token_ids[-1]  # the ids of the text are not used
        rows = np.zeros((text + size, hidden.shape[1]), np.float32)
        rows[:text] = hidden
        mask = None if self.block.is_causal else np.ones((len(ids), len(ids)), np.bool_)
        own = np.arange(text, text + size)
        inputs = self._inputs.of(part.kv, ids, part.write_index, own, None, mask)
        inputs[graph_io.DRAFT_HIDDEN], inputs[graph_io.TOP_K] = rows[None], np.array([part.top_k])
        return inputs


def _result(found: Outputs) -> DraftResult:
    ids, log_probs = found[graph_io.CANDIDATE_IDS][0], found[graph_io.CANDIDATE_LOG_PROBS][0]
    name = graph_io.CANDIDATE_LINKS
    none = np.zeros((len(ids), 0), np.float32)
    return DraftResult(ids, log_probs, none, found[name][0] if name in found else None)


def open_block(folder: Path, engine: Engine) -> BlockNetwork:
    """Load a draft's engine; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return network(opened, engine.draft, engine.max_kv_cache_capacity)


def network(opened: Mapping[str, Runner], spec: DraftSpec, capacity: int) -> BlockNetwork:
    """See `networks.Module`."""
    assert spec.block is not None
    return BlockNetwork(
        runner=opened[BLOCK],
        fuse=opened[FUSE],
        spec=spec.decoder,
        block=spec.block,
        capacity=capacity,
    )


def costs(
    network: BlockNetwork, spec: DraftSpec, max_rows: int = 0, budget: Budget | None = None
) -> dict[str, dict[str, float]]:
    """See `networks.Module`: by committed tokens, each followed by a whole block."""
    context, measured = measured_rows(network.capacity, max_rows)
    top_k = min(CANDIDATES, spec.max_candidates)
    taps = np.random.default_rng(1).standard_normal((max(measured), spec.taps_width), np.float32)

    def run(rows: int) -> None:
        ids = np.arange(rows) % spec.decoder.vocab_size
        block = np.arange(rows, rows + network.block.size)
        network.run_batch(
            [
                DraftPart(
                    kv=network.kv,
                    token_ids=ids,
                    write_index=context,
                    output_rows=block,
                    top_k=top_k,
                    taps=taps[:rows],
                )
            ]
        )

    found = {PREDICT: timed_by_rows(run, measured, budget)}
    network.kv.free()
    return found
