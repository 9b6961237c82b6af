"""Image embeddings in place of token embeddings.

Token ids from the vocabulary's size V on are rows of the encoder's output: id V + n is row n. S
tokens of a pass, N image rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgellm.export.layers.embedding import Embedding
from edgellm.export.onnx.builder import Op


@dataclass(slots=True, kw_only=True)
class ImageRows:
    """The encoder's output as inputs of a decoder."""

    vocab_size: int
    embeds: ir.Value  # [N, H], at least one row
    deepstack: ir.Value | None  # [L, N, H]
    num_deepstack: int  # L
    _rows: ir.Value = field(init=False)  # int64 [1, S]; 0 for text tokens
    _is_image: ir.Value = field(init=False)  # bool [1, S, 1]

    def embed(self, op: Op, table: Embedding, token_ids: ir.Value) -> ir.Value:
        """token_ids int64 [1, S] -> [1, S, H]."""
        with op.scope("images"):
            end, zero = op.constant(np.int64(self.vocab_size)), op.constant(np.int64(0))
            is_image = op.GreaterOrEqual(token_ids, end)
            self._rows = op.Max(op.Sub(token_ids, end), zero)
            self._is_image = op.Unsqueeze(is_image, op.constant([2]))
            text = op.Where(is_image, zero, token_ids)
            found = op.Gather(self.embeds, self._rows, axis=0)
        return op.Where(self._is_image, found, table(op, text))

    def text_ids(self, op: Op, token_ids: ir.Value, other: int) -> ir.Value:
        """token_ids int64 [1, S] of `embed`, with `other` in place of images."""
        with op.scope("images"):
            is_image = op.Squeeze(self._is_image, op.constant([2]))
            return op.Where(is_image, op.constant(np.int64(other)), token_ids)

    def add_deepstack(self, op: Op, x: ir.Value, layer: int) -> ir.Value:
        """X [1, S, H] after a layer -> with that layer's features at image rows."""
        if self.deepstack is None or layer >= self.num_deepstack:
            return x
        features = op.Gather(self.deepstack, op.constant(np.int64(layer)), axis=0)  # [N, H]
        found = op.Gather(features, self._rows, axis=0)
        return op.Add(x, op.Where(self._is_image, found, op.constant(0, op.dtype)))
