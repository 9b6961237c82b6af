"""StarCoder 2: layer norms, biases and a plain feed-forward network."""

from __future__ import annotations

from typing import ClassVar

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.models import arcee, llama

_ACTIVATION = "gelu_pytorch_tanh"
TINY = {
    **{key: value for key, value in llama.TINY.items() if key != "rms_norm_eps"},
    "model_type": "starcoder2",
    "norm_epsilon": 1e-5,
    "hidden_act": _ACTIVATION,
    "sliding_window": 12,
}
# Keys left from an older model type; `hidden_act` and `norm_epsilon` take precedence.
_UNREAD = (
    "activation_function",
    "attention_softmax_in_fp32",
    "layer_norm_epsilon",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
)


class Config(DecoderConfig):
    """StarCoder's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(hidden_act=_ACTIVATION, tie_word_embeddings=True)
        reader.expect("mlp_type", "default")
        reader.expect("norm_type", "layer_norm")
        reader.skip(*_UNREAD)
        bias = reader.read("use_bias", bool, True)
        return cls.read(
            reader,
            window=reader.optional("sliding_window", int),
            epsilon_key="norm_epsilon",
            qkv_bias=bias,
            o_proj_bias=bias,
            mlp_bias=bias,
        )


class DecoderLayer(arcee.DecoderLayer):
    """Llama's block with layer norms and without a gate."""

    norm = LayerNorm

    feed_forward_names: ClassVar = ("c_fc", "c_proj")


class Model(llama.Model):
    """Llama's model with StarCoder's blocks."""

    layer = DecoderLayer
    final_norm = LayerNorm
