"""SmolLM3: Llama with some layers without RoPE (NoPE)."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    check_length,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits, read_rope
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {
    **llama.TINY,
    "model_type": "smollm3",
    "no_rope_layer_interval": 2,
    "use_sliding_window": True,
    "sliding_window": 12,
    "pad_token_id": 3,
}


class Config(DecoderConfig):
    """SmolLM3's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(tie_word_embeddings=True)
        reader.skip("max_window_layers")
        bias, mlp_bias = (reader.read(key, bool, False) for key in ("attention_bias", "mlp_bias"))
        config = cls.read(reader, rope=None, qkv_bias=bias, o_proj_bias=bias, mlp_bias=mlp_bias)
        interval = reader.positive("no_rope_layer_interval", 4)
        default = [index % interval != 0 for index in range(1, config.num_hidden_layers + 1)]
        has_rope = reader.read("no_rope_layers", list, default)
        check_length(reader, "no_rope_layers", has_rope)
        slides = reader.read("use_sliding_window", bool, False)
        slides = slides and reader.optional("sliding_window", int) is not None
        types = read_layer_types(
            reader, [SLIDING if slides and not turns else FULL for turns in has_rope]
        )
        window, longest = read_window(reader, types), config.max_position_embeddings
        rope = read_rope(reader, config.head_dim, longest, RopeTraits(theta=2e6))
        return config.attending(
            tuple(
                AttentionKind(rope if turns else None, window_of(kind, window))
                for turns, kind in zip(has_rope, types, strict=True)
            )
        )
