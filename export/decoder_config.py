"""The facts that a decoder of the Llama family takes from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm.contract import UnsupportedModelError
from edgellm.export.config import ConfigReader
from edgellm.export.rope import Rope


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

    @classmethod
    def read(cls, reader: ConfigReader, **traits: Any) -> DecoderConfig:
        """Read the keys that the whole family shares; `traits` are the architecture's own."""
        heads = reader.read("num_attention_heads", int)
        hidden = reader.read("hidden_size", int)
        head_dim = reader.read("head_dim", int, hidden // heads)
        max_positions = reader.read("max_position_embeddings", int)
        reader.expect("hidden_act", "silu", "swish")
        config = cls(
            vocab_size=reader.read("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=reader.read("intermediate_size", int),
            num_hidden_layers=reader.read("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=reader.read("num_key_value_heads", int, heads),
            head_dim=head_dim,
            rms_norm_eps=reader.read("rms_norm_eps", float),
            max_position_embeddings=max_positions,
            rope=Rope.read(reader, head_dim, max_positions),
            tie_word_embeddings=reader.read("tie_word_embeddings", bool, False),
            **traits,
        )
        if heads % config.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: {heads} attention heads cannot share "
                f"{config.num_key_value_heads} key/value heads"
            )
        return config
