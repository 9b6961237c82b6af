"""Medusa (arXiv 2401.10774): heads over the base's own feature, the d-th d tokens further ahead.

A head is residual blocks, `x + swish(linear(x))`, and a linear layer over the vocabulary.
H hidden size of the base, V vocabulary, N heads.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.layers.linear import Linear
from edgellm.export.medusa_config import MedusaConfig
from edgellm.export.op import Op
from edgellm.export.weights import Weights


class Head:
    """One head."""

    def __init__(self, config: MedusaConfig, weights: Weights) -> None:
        size, blocks = config.hidden_size, range(config.num_blocks)
        self.blocks = [
            Linear(weights / f"{block}.linear", size, size, bias=True) for block in blocks
        ]
        output = weights / str(config.num_blocks)
        self.output = Linear(output, size, config.vocab_size, bias=False)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, 1, H] -> logits [1, 1, V]."""
        for linear in self.blocks:
            x = op.Add(x, op.Swish(linear(op, x)))
        return self.output(op, x)


class Model:
    """All heads, which read the same feature."""

    def __init__(self, config: MedusaConfig, weights: Weights) -> None:
        name = config.prefix
        self.heads = [Head(config, weights / f"{name}{index}") for index in range(config.num_heads)]

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, 1, H] -> logits [1, N, V]."""
        return op.Concat(*(head(op, x) for head in self.heads), axis=1)
