"""Qwen3-Next: Qwen3.5's layers with experts, and the projections of a key head, concatenated."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import ShiftedRMSNorm
from edgellm.export.models import qwen2_moe, qwen3_5_text
from edgellm.export.models.qwen2_moe import read_mixture
from edgellm.export.onnx.builder import Op

TINY = {
    **qwen3_5_text.TINY,
    "model_type": "qwen3_next",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [1],
}


class Config(qwen3_5_text.Config):
    """Qwen3-Next's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(norm_topk_prob=True, intermediate_size=5632)
        shared = reader.positive("shared_expert_intermediate_size", 512)
        return cls.hybrid(reader, shared_size=shared, **read_mixture(reader))


class GatedDeltaNet(qwen3_5_text.GatedDeltaNet):
    """A gated delta net with two input projections."""

    def project(self, config: DecoderConfig, weights: Weights) -> None:
        """Make the input projections."""
        sizes, hidden = self.sizes, config.hidden_size
        widths = {"qkvz": sizes.convolved + sizes.values}
        if weights.info("in_proj_qkv.weight") is not None:  # GGUF files have two
            widths = {"qkv": sizes.convolved, "z": sizes.values}
        self.rows = [
            Linear(weights / f"in_proj_{name}", hidden, width, bias=False)
            for name, width in widths.items()
        ]
        rates = 2 * sizes.value_heads
        self.in_proj_ba = Linear(weights / "in_proj_ba", hidden, rates, bias=False)

    def projected(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values, concatenated; gates z, a and b."""
        sizes = self.sizes
        shared = sizes.value_heads // sizes.key_heads
        rows = [layer(op, x) for layer in self.rows]
        b, a = self._parts(op, self.in_proj_ba(op, x), (shared, shared))
        if len(rows) > 1:
            return rows[0], rows[1], a, b
        of_values = shared * sizes.value_dim
        widths = sizes.key_dim, sizes.key_dim, of_values, of_values
        *qkv, z = self._parts(op, rows[0], widths)
        return op.Concat(*qkv, axis=-1), z, a, b

    def _parts(self, op: Op, x: ir.Value, widths: tuple[int, ...]) -> list[ir.Value]:
        """What every key head has one after the other, each part of all heads together."""
        apart = op.Reshape(x, op.constant([0, 0, self.sizes.key_heads, sum(widths)]))
        found = op.outputs(len(widths), "Split", apart, op.constant(np.array(widths)), axis=-1)
        return [op.Reshape(part, op.constant([0, 0, -1])) for part in found]


class DecoderLayer(qwen2_moe.DecoderLayer):
    """Block of attention with experts."""

    attention = qwen3_5_text.Attention
    norm = ShiftedRMSNorm


class LinearLayer(DecoderLayer):
    """Block of a gated delta net with experts."""

    attention = GatedDeltaNet  # type: ignore[assignment]
    attention_name = "linear_attn"


class Model(qwen3_5_text.Model):
    """Qwen3.5's model with such blocks."""

    layers_of = LinearLayer, DecoderLayer
