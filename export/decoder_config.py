"""The facts that a decoder of the Llama family takes from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm.contract import UnsupportedModelError
from edgellm.export.config import ConfigReader
from edgellm.export.rope import Rope
from edgellm.manifest import ImageSpec


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the decoder family of Llama, Mistral and Qwen needs to know of itself."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    images: ImageSpec | None = None  # of the text tower of a vision-language model

    @property
    def position_axes(self) -> int:
        """Positions of a token: 1, or 3 for M-RoPE."""
        return 3 if self.rope.axes else 1

    @classmethod
    def read(cls, reader: ConfigReader, **traits: Any) -> DecoderConfig:
        """Read the keys that the whole family shares; `traits` are the architecture's own."""
        heads = reader.positive("num_attention_heads")
        hidden = reader.positive("hidden_size")
        head_dim = reader.positive("head_dim", hidden // heads)
        max_positions = reader.positive("max_position_embeddings")
        reader.expect("hidden_act", "silu", "swish")
        config = cls(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.positive("intermediate_size"),
            num_hidden_layers=reader.positive("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=reader.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=reader.read("rms_norm_eps", float),
            max_position_embeddings=max_positions,
            rope=Rope.read(reader, head_dim, max_positions),
            tie_word_embeddings=reader.read("tie_word_embeddings", bool, False),
            **traits,
        )
        if not 0 < config.rms_norm_eps < 1:
            raise UnsupportedModelError(f"config.json: rms_norm_eps = {config.rms_norm_eps}")
        if heads % config.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: {heads} attention heads cannot share "
                f"{config.num_key_value_heads} key/value heads"
            )
        return config
