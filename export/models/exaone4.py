"""EXAONE 4: OLMo's blocks with norms per head; with windows, full attention layers have no RoPE."""

from __future__ import annotations

from edgellm.core.errors import UnsupportedModelError
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
from edgellm.export.config.rope import read_rope
from edgellm.export.models import llama, olmo2, qwen3

TINY = {
    **llama.TINY, "model_type": "exaone4", "sliding_window": 12, "sliding_window_pattern": 3,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 16},
}  # fmt: skip


class Config(DecoderConfig):
    """EXAONE's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(sliding_window=4096, sliding_window_pattern=4)
        config = cls.read(reader, rope=None)
        types = read_layer_types(reader, _default_types(reader, config.num_hidden_layers))
        window = read_window(reader, types)
        rope = read_rope(reader, config.head_dim, config.max_position_embeddings)
        return config.attending(
            tuple(
                AttentionKind(
                    rope if window is None or kind == SLIDING else None, window_of(kind, window)
                )
                for kind in types
            )
        )


def _default_types(reader: ConfigReader, layers: int) -> list[str]:
    """Layer types by the pattern, a number or letters, for configs without layer_types."""
    reader.skip("sliding_window_pattern")
    if reader.optional("layer_types", list) is not None:
        return []
    if reader.optional("sliding_window", int) is None:
        raise UnsupportedModelError("config.json has neither layer_types nor sliding_window")
    return every(reader.positive("sliding_window_pattern"), layers)


class DecoderLayer(olmo2.DecoderLayer):
    """OLMo's block with Qwen3's attention."""

    attention = qwen3.Attention


class Model(llama.Model):
    """Llama's model with EXAONE's blocks."""

    layer = DecoderLayer
