"""OLMo Hybrid: OLMo 2's blocks of attention, and pre-norm blocks of gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import FULL, LINEAR, AttentionKind, read_layer_types
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import Rope, read_parameters, rope_of
from edgellm.export.layers.delta import DeltaRule, DeltaSizes
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama, olmo2, qwen3_5_text
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "olmo_hybrid",
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
_INITIAL = ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min")
_EPSILON = 1e-5  # of the norm after the delta rule
# Published names of norms; transformers also saves those of attention blocks so.
PUBLISHED = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3_5_text.Config):
    """OLMo Hybrid's config."""

    doubles_beta: bool = True  # so that eigenvalues of a state's update may be negative

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*(f"linear_{name}" for name in _INITIAL))
        reader.expect("hidden_act", "silu", "swish")  # also of the convolution
        reader.assume(rms_norm_eps=1e-6, max_position_embeddings=65536)
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(
            reader,
            rope=None,
            qkv_bias=bias,
            o_proj_bias=bias,
            is_recurrent=True,
            delta=_read_sizes(reader),
            doubles_beta=reader.read("linear_allow_neg_eigval", bool, True),
        )
        attends = AttentionKind(_read_rope(reader, config))
        layers = config.num_hidden_layers
        usual = [FULL if layer % 4 == 3 else LINEAR for layer in range(layers)]
        usual[-1] = usual[-1] if FULL in usual else FULL
        types = read_layer_types(reader, usual, (FULL, LINEAR))
        return config.attending(tuple(attends if kind == FULL else None for kind in types))


def _read_sizes(reader: ConfigReader) -> DeltaSizes:
    """Sizes of delta nets, which depend on those of attention if they are not given."""
    heads, hidden = (reader.positive(key) for key in ("num_attention_heads", "hidden_size"))
    key_heads = reader.positive("linear_num_key_heads", heads)
    key_dim = reader.positive("linear_key_head_dim", int(0.75 * hidden / key_heads))
    reader.replace(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=reader.positive("linear_num_value_heads", heads),
        linear_key_head_dim=key_dim,
        linear_value_head_dim=reader.positive("linear_value_head_dim", 2 * key_dim),
    )
    return DeltaSizes.read(reader)


def _read_rope(reader: ConfigReader, config: DecoderConfig) -> Rope | None:
    """RoPE; None (NoPE) if the base is null, as in published models."""
    parameters = read_parameters(reader)
    theta = reader.read("rope_theta", float, 1e4)
    is_null = reader.is_null("rope_theta")
    if "rope_theta" in parameters:
        theta, is_null = parameters["rope_theta"], parameters["rope_theta"] is None
    if is_null:
        return None
    longest = config.max_position_embeddings
    return rope_of(reader, {**parameters, "rope_theta": theta}, config.head_dim, longest)


class OlmoDeltaRule(DeltaRule):
    """The delta rule with betas up to 2."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config.delta, weights, ROWS)
        self.doubles_beta = config.doubles_beta

    def beta(self, op: Op, b: ir.Value) -> ir.Value:
        """Shares of the memory that new values replace [1, S, H], up to 2."""
        shares = super().beta(op, b)
        return op.Add(shares, shares) if self.doubles_beta else shares


class GatedDeltaNet(qwen3_5_text.GatedDeltaNet):
    """A gated delta net with one projection for each part."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        assert isinstance(config, Config)
        self.sizes = sizes = config.delta
        hidden = config.hidden_size
        self.rule = OlmoDeltaRule(config, weights)
        widths = {
            "q": sizes.keys,
            "k": sizes.keys,
            "v": sizes.values,
            "g": sizes.values,
            "a": sizes.value_heads,
            "b": sizes.value_heads,
        }
        self.parts = {
            name: Linear(weights / f"{name}_proj", hidden, width, bias=False)
            for name, width in widths.items()
        }
        self.norm = RMSNorm(weights / "o_norm", sizes.value_dim, _EPSILON)
        self.out_proj = Linear(weights / "o_proj", sizes.values, hidden, bias=False)

    def projected(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values, concatenated; gates z, a and b."""
        q, k, v, gates, a, b = (part(op, x) for part in self.parts.values())
        return op.Concat(q, k, v, axis=-1), gates, a, b


class DecoderLayer(olmo2.DecoderLayer):
    """OLMo 2's block."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.norm_names = _stored_names(weights)
        super().__init__(config, weights)


class LinearLayer(llama.DecoderLayer):
    """Pre-norm block of a gated delta net."""

    attention = GatedDeltaNet  # type: ignore[assignment]
    attention_name = "linear_attn"

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.norm_names = _stored_names(weights)
        super().__init__(config, weights)


def _stored_names(weights: Weights) -> tuple[str, str]:
    """Names of a layer's norms in the checkpoint: published ones, or those of transformers."""
    first, second = (
        published if weights.info(f"{published}.weight") is not None else name
        for name, published in PUBLISHED.items()
    )
    return first, second


class Model(llama.Model):
    """Llama's model with such blocks."""

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """A block of the layer's type."""
        kind = LinearLayer if config.kinds[index] is None else DecoderLayer
        return kind(config, weights)
