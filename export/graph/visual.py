"""Graph of a visual encoder: an image (or its tiles) to the language model's embeddings.

Inputs and outputs are those of `edgellm.core.graph_io`; opset 24. A run has one image, so no mask
between images is needed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.graph.decoder_io import declare, finish, typed
from edgellm.export.graph.encoder_weights import encoder_weights
from edgellm.export.onnx.builder import Op

_PATCHES, _TOKENS, _TILES = "patches", "image_tokens", "tiles"
_WINDOWS, _SLOTS = "windows", "window_slots"


def build_visual(
    encoder: ModuleType, config: Any, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """Record the whole graph without reading weight data.

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
    op = Op(dtype)
    spec = config.spec("", 0)
    inputs = _declare_inputs(spec, dtype)
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


def _declare_inputs(spec: VisionSpec, dtype: ir.DataType) -> dict[str, ir.Value]:
    """Inputs of a graph by contract name."""
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
