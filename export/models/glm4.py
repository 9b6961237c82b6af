"""GLM-4 (0414): norms before and after, half of each head turns, neighbours together."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.mlp import MLP, FusedGatedMLP
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "glm4",
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 3,
}
_ROPE = RopeTraits(partial=0.5, interleaved=True)


class Config(DecoderConfig):
    """GLM-4's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(head_dim=128)
        return cls.read(reader, rope=_ROPE, qkv_bias=reader.read("attention_bias", bool, True))


class DecoderLayer(llama.DecoderLayer):
    """Transformer block whose branches are normalized before and after."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            self.norm(weights / name, config.hidden_size, config.rms_norm_eps)
            for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
        )

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """MLP with gate and up as one layer."""
        return FusedGatedMLP(
            weights=weights,
            size=config.hidden_size,
            inner_size=config.intermediate_size,
            activation=config.activation,
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        attended = self.self_attn.forward(op, self.input_layernorm(op, x), state, layer)
        x = op.Add(x, self.post_self_attn_layernorm(op, attended))
        y = self.mlp(op, self.post_attention_layernorm(op, x))
        return op.Add(x, self.post_mlp_layernorm(op, y))


class Model(llama.Model):
    """Llama's model with GLM's blocks."""

    layer = DecoderLayer
