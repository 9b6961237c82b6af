"""Granite 3: Llama with factors on embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import PLAIN_ROPE, RopeTraits
from edgellm.export.layers.attention import PassState
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "granite",
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Granite's config."""

    residual_multiplier: float = 1.0  # of each branch's output
    logits_scaling: float = 1.0  # divides logits

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        return cls.granite(reader, mlp_bias=reader.read("mlp_bias", bool, False), rope=PLAIN_ROPE)

    @classmethod
    def granite(
        cls,
        reader: ConfigReader,
        inner_key: str = "intermediate_size",
        *,
        mlp_bias: bool,
        rope: RopeTraits | None = None,
        **traits: Any,
    ) -> DecoderConfig:
        """Facts that Granite 3 and 4 share; see `DecoderConfig.read`."""
        bias = reader.read("attention_bias", bool, False)
        embedding, attention, residual, logits = (
            reader.nonzero(key, 1.0)
            for key in (
                "embedding_multiplier",
                "attention_multiplier",
                "residual_multiplier",
                "logits_scaling",
            )
        )
        return cls.read(
            reader, rope=rope, inner_key=inner_key, qkv_bias=bias, o_proj_bias=bias,
            mlp_bias=mlp_bias, embedding_scale=embedding, attention_scale=attention,
            residual_multiplier=residual, logits_scaling=logits,
            **traits,
        )  # fmt: skip


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with scaled branches."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.multiplier = config.residual_multiplier

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        factor = op.constant(self.multiplier, op.dtype)
        branch = self.self_attn.forward(op, self.input_layernorm(op, x), state, layer)
        x = op.Add(x, op.Mul(branch, factor))
        return op.Add(x, op.Mul(self.mlp(op, self.post_attention_layernorm(op, x)), factor))


class Model(llama.Model):
    """Llama's model with scaled logits."""

    layer = DecoderLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.logits_scaling = config.logits_scaling

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        return op.Div(super().head(op, x), op.constant(self.logits_scaling, op.dtype))
