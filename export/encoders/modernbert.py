"""ModernBERT (arXiv 2412.13663): RoPE, windows in most layers, gated networks; gte, nomic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.encoder import EncoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    read_layer_types,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_ropes
from edgellm.export.layers.activations import activate
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import LayerNorm, UnbiasedLayerNorm
from edgellm.export.onnx.builder import Op
from edgellm.export.pooling.classifiers import Classifier, Head

TINY = {
    "model_type": "modernbert",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 160000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
PREFIX = "model."


class Config(EncoderConfig):
    """ModernBERT's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(
            "classifier_dropout",
            "cls_token_id",
            "decoder_bias",
            "deterministic_flash_attn",
            "gradient_checkpointing",
            "initializer_cutoff_factor",
            "layer_norm_eps",
            "mlp_dropout",
            "reference_compile",
            "repad_logits_with_grad",
            "sparse_pred_ignore_index",
            "sparse_prediction",
            "classifier_activation",
            "classifier_bias",
            "classifier_pooling",
            "num_labels",
            "sentence_transformers",
            "sbert_ce_default_activation_function",
        )
        reader.expect("position_embedding_type", "absolute", "sans_pos")  # unused by transformers
        reader.expect("hidden_act", "gelu")  # unused, too
        reader.assume(
            hidden_size=768,
            num_hidden_layers=22,
            num_attention_heads=12,
            intermediate_size=1152,
            hidden_activation="gelu",
            max_position_embeddings=8192,
            norm_eps=1e-5,
            local_attention=128,
        )
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(
            reader,
            rope=None,
            activation_key="hidden_activation",
            epsilon_key="norm_eps",
            qkv_bias=bias,
            o_proj_bias=bias,
            mlp_bias=reader.read("mlp_bias", bool, False),
            norm_bias=reader.read("norm_bias", bool, False),
        )
        interval = reader.positive("global_attn_every_n_layers", 3)
        default = [SLIDING if at % interval else FULL for at in range(config.num_hidden_layers)]
        types = read_layer_types(reader, default)
        thetas = {
            FULL: reader.read("global_rope_theta", float, 160000.0),
            SLIDING: reader.read("local_rope_theta", float, 10000.0),
        }
        ropes = read_ropes(reader, thetas, config.head_dim, config.max_position_embeddings)
        window = reader.positive("local_attention") // 2 + 1
        return config.attending(
            tuple(AttentionKind(ropes[kind], window_of(kind, window)) for kind in types)
        )


def _norm(config: EncoderConfig, weights: Weights) -> LayerNorm:
    kind = LayerNorm if config.norm_bias else UnbiasedLayerNorm
    return kind(weights, config.hidden_size, config.rms_norm_eps)


class Layer:
    """Pre-norm transformer block; the first has no norm before its attention."""

    def __init__(self, config: EncoderConfig, weights: Weights, index: int) -> None:
        size, own, mlp = config.hidden_size, weights / "attn", weights / "mlp"
        self.config, self.inner_size = config, config.intermediate_size
        self.attn_norm = _norm(config, weights / "attn_norm") if index else None
        self.Wqkv = Linear(own / "Wqkv", size, 3 * size, bias=config.qkv_bias)
        self.attention_output = Linear(own / "Wo", size, size, bias=config.o_proj_bias)
        self.mlp_norm = _norm(config, weights / "mlp_norm")
        self.Wi = Linear(mlp / "Wi", size, 2 * self.inner_size, bias=config.mlp_bias)
        self.mlp_output = Linear(mlp / "Wo", self.inner_size, size, bias=config.mlp_bias)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        size, heads = self.config.hidden_size, self.config.num_attention_heads
        rows = x if self.attn_norm is None else self.attn_norm(op, x)
        sizes = op.constant(np.full(3, size, np.int64))
        q, k, v = op.outputs(3, "Split", self.Wqkv(op, rows), sizes, axis=-1)
        x = op.Add(x, self.attention_output(op, state.attend(layer, q, k, v, heads)))
        sizes = op.constant(np.full(2, self.inner_size, np.int64))
        both = self.Wi(op, self.mlp_norm(op, x))
        first, gate = op.outputs(2, "Split", both, sizes, axis=-1)
        gated = op.Mul(activate(op, first, self.config.activation), gate)
        return op.Add(x, self.mlp_output(op, gated))


class Model:
    """Normalized embeddings, layers and the final norm."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        model = weights / "model"
        self.tok_embeddings = Embedding(
            weights=model / "embeddings.tok_embeddings",
            vocab_size=config.vocab_size,
            size=config.hidden_size,
        )
        self.embeddings_norm = _norm(config, model / "embeddings.norm")
        self.layers = [
            Layer(config, model / f"layers.{index}", index)
            for index in range(config.num_hidden_layers)
        ]
        self.norm = _norm(config, model / "final_norm")

    def forward(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> residual stream [1, S, H] before the final norm."""
        x = self.embeddings_norm(op, self.tok_embeddings(op, input_ids))
        for index, layer in enumerate(self.layers):
            state.residuals.append(x)
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return x


def classifier(config: ConfigReader, size: int) -> Classifier:
    """The head of ModernBertForSequenceClassification: dense layer, norm, linear layer."""
    bias = config.read("norm_bias", bool, False)
    return Classifier(
        pooling=config.choice("classifier_pooling", "cls", "mean"),
        heads=(
            Head(
                name="head.dense",
                out=size,
                bias=config.read("classifier_bias", bool, False),
                activation=config.choice("classifier_activation", "gelu", "silu", "relu", "tanh"),
                norm="head.norm",
                norm_epsilon=config.read("norm_eps", float, 1e-5),
                norm_bias=bias,
            ),
            Head(name="classifier", out=1),
        ),
    )
