"""Cohere 2 (Command R7B, Aya): attention and MLP in parallel, layer norms, scaled logits.

Layers with full attention have no RoPE (NoPE).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    SLIDING,
    AttentionKind,
    every,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits, read_rope
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.norm import UnbiasedLayerNorm
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **{key: value for key, value in llama.TINY.items() if key != "rms_norm_eps"},
    "model_type": "cohere2",
    "layer_norm_eps": 1e-5,
    "sliding_window": 12,
    "logit_scale": 0.25,
    "layer_types": [SLIDING, "full_attention", SLIDING],
}
_ROPE = RopeTraits(interleaved=True)
_ONLY = {
    "layer_switch": (4,),
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_qk_norm": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Cohere's config."""

    logit_scale: float = 1.0

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(tie_word_embeddings=True, sliding_window=4096, sliding_window_pattern=4)
        for key, allowed in _ONLY.items():
            reader.expect(key, *allowed)
        reader.skip("use_embedding_sharing", "use_parallel_embedding")  # see tie_word_embeddings
        bias = reader.read("attention_bias", bool, False)
        scale = reader.nonzero("logit_scale", 0.0625)
        config = cls.read(
            reader,
            rope=None,
            epsilon_key="layer_norm_eps",
            qkv_bias=bias,
            o_proj_bias=bias,
            logit_scale=scale,
        )
        reader.expect("head_dim", config.hidden_size // config.num_attention_heads)
        interval = reader.positive("sliding_window_pattern")
        types = read_layer_types(reader, every(interval, config.num_hidden_layers))
        window = read_window(reader, types)
        rope = read_rope(reader, config.head_dim, config.max_position_embeddings, _ROPE)
        return config.attending(
            tuple(
                AttentionKind(rope if kind == SLIDING else None, window_of(kind, window))
                for kind in types
            )
        )


class DecoderLayer(llama.DecoderLayer):
    """Transformer block with parallel branches after one norm."""

    norm = UnbiasedLayerNorm

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        normed = self.input_layernorm(op, x)
        attended = op.Add(x, self.self_attn.forward(op, normed, state, layer))
        return op.Add(attended, self.mlp(op, normed))


class Model(llama.Model):
    """Llama's model with Cohere's blocks and scaled logits."""

    layer = DecoderLayer
    final_norm = UnbiasedLayerNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.logit_scale = config.logit_scale

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        return op.Mul(super().head(op, x), op.constant(self.logit_scale, op.dtype))
