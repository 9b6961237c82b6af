"""Inputs, shapes and outputs of graphs with a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.graph_io import CAPACITY, HEAD_ROWS, IMAGE_ROWS, ROWS
from edgellm.core.model_spec import AudioSpec
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.images import ImageRows
from edgellm.export.layers.recurrent import Recurrences
from edgellm.export.onnx.builder import IR_VERSION, OPSET, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """Inputs that base and draft share."""

    input_ids: ir.Value  # int64 [1, S]
    position_ids: ir.Value  # int64 [A, S]
    write_index: ir.Value  # int64 [1]
    tree_mask: ir.Value  # bool [S, S]; of a draft [S, M]
    logits_index: ir.Value  # int64 [R]
    past: dict[str, ir.Value]  # by contract name, [1, num_kv_heads, C, head_dim]
    images: tuple[ir.Value, ...]  # the encoder's outputs
    cross: dict[str, ir.Value]  # by contract name, [1, heads, A, head_dim]
    parents: ir.Value | None  # int64 [S]; of recurrent layers

    @classmethod
    def declare(
        cls, config: DecoderConfig, dtype: ir.DataType, *, mask_columns: str = ROWS
    ) -> PassInputs:
        """Declare the inputs of a decoder with the sizes of `config`."""
        integer, boolean = ir.DataType.INT64, ir.DataType.BOOL
        return cls(
            input_ids=declare(graph_io.INPUT_IDS, integer, [1, ROWS]),
            position_ids=declare(graph_io.POSITION_IDS, integer, [config.position_axes, ROWS]),
            write_index=declare(graph_io.WRITE_INDEX, integer, [1]),
            tree_mask=declare(graph_io.TREE_MASK, boolean, [ROWS, mask_columns]),
            logits_index=declare(graph_io.LOGITS_INDEX, integer, [HEAD_ROWS]),
            past={
                name: declare(name, dtype, cache_shape(config, layer))
                for cache, layer in enumerate(config.attending_layers)
                for name in (graph_io.past_name(cache, "key"), graph_io.past_name(cache, "value"))
            },
            images=tuple(_image_inputs(config, dtype)),
            cross=_cross_inputs(config, dtype),
            parents=declare(graph_io.PARENT_ROWS, integer, [ROWS]) if config.is_recurrent else None,
        )

    def begin(self, op: Op, config: DecoderConfig) -> PassState:
        """Append nodes that all layers share: RoPE tables and masks."""
        state = PassState(
            op=op,
            heads_of=config.heads_of,
            kinds=config.kinds,
            is_causal=config.is_causal,
            position_ids=self.position_ids,
            write_index=self.write_index,
            tree_mask=self.tree_mask,
            past=self.past,
            images=self._image_rows(config),
            cross=self.cross,
            recurrences=None if self.parents is None else Recurrences(op, self.parents),
        )
        state.prepare()
        return state

    def _image_rows(self, config: DecoderConfig) -> ImageRows | None:
        if config.images is None:
            return None
        embeds, *deepstack = self.images
        count = config.images.num_deepstack
        return ImageRows(
            vocab_size=config.vocab_size,
            embeds=embeds,
            deepstack=deepstack[0] if count else None,
            num_deepstack=count,
        )


def _image_inputs(config: DecoderConfig, dtype: ir.DataType) -> Iterator[ir.Value]:
    if config.images is None:
        return
    shape = [IMAGE_ROWS, config.hidden_size]
    yield declare(graph_io.IMAGE_EMBEDS, dtype, shape)
    if count := config.images.num_deepstack:
        yield declare(graph_io.DEEPSTACK_EMBEDS, dtype, [count, *shape])


def _cross_inputs(config: DecoderConfig, dtype: ir.DataType) -> dict[str, ir.Value]:
    if config.audio is None:
        return {}
    shape = cross_shape(config, config.audio)
    return {name: declare(name, dtype, shape) for name in cross_names(config)}


def cross_names(config: DecoderConfig) -> list[str]:
    """Names of keys and values of audio, layer by layer."""
    layers = range(config.num_hidden_layers)
    return [graph_io.cross_name(layer, part) for layer in layers for part in ("key", "value")]


def cross_shape(config: DecoderConfig, audio: AudioSpec) -> list[int]:
    """Shape of a layer's keys or values of audio: [1, heads, A, head_dim]."""
    size = config.hidden_size // audio.num_heads
    return [1, audio.num_heads, audio.num_positions, size]


def cache_shape(config: DecoderConfig, layer: int = 0) -> list[int | str]:
    """Shape of a layer's keys or values: [1, num_kv_heads, C, head_dim]."""
    num_kv_heads, head_dim = config.heads_of(layer)
    return [1, num_kv_heads, CAPACITY, head_dim]


def declare(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """A new input of a graph."""
    return typed(ir.Value(name=name), dtype, shape)


def typed(
    value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str], name: str | None = None
) -> ir.Value:
    """Set type and shape of `value`, and its name if it is an output."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(shape)
    value.name = name or value.name
    return value


def finish(op: Op, name: str, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
    """The recorded nodes as a model."""
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=op.nodes,
        initializers=[*op.constants, *(value for value, _ in op.parameters.values())],
        opset_imports={"": OPSET, **{function.domain: 1 for function in op.functions.values()}},
        name=name,
    )
    return ir.Model(
        graph, ir_version=IR_VERSION, producer_name="edgellm", functions=list(op.functions.values())
    )
