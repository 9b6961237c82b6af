"""Qwen3.5 with experts, the language model."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.models import qwen3_5_text, qwen3_next
from edgellm.export.models.qwen2_moe import read_mixture

TINY = {
    key: value
    for key, value in qwen3_next.TINY.items()
    if key not in ("intermediate_size", "mlp_only_layers")
} | {"model_type": "qwen3_5_moe_text"}


class Config(qwen3_5_text.Config):
    """The config of Qwen3.5 with experts in all layers."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(norm_topk_prob=True)
        reader.expect("norm_topk_prob", True)
        reader.skip("intermediate_size")  # all layers have experts
        shared = reader.positive("shared_expert_intermediate_size", 512)
        return cls.hybrid(
            reader, inner_key="moe_intermediate_size", shared_size=shared, **read_mixture(reader)
        )


class LinearLayer(qwen3_next.LinearLayer):
    """Qwen3-Next's block with the projections of Qwen3.5."""

    attention = qwen3_5_text.GatedDeltaNet  # type: ignore[assignment]


class Model(qwen3_5_text.Model):
    """Qwen3.5's model with such blocks."""

    layers_of = LinearLayer, qwen3_next.DecoderLayer
