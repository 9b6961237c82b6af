"""Graphs of a speech model's audio: a window to hidden states, and these to keys and values.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. The decoder's layers attend to
the same audio for each token, so their keys and values of it are computed once a window. They have
a graph of their own, since decoders may share an encoder: that of Distil-Whisper is its teacher's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.graph_roles import AUDIO_ENCODER, CROSS_KV
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.graph.decoder_io import cross_names, cross_shape, declare, finish, typed
from edgellm.export.onnx.builder import Op


def build_audio_encoder(
    architecture: ModuleType, config: DecoderConfig, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """Record the whole graph without reading weight data.

    Args:
        architecture: a module of `edgellm.export.speech`.
        config: the `Config` of that module, with its audio.
        weights: the checkpoint's tensors.
        dtype: activation type, FLOAT or FLOAT16.

    Returns:
        The model, and the recorder with the graph's weights.
    """
    assert config.audio is not None
    op, audio = Op(dtype), config.audio
    shape = [1, audio.num_mel_bins, audio.num_frames]
    features = declare(graph_io.INPUT_FEATURES, dtype, shape)
    encoder: Any = architecture.Encoder(config, weights)
    shape = [1, audio.num_positions, config.hidden_size]
    found = typed(encoder.forward(op, features), dtype, shape, graph_io.ENCODER_HIDDEN)
    return finish(op, AUDIO_ENCODER, [features], [found]), op


def build_cross_kv(
    architecture: ModuleType, config: DecoderConfig, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """As `build_audio_encoder`, from its output to the keys and values of the decoder's layers."""
    assert config.audio is not None
    op, audio = Op(dtype), config.audio
    shape = [1, audio.num_positions, config.hidden_size]
    hidden = declare(graph_io.ENCODER_HIDDEN, dtype, shape)
    network: Any = architecture.CrossKV(config, weights)
    shape, outputs = cross_shape(config, audio), []
    for name, found in zip(cross_names(config), network.forward(op, hidden), strict=True):
        outputs.append(typed(found, dtype, shape, name))
    return finish(op, CROSS_KV, [hidden], outputs), op
