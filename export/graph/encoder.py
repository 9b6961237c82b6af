"""Graphs of a chat model's encoders: an image (or its tiles), or an audio clip, to embeddings.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. A run has one image or clip, so
no mask between them is needed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.model_spec import AudioEncoderSpec, VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.graph.decoder_io import declare, finish, typed
from edgellm.export.graph.encoder_weights import encoder_weights
from edgellm.export.onnx.builder import Op
from edgellm.multimodal import audio_features

_PATCHES, _TOKENS, _TILES = "patches", "image_tokens", "tiles"
_WINDOWS, _SLOTS = "windows", "window_slots"
_ROWS = "embed_rows"  # of a clip


def build_visual(
    encoder: ModuleType, config: Any, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """Record the whole graph of a visual encoder without reading weight data.

    Args:
        encoder: a module of `edgellm.export.visual`.
        config: the `Config` of that module.
        weights: the checkpoint's tensors.
        dtype: activation type, FLOAT or FLOAT16.

    Returns:
        The model, and the recorder with the graph's weights.

    Raises:
        BrokenArtifactError: the checkpoint has no encoder, or one with wrong shapes.
    """
    op, spec = Op(dtype), config.spec("", 0)
    inputs = _image_inputs(spec, dtype)
    model = encoder.Model(config, encoder_weights(weights, encoder.Model.parts))
    tokens, *levels = model.forward(op, inputs)
    shape = [_TOKENS, spec.hidden_size]
    outputs = [typed(tokens, dtype, shape, graph_io.IMAGE_EMBEDS)]
    if levels:
        with op.scope("deepstack"):
            apart = [op.Unsqueeze(level, op.constant([0])) for level in levels]
            joined = op.Concat(*apart, axis=0, name=graph_io.DEEPSTACK_EMBEDS)
        outputs.append(typed(joined, dtype, [len(levels), *shape]))
    return finish(op, "visual_encoder", list(inputs.values()), outputs), op


def build_audio(
    encoder: ModuleType, config: Any, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """As `build_visual`, of an audio encoder: a module of `edgellm.export.audio`."""
    op, spec = Op(dtype), config.spec(encoder.TINY["model_type"], 0)
    inputs = _clip_inputs(spec, dtype)
    model = encoder.Model(config, encoder_weights(weights, encoder.Model.parts))
    shape = [_ROWS, spec.hidden_size]
    rows = typed(model.forward(op, inputs), dtype, shape, graph_io.AUDIO_EMBEDS)
    return finish(op, "audio_encoder", list(inputs.values()), [rows]), op


def _clip_inputs(spec: AudioEncoderSpec, dtype: ir.DataType) -> dict[str, ir.Value]:
    """Inputs of an audio encoder by contract name."""
    integer = ir.DataType.INT64
    kinds = {
        graph_io.AUDIO_MASK: ir.DataType.BOOL,
        graph_io.AUDIO_ROWS: integer,
        graph_io.AUDIO_SLOTS: integer,
    }
    shapes = audio_features.shapes(spec)
    return {name: declare(name, kinds.get(name, dtype), shape) for name, shape in shapes.items()}


def _image_inputs(spec: VisionSpec, dtype: ir.DataType) -> dict[str, ir.Value]:
    """Inputs of a visual encoder by contract name."""
    if spec.image_size:
        shape = [_TILES, 3, spec.image_size, spec.image_size]
        return {graph_io.PIXEL_VALUES: declare(graph_io.PIXEL_VALUES, dtype, shape)}
    integer = ir.DataType.INT64
    kinds: dict[str, tuple[ir.DataType, list[int | str]]] = {
        graph_io.PIXEL_VALUES: (dtype, [_PATCHES, spec.patch_values]),
        graph_io.PATCH_POSITIONS: (integer, [_PATCHES, 2]),
    }
    if spec.window_size:
        kinds[graph_io.WINDOW_SLOTS] = integer, [_SLOTS]
        kinds[graph_io.WINDOW_MASK] = ir.DataType.BOOL, [_WINDOWS, spec.window_size**2]
        kinds[graph_io.WINDOW_ROWS] = integer, [_PATCHES]
    if spec.antialiases_positions:
        del kinds[graph_io.PATCH_POSITIONS]
        kinds[graph_io.POS_EMBED_SHARES] = ir.DataType.FLOAT, [_PATCHES, spec.position_grid**2]
    elif spec.has_nearest_positions:
        del kinds[graph_io.PATCH_POSITIONS]
        kinds[graph_io.POS_EMBED_INDEX] = integer, [1, _PATCHES]
    elif spec.position_grid:
        kinds[graph_io.POS_EMBED_INDEX] = integer, [4, _PATCHES]
        kinds[graph_io.POS_EMBED_WEIGHT] = ir.DataType.FLOAT, [4, _PATCHES]
    return {name: declare(name, kind, shape) for name, (kind, shape) in kinds.items()}
