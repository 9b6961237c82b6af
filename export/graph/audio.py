"""Graph of a chat model's audio encoder: features of a clip to the language model's embeddings.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. A run has one clip.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.graph.decoder_io import declare, finish, typed
from edgellm.export.graph.encoder_weights import encoder_weights
from edgellm.export.onnx.builder import Op
from edgellm.multimodal import audio_features

_ROWS = "embed_rows"


def build_audio(
    encoder: ModuleType, config: Any, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """Record the whole graph without reading weight data.

    Args:
        encoder: a module of `edgellm.export.audio`.
        config: the `Config` of that module.
        weights: the checkpoint's tensors.
        dtype: activation type, FLOAT or FLOAT16.

    Returns:
        The model, and the recorder with the graph's weights.

    Raises:
        BrokenArtifactError: the checkpoint has no encoder, or one with wrong shapes.
    """
    op, spec = Op(dtype), config.spec(encoder.TINY["model_type"], 0)
    integer = ir.DataType.INT64
    kinds = {
        graph_io.AUDIO_MASK: ir.DataType.BOOL,
        graph_io.AUDIO_ROWS: integer,
        graph_io.AUDIO_SLOTS: integer,
    }
    inputs = {
        name: declare(name, kinds.get(name, dtype), shape)
        for name, shape in audio_features.shapes(spec).items()
    }
    model = encoder.Model(config, encoder_weights(weights, encoder.Model.parts))
    shape = [_ROWS, spec.hidden_size]
    rows = typed(model.forward(op, inputs), dtype, shape, graph_io.AUDIO_EMBEDS)
    return finish(op, "audio_encoder", list(inputs.values()), [rows]), op
