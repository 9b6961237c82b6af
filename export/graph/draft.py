"""Graphs of a draft: `fuse` maps hidden taps to the draft's hidden states, `model` drafts.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. The graph outputs the top
candidates of each token, with the base's token ids, not logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.graph_io import (
    HEAD_ROWS,
    ROWS,
)
from edgellm.export.checkpoints.weights import StoredTensor, Weights, as_bytes
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.draft_checkpoints import kinds
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.graph.decoder_io import (
    PassInputs,
    cache_shape,
    declare,
    finish,
    typed,
)
from edgellm.export.onnx.builder import Op

TARGET_IDS = "target_ids"  # computed from d2t, which has differences
# The base's id of each logit: of all rows alike, or of each row [1, R, N]; None: they are equal.
TargetIds = NDArray[np.int64] | ir.Value | None


def build_fuse(config: DraftConfig, weights: Weights, dtype: ir.DataType) -> tuple[ir.Model, Op]:
    """The graph from HIDDEN_TAPS [1, S, T*H] to DRAFT_HIDDEN [1, S, D]."""
    op = Op(dtype)
    width = len(config.hidden_taps) * config.base_hidden_size
    taps = declare(graph_io.HIDDEN_TAPS, dtype, [1, ROWS, width])
    hidden = kinds.find(config.method).Fuse(config, weights)(op, taps)
    shape = [1, ROWS, config.decoder.hidden_size]
    return finish(op, "fuse", [taps], [typed(hidden, dtype, shape, graph_io.DRAFT_HIDDEN)]), op


def build_draft(
    config: DraftConfig, weights: Weights, target_ids: NDArray[np.int64] | None, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """Record the draft's decoder without reading weight data.

    Args:
        config: of the draft.
        weights: its tensors, including those shared with the base.
        target_ids: the base's id of each id of the draft; None if they are equal.
        dtype: activation type, FLOAT or FLOAT16.

    Returns:
        The model, and the recorder with the graph's weights.
    """
    model = kinds.find(config.method).Model(config, weights)
    return record(model, config.decoder, target_ids, dtype)


def record(
    model: kinds.Network,
    decoder: DecoderConfig,
    target_ids: NDArray[np.int64] | None,
    dtype: ir.DataType,
) -> tuple[ir.Model, Op]:
    """As `build_draft`, for any `Network`; `decoder` has its sizes."""
    op = Op(dtype)
    size = decoder.hidden_size
    inputs = PassInputs.declare(decoder, dtype, mask_columns="mask_columns")
    hidden = declare(graph_io.DRAFT_HIDDEN, dtype, [1, ROWS, size])
    top_k = declare(graph_io.TOP_K, ir.DataType.INT64, [1])
    state = inputs.begin(op, decoder)
    x = model.forward(op, inputs.input_ids, hidden, state)
    with op.scope("head"):
        rows = op.Gather(x, inputs.logits_index, axis=1)
        logits, recycled, *ids = model.head(op, rows)
        names = target_names(op, ids[0], target_ids) if ids else target_ids
        candidates = candidate_outputs(op, logits, top_k, names, HEAD_ROWS)
    outputs = [
        *candidates,
        typed(recycled, dtype, [1, HEAD_ROWS, size], graph_io.RECYCLED_HIDDEN),
        *(
            typed(state.present[graph_io.present_name(cache, part)], dtype, shape)
            for cache, shape in enumerate(cache_shape(decoder, n) for n in decoder.attending_layers)
            for part in ("key", "value")
        ),
    ]
    own = [inputs.input_ids, hidden, inputs.position_ids, inputs.write_index, inputs.tree_mask,
           inputs.logits_index, top_k, *inputs.images]  # fmt: skip
    return finish(op, "draft", [*own, *inputs.past.values()], outputs), op


def candidate_outputs(
    op: Op, logits: ir.Value, top_k: ir.Value, target_ids: TargetIds, rows: int | str
) -> list[ir.Value]:
    """Candidates as ids of the base and log-probabilities, both [1, R, K], best first."""
    log_probs, indices = likeliest(op, logits, top_k)
    ids = target_names(op, indices, target_ids)
    shape = [1, rows, graph_io.CANDIDATES]
    return [
        typed(ids, ir.DataType.INT64, shape, graph_io.CANDIDATE_IDS),
        typed(log_probs, ir.DataType.FLOAT, shape, graph_io.CANDIDATE_LOG_PROBS),
    ]


def likeliest(op: Op, logits: ir.Value, top_k: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Top log-probabilities float32 [1, R, K], best first, and their indices in the logits."""
    scores = op.LogSoftmax(op.Cast(logits, to=int(ir.DataType.FLOAT)), axis=-1)
    log_probs, indices = op.outputs(2, "TopK", scores, top_k, axis=-1, largest=1, sorted=1)
    return log_probs, indices


def target_names(op: Op, indices: ir.Value, target_ids: TargetIds) -> ir.Value:
    """Map the draft's ids to the base's, int64 of any shape."""
    if target_ids is None:
        return indices
    if isinstance(target_ids, ir.Value):
        return op.GatherElements(target_ids, indices, axis=-1)
    table = op.parameter(
        StoredTensor(
            name=TARGET_IDS,
            dtype=ir.DataType.INT64,
            shape=target_ids.shape,
            stream=_whole(target_ids),
        )
    )
    return op.Gather(table, indices, axis=0)


def _whole(array: NDArray[np.int64]) -> Callable[[], list[memoryview]]:
    return lambda: [as_bytes(array)]
