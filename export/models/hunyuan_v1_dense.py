"""Hunyuan, dense: Llama with queries and keys that are normalized after rope."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RULES, RopeTraits, ntk_alpha
from edgellm.export.layers.attention import PassState
from edgellm.export.models import llama, qwen3
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "hunyuan_v1_dense", "head_dim": 32,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0,
                        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0},
}  # fmt: skip
_ROPE = RopeTraits(rules={**RULES, "dynamic": ntk_alpha})
# Unused keys of public configs for images, experts and a cache shared by layers.
_UNREAD = (
    "anyres_pooling_size", "anyres_vit_max_image_size", "cla_share_factor", "class_num",
    "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id",
    "mask_init_id", "norm_topk_prob", "num_media_embeds", "org_vocab_size", "pad_id", "pool_type",
    "text_end_id", "text_start_id",
)  # fmt: skip


class Config(DecoderConfig):
    """Hunyuan's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        for key in ("use_qk_norm", "use_rotary_pos_emb"):
            reader.expect(key, True)
        for key in ("mlp_bias", "use_cla"):
            reader.expect(key, False)
        reader.expect("norm_type", "rms")
        reader.skip(*_UNREAD)
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(reader, rope=_ROPE, qkv_bias=bias, o_proj_bias=bias)
        reader.expect("attention_head_dim", config.head_dim)
        return config


class Attention(qwen3.Attention):
    """Self-attention that normalizes after RoPE."""

    names = "query_layernorm", "key_layernorm"

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, input size] -> [1, S, H]."""
        config = self.config
        q = state.rotate(layer, self.q_proj(op, x), config.num_attention_heads)
        k = state.rotate(layer, self.k_proj(op, x), config.num_key_value_heads)
        q, k = self.normalize(op, q, k)
        y = state.attend(
            layer, q, k, self.v_proj(op, x), config.num_attention_heads, is_rotated=True
        )
        return self.o_proj(op, y)


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with Hunyuan's attention."""

    attention = Attention


class Model(llama.Model):
    """Llama's model with Hunyuan's blocks."""

    layer = DecoderLayer
