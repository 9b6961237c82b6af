"""The decoder graph: one graph serves prefill, decode and tree verification.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. Tokens are gathered before the
head, so that a long prefill computes logits of one token. A decoder with recurrent layers has a
second graph, which updates their states.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.graph_io import (
    HEAD_ROWS,
    ROWS,
)
from edgellm.core.model_spec import AudioSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.graph.decoder_io import (
    PassInputs,
    cache_shape,
    declare,
    finish,
    typed,
)
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.recurrent import Recurrences
from edgellm.export.onnx.builder import Op

_ACCEPTED = "accepted_rows"


class Decoder(NamedTuple):
    """A recorded decoder."""

    model: ir.Model
    op: Op  # with the graph's weights
    recurrences: Recurrences | None = None


def build_decoder(
    architecture: ModuleType,
    config: DecoderConfig,
    weights: Weights,
    dtype: ir.DataType,
    hidden_taps: tuple[int, ...] = (),
) -> Decoder:
    """Record the whole graph without reading weight data.

    Args:
        architecture: a module of `edgellm.export.models`.
        config: of the model, with `num_hidden_layers` exported layers.
        weights: the checkpoint's tensors.
        dtype: activation type, FLOAT or FLOAT16.
        hidden_taps: hidden states to output for a draft, see `model_spec.DraftSpec`.
    """
    op = Op(dtype)
    inputs = PassInputs.declare(config, dtype)
    state = inputs.begin(op, config)
    network = architecture.Model(config, weights)
    hidden = network.forward(op, inputs.input_ids, state)
    outputs = _logits(op, network, hidden, inputs, config) if config.is_causal else []
    if hidden_taps:
        outputs.append(_taps(op, network, hidden, state, hidden_taps, config.hidden_size))
    if config.audio is not None:
        outputs.append(_alignment_queries(op, state, config.audio, config.head_dim))
    outputs += [
        typed(state.present[graph_io.present_name(cache, part)], dtype, cache_shape(config, layer))
        for cache, layer in enumerate(config.attending_layers)
        for part in ("key", "value")
    ]
    own = [inputs.input_ids, inputs.position_ids, inputs.write_index, *inputs.images]
    own += inputs.cross.values()
    if config.is_causal:
        own[3:3] = [inputs.tree_mask, inputs.logits_index]
    found = state.recurrences
    recurrences = found if found is not None and found.layers else None
    if recurrences is not None:
        own += [recurrences.parents, *recurrences.inputs]
        outputs += recurrences.outputs
    model = finish(op, "decoder", [*own, *inputs.past.values()], outputs)
    return Decoder(model, op, recurrences)


def _logits(
    op: Op, network: Any, hidden: ir.Value, inputs: PassInputs, config: DecoderConfig
) -> list[ir.Value]:
    """Logits and most probable tokens of the rows that want them."""
    with op.scope("head"):
        rows = op.Gather(hidden, inputs.logits_index, axis=1)
        logits = op.Cast(network.head(op, rows), to=int(ir.DataType.FLOAT), name=graph_io.LOGITS)
        picks = op.ArgMax(logits, axis=-1, keepdims=0, name=graph_io.TOKEN_IDS)
    return [
        typed(logits, ir.DataType.FLOAT, [1, HEAD_ROWS, config.vocab_size]),
        typed(picks, ir.DataType.INT64, [1, HEAD_ROWS]),
    ]


def build_commit(recurrences: Recurrences) -> tuple[ir.Model, Op]:
    """The graph that updates states by accepted tokens, and its recorder, without weights."""
    op = Op(recurrences.op.dtype)
    chosen = declare(graph_io.COMMIT_ROWS, ir.DataType.INT64, [_ACCEPTED])
    inputs, outputs = [chosen], []
    for layer in recurrences.layers:
        states = {part: _copied(value) for part, value in layer.states.items()}
        rows = {part: _copied(value) for part, value in layer.rows.items()}
        inputs += [*states.values(), *rows.values()]
        with op.scope(f"layers.{layer.layer}"):
            accepted = {part: op.Gather(each, chosen, axis=1) for part, each in rows.items()}
            for part, value in layer.advance(op, states, accepted).items():
                state = states[part]
                value.name = graph_io.next_state_name(str(state.name))
                value.type, value.shape = state.type, state.shape
                outputs.append(value)
    return finish(op, "commit", inputs, outputs), op


def _copied(value: ir.Value) -> ir.Value:
    """A new input with the same name."""
    return ir.Value(name=value.name, shape=value.shape, type=value.type)


def _alignment_queries(op: Op, state: PassState, audio: AudioSpec, head_dim: int) -> ir.Value:
    """Queries of the heads that follow the words, concatenated, [1, S, N*D]."""
    found: list[ir.Value] = []
    with op.scope("alignment"):
        for layer, queries in state.audio_queries.items():
            heads = np.array([head for at, head in audio.alignment_heads if at == layer])
            if len(heads):
                own = (heads[:, None] * head_dim + np.arange(head_dim)).ravel()
                found.append(op.Gather(queries, op.constant(own), axis=2))
        joined = op.Concat(*found, axis=-1, name=graph_io.ALIGNMENT_QUERIES)
    return typed(joined, op.dtype, [1, ROWS, len(audio.alignment_heads) * head_dim])


def _taps(
    op: Op, model: Any, hidden: ir.Value, state: PassState, taps: tuple[int, ...], hidden_size: int
) -> ir.Value:
    """The tapped streams, concatenated, [1, S, T*H]; `hidden` leaves the last layer."""
    with op.scope("taps"):
        streams = [
            state.residuals[tap] if tap < len(state.residuals) else model.norm(op, hidden)
            for tap in taps
        ]
        joined = op.Concat(*streams, axis=-1, name=graph_io.HIDDEN_TAPS)
    return typed(joined, op.dtype, [1, ROWS, len(taps) * hidden_size])
