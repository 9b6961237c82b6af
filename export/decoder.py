"""The decoder graph: one graph serves prefill, decode and tree verification.

Inputs and outputs are those of `edgellm.contract`; opset 24. Rows are gathered before the head, so
that a long prefill computes one row of logits.
"""

from __future__ import annotations

from types import ModuleType

import onnx_ir as ir

from edgellm import contract
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.layers.attention import PassState
from edgellm.export.op import IR_VERSION, OPSET, Op
from edgellm.export.weights import Weights

ROWS, CAPACITY, HEAD_ROWS = "rows", "kv_capacity", "head_rows"


def build_decoder(
    architecture: ModuleType, config: DecoderConfig, weights: Weights, dtype: ir.DataType
) -> tuple[ir.Model, Op]:
    """Record the whole graph without touching weight data.

    Args:
        architecture: a module of `edgellm.export.models`.
        config: its facts, `num_hidden_layers` already cut if wanted.
        weights: the checkpoint's tensors.
        dtype: activation type, FLOAT or FLOAT16.

    Returns:
        The model, and the recorder that knows which weights the graph needs.
    """
    op = Op(dtype)
    integer, boolean = ir.DataType.INT64, ir.DataType.BOOL
    input_ids = _input(contract.INPUT_IDS, integer, [1, ROWS])
    position_ids = _input(contract.POSITION_IDS, integer, [1, ROWS])
    write_index = _input(contract.WRITE_INDEX, integer, [1])
    tree_mask = _input(contract.TREE_MASK, boolean, [ROWS, ROWS])
    logits_index = _input(contract.LOGITS_INDEX, integer, [HEAD_ROWS])
    cache_shape = [1, config.num_key_value_heads, CAPACITY, config.head_dim]
    past = {
        name: _input(name, dtype, cache_shape)
        for layer in range(config.num_hidden_layers)
        for name in (contract.past_name(layer, "key"), contract.past_name(layer, "value"))
    }
    state = PassState(
        op, config.head_dim, config.num_key_value_heads, position_ids, write_index, past
    )
    state.prepare(config.rope, tree_mask, config.sliding_window)
    model = architecture.Model(config, weights)
    hidden = model.forward(op, input_ids, state)
    with op.scope("head"):
        rows = op.Gather(hidden, logits_index, axis=1)
        logits = op.Cast(model.head(op, rows), to=int(ir.DataType.FLOAT), name=contract.LOGITS)
        picks = op.ArgMax(logits, axis=-1, keepdims=0, name=contract.TOKEN_IDS)
    outputs = [
        _typed(logits, ir.DataType.FLOAT, [1, HEAD_ROWS, config.vocab_size]),
        _typed(picks, integer, [1, HEAD_ROWS]),
        *(_typed(value, dtype, cache_shape) for value in state.present.values()),
    ]
    graph = ir.Graph(
        [input_ids, position_ids, write_index, tree_mask, logits_index, *past.values()],
        outputs,
        nodes=op.nodes,
        initializers=[*op.constants, *(value for value, _ in op.parameters.values())],
        opset_imports={"": OPSET},
        name="decoder",
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="edgellm"), op


def _input(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    return _typed(ir.Value(name=name), dtype, shape)


def _typed(value: ir.Value, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(shape)
    return value
