"""Graph of a speech model's encoder: a window of audio to keys and values for its decoder.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. The decoder's layers attend to
the same audio for each token, so their keys and values of it are computed here, once a window.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
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
    shape, outputs = cross_shape(config, audio), []
    for name, found in zip(cross_names(config), encoder.forward(op, features), strict=True):
        outputs.append(typed(found, dtype, shape, name))
    return finish(op, "audio_encoder", [features], outputs), op
