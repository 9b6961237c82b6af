"""Granite 3: Llama with factors on embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.export.config import ConfigReader
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.layers.attention import PassState
from edgellm.export.models import llama
from edgellm.export.op import Op
from edgellm.export.weights import Weights

TINY = {
    **llama.TINY, "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
    "residual_multiplier": 0.4, "attention_multiplier": 0.2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Granite's config."""

    residual_multiplier: float = 1.0  # of what each branch adds
    logits_scaling: float = 1.0  # divides logits

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        bias, mlp_bias = (reader.read(key, bool, False) for key in ("attention_bias", "mlp_bias"))
        return cls.read(
            reader, qkv_bias=bias, o_proj_bias=bias, mlp_bias=mlp_bias, **read_factors(reader)
        )


def read_factors(reader: ConfigReader) -> dict[str, Any]:
    """The facts of `Config` that are factors."""
    keys = {
        "embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier",
        "residual_multiplier": "residual_multiplier", "logits_scaling": "logits_scaling",
    }  # fmt: skip
    return {name: reader.nonzero(key, 1.0) for name, key in keys.items()}


class DecoderLayer(llama.DecoderLayer):
    """Llama's block, whose branches are scaled."""

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
