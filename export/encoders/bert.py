"""BERT (arXiv 1810.04805): learned positions, norms after each part; bge, e5, gte, MiniLM.

Parameter names are those of transformers' BertModel below `model.`; S is the number of tokens of a
text. Ids of the second text of a pair are shifted by the size of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.encoder import EncoderConfig
from edgellm.export.config.layer_types import AttentionKind
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.onnx.builder import Op
from edgellm.export.pooling.classifiers import Classifier, Head

TINY = {
    "model_type": "bert",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
PREFIX = "bert."


class Config(EncoderConfig):
    """BERT's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        return cls.encoder(reader, first_position=0)

    @classmethod
    def encoder(cls, reader: ConfigReader, first_position: int) -> DecoderConfig:
        """Facts that BERT and RoBERTa share.

        Args:
            reader: of config.json.
            first_position: index of the first token's row in the table of positions.
        """
        reader.skip(
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "classifier_dropout",
            "use_cache",
            "gradient_checkpointing",
            "output_past",
            "num_labels",
            "sentence_transformers",
            "sbert_ce_default_activation_function",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
            "directionality",
        )
        reader.expect("position_embedding_type", "absolute")
        reader.expect("is_decoder", False)
        reader.expect("add_cross_attention", False)
        reader.assume(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            hidden_act="gelu",
            max_position_embeddings=512,
            layer_norm_eps=1e-12,
        )
        longest = reader.positive("max_position_embeddings") - first_position
        reader.replace(max_position_embeddings=longest)
        config = cls.read(
            reader,
            rope=None,
            epsilon_key="layer_norm_eps",
            qkv_bias=True,
            o_proj_bias=True,
            mlp_bias=True,
            token_types=reader.positive("type_vocab_size", 2),
            first_position=first_position,
        )
        return config.attending((AttentionKind(None),) * config.num_hidden_layers)


class Embeddings:
    """Sum of the embeddings of a token, its position and its text of a pair, normalized."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        self.config, size = config, config.hidden_size
        positions = config.max_position_embeddings + config.first_position
        self.word, self.position, self.token_type = (
            Embedding(weights=weights / name, vocab_size=rows, size=size)
            for name, rows in (
                ("word_embeddings", config.vocab_size),
                ("position_embeddings", positions),
                ("token_type_embeddings", config.token_types),
            )
        )
        self.norm = LayerNorm(weights / "LayerNorm", size, config.rms_norm_eps)

    def forward(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> [1, S, H]."""
        size = op.constant(np.int64(self.config.vocab_size))
        types = op.Div(input_ids, size)
        words = op.Sub(input_ids, op.Mul(types, size))
        places = op.Add(state.position_ids, op.constant(np.int64(self.config.first_position)))
        x = op.Add(self.word(op, words), self.token_type(op, types))
        return self.norm(op, op.Add(x, self.position(op, places)))


class Layer:
    """Post-norm transformer block."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        own, self.heads = weights / "attention", config.num_attention_heads
        self.projections = [
            Linear(own / f"self.{name}", size, size, bias=True)
            for name in ("query", "key", "value")
        ]
        self.output = Linear(own / "output.dense", size, size, bias=True)
        self.attention_norm = LayerNorm(own / "output.LayerNorm", size, epsilon)
        self.mlp = FeedForward(
            first=weights / "intermediate.dense",
            second=weights / "output.dense",
            sizes=(size, config.intermediate_size, size),
            activation=config.activation,
        )
        self.output_norm = LayerNorm(weights / "output.LayerNorm", size, epsilon)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        q, k, v = (each(op, x) for each in self.projections)
        attended = self.output(op, state.attend(layer, q, k, v, self.heads))
        x = self.attention_norm(op, op.Add(x, attended))
        return self.output_norm(op, op.Add(x, self.mlp(op, x)))


class Model:
    """Embeddings and layers."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        model = weights / "model"
        self.embeddings = Embeddings(config, model / "embeddings")
        self.layers = [
            Layer(config, model / f"encoder.layer.{index}")
            for index in range(config.num_hidden_layers)
        ]

    def forward(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> hidden states [1, S, H] of the last layer."""
        with op.scope("embeddings"):
            x = self.embeddings.forward(op, input_ids, state)
        for index, layer in enumerate(self.layers):
            state.residuals.append(x)
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return x

    def norm(self, op: Op, x: ir.Value) -> ir.Value:
        """The hidden states as they are: the last norm is the last layer's."""
        return op.Identity(x)


def classifier(config: ConfigReader, size: int) -> Classifier:
    """The head of BertForSequenceClassification: the pooler, and a linear layer."""
    del config
    return Classifier(
        pooling="cls",
        heads=(
            Head(name="model.pooler.dense", out=size, activation="tanh"),
            Head(name="classifier", out=1),
        ),
    )
