"""Gemma 3, the language model: Gemma 2 with norms per head, and a separate RoPE for windows."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    every,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_ropes
from edgellm.export.layers.norm import ShiftedRMSNorm
from edgellm.export.models import gemma2, llama, qwen3

TINY = {
    **llama.TINY, "model_type": "gemma3_text", "head_dim": 32, "num_hidden_layers": 4,
    "hidden_activation": gemma2.ACTIVATION, "sliding_window": 12, "query_pre_attn_scalar": 24,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
    "rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                        SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip


class Config(gemma2.Config):
    """Gemma 3's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json; those of vision-language models have few keys."""
        reader.assume(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6,
            max_position_embeddings=131072, hidden_activation=gemma2.ACTIVATION,
            sliding_window=4096, sliding_window_pattern=6,
        )  # fmt: skip
        reader.expect("attn_logit_softcapping")
        config = cls.gemma(reader, None)
        interval = reader.positive("sliding_window_pattern")
        types = read_layer_types(reader, every(interval, config.num_hidden_layers))
        window = read_window(reader, types)
        if window is not None and not config.is_causal:  # EmbeddingGemma: half of it on each side
            window = window // 2 + 1
        thetas = {FULL: 1e6, SLIDING: reader.read("rope_local_base_freq", float, 1e4)}
        ropes = read_ropes(reader, thetas, config.head_dim, config.max_position_embeddings)
        return config.attending(
            tuple(AttentionKind(ropes[kind], window_of(kind, window)) for kind in types)
        )


class Attention(qwen3.Attention):
    """Self-attention with norms per head."""

    norm = ShiftedRMSNorm


class DecoderLayer(gemma2.DecoderLayer):
    """Gemma 2's block with such attention."""

    attention = Attention


class Model(gemma2.Model):
    """Gemma 2's model with Gemma 3's blocks."""

    layer = DecoderLayer
