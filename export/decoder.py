"""The decoder graph: one graph serves prefill, decode and tree verification.

Inputs and outputs are those of `edgellm.contract`; opset 24. Rows are gathered before the head, so
that a long prefill computes one row of logits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm import contract
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.graph import HEAD_ROWS, ROWS, PassInputs, cache_shape, finish, typed
from edgellm.export.layers.attention import PassState
from edgellm.export.op import Op
from edgellm.export.weights import Weights


def build_decoder(
    architecture: ModuleType,
    config: DecoderConfig,
    weights: Weights,
    dtype: ir.DataType,
    hidden_taps: tuple[int, ...] = (),
) -> tuple[ir.Model, Op]:
    """Record the whole graph without touching weight data.

    Args:
        architecture: a module of `edgellm.export.models`.
        config: its facts, `num_hidden_layers` already cut if wanted.
        weights: the checkpoint's tensors.
        dtype: activation type, FLOAT or FLOAT16.
        hidden_taps: residual streams that leave the graph for a draft, see `manifest.DraftSpec`.

    Returns:
        The model, and the recorder that knows which weights the graph needs.
    """
    op = Op(dtype)
    inputs = PassInputs.declare(config, dtype)
    state = inputs.begin(op, config)
    model = architecture.Model(config, weights)
    hidden = model.forward(op, inputs.input_ids, state)
    with op.scope("head"):
        rows = op.Gather(hidden, inputs.logits_index, axis=1)
        logits = op.Cast(model.head(op, rows), to=int(ir.DataType.FLOAT), name=contract.LOGITS)
        picks = op.ArgMax(logits, axis=-1, keepdims=0, name=contract.TOKEN_IDS)
    outputs = [
        typed(logits, ir.DataType.FLOAT, [1, HEAD_ROWS, config.vocab_size]),
        typed(picks, ir.DataType.INT64, [1, HEAD_ROWS]),
    ]
    if hidden_taps:
        outputs.append(_taps(op, model, hidden, state, hidden_taps, config.hidden_size))
    outputs += [typed(value, dtype, cache_shape(config)) for value in state.present.values()]
    own = [inputs.input_ids, inputs.position_ids, inputs.write_index, inputs.tree_mask,
           inputs.logits_index, *inputs.images]  # fmt: skip
    return finish(op, "decoder", [*own, *inputs.past.values()], outputs), op


def _taps(
    op: Op, model: Any, hidden: ir.Value, state: PassState, taps: tuple[int, ...], hidden_size: int
) -> ir.Value:
    """The tapped streams side by side, [1, S, T*H]; `hidden` leaves the last layer."""
    with op.scope("taps"):
        streams = [
            state.residuals[tap] if tap < len(state.residuals) else model.norm(op, hidden)
            for tap in taps
        ]
        joined = op.Concat(*streams, axis=-1, name=contract.HIDDEN_TAPS)
    return typed(joined, op.dtype, [1, ROWS, len(taps) * hidden_size])
