"""InternLM 3: Llama with one key for all biases."""

from __future__ import annotations

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {
    **llama.TINY,
    "model_type": "internlm3",
    "tie_word_embeddings": False,
    "head_dim": 32,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
}
_BIASES = ("attention_bias", "qkv_bias"), ("mlp_bias", "bias")  # keys, with those of the release


class Config(DecoderConfig):
    """InternLM's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json, with keys of transformers or of the original release."""
        reader.assume(num_key_value_heads=2, head_dim=128, max_position_embeddings=32768)
        bias, mlp_bias = (
            reader.read(key, bool, reader.read(older, bool, False)) for key, older in _BIASES
        )
        for (_, older), found in zip(_BIASES, (bias, mlp_bias), strict=True):
            reader.expect(older, found)
        if bias != mlp_bias:
            raise UnsupportedModelError(
                f"config.json: qkv_bias = {bias} and bias = {mlp_bias}, which transformers rejects",
                hint=REMEDY,
            )
        return cls.read(reader, qkv_bias=bias, o_proj_bias=bias, mlp_bias=bias)
