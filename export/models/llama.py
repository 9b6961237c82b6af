"""Llama 2, 3, 3.1, 3.2, SmolLM2 and DeepSeek-R1-Distill-Llama.

Parameter names are those of transformers' LlamaForCausalLM; S is the number of tokens of a pass.
"""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState, Scores
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP, GatedMLP
from edgellm.export.layers.norm import LayerNorm, RMSNorm
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class Config(DecoderConfig):
    """Llama's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        bias = reader.read("attention_bias", bool, False)
        mlp_bias = reader.read("mlp_bias", bool, False)
        return cls.read(reader, qkv_bias=bias, o_proj_bias=bias, mlp_bias=mlp_bias)


class Attention:
    """Grouped-query self-attention."""

    output_name = "o_proj"

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        """`input_size`: width of the input if it is not the hidden size."""
        self.config = config
        hidden, head_dim = config.hidden_size, config.head_dim
        width = input_size or hidden
        q_size = config.num_attention_heads * head_dim
        kv_size = config.num_key_value_heads * head_dim
        self.q_proj = Linear(weights / "q_proj", width, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(weights / "k_proj", width, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(weights / "v_proj", width, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(weights / self.output_name, q_size, hidden, bias=config.o_proj_bias)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, input size] -> [1, S, H]."""
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        q, k = self.normalize(op, q, k)
        y = self.attend(op, state, layer, q, k, v)
        return self.o_proj(op, self.gate(op, x, y))

    def attend(
        self, op: Op, state: PassState, layer: int, q: ir.Value, k: ir.Value, v: ir.Value
    ) -> ir.Value:
        """Q [1, S, heads*D], k and v [1, S, kv_heads*D] -> [1, S, heads*D]."""
        del op
        config = self.config
        scores = Scores(scale=config.attention_scale, softcap=config.attention_softcap)
        return state.attend(layer, q, k, v, config.num_attention_heads, scores=scores)

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Hook for architectures that normalize queries and keys."""
        del op
        return q, k

    def gate(self, op: Op, x: ir.Value, y: ir.Value) -> ir.Value:
        """Hook for gates by the input x [1, S, H] on the heads' outputs y [1, S, heads*D]."""
        del op, x
        return y


class DecoderLayer:
    """Pre-norm transformer block."""

    attention: type[Attention] = Attention
    norm: type[RMSNorm | LayerNorm] = RMSNorm
    attention_name, mlp_name = "self_attn", "mlp"
    norm_names = "input_layernorm", "post_attention_layernorm"

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.input_layernorm, self.post_attention_layernorm = (
            self.norm(weights / name, config.hidden_size, config.rms_norm_eps)
            for name in self.norm_names
        )
        self.self_attn = self.attention(config, weights / self.attention_name)
        self.mlp = self.feed_forward(config, weights / self.mlp_name)

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """The network after attention."""
        return GatedMLP(
            weights=weights,
            size=config.hidden_size,
            inner_size=config.intermediate_size,
            bias=config.mlp_bias,
            activation=config.activation,
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        x = op.Add(x, self.self_attn.forward(op, self.input_layernorm(op, x), state, layer))
        return op.Add(x, self.mlp(op, self.post_attention_layernorm(op, x)))


class Layer(Protocol):
    """Interface of a layer."""

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        ...


class Model:
    """Embedding, decoder layers, final norm and lm_head."""

    layer: type[DecoderLayer] = DecoderLayer
    final_norm: type[RMSNorm | LayerNorm] = RMSNorm
    embedding_name, norm_name = "embed_tokens", "norm"

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        model = weights / "model"
        self.config, table = config, model / self.embedding_name
        self.embed_tokens = Embedding(
            weights=table,
            vocab_size=config.vocab_size,
            size=config.hidden_size,
            scale=config.embedding_scale,
            epsilon=config.rms_norm_eps if config.normalizes_embeddings else None,
        )
        self.layers = [
            self.make_layer(config, model / f"layers.{index}", index)
            for index in range(config.num_hidden_layers)
        ]
        self.norm = self.final_norm(model / self.norm_name, config.hidden_size, config.rms_norm_eps)
        # A quantized head is written next to the float table, even with tied embeddings.
        tied = config.tie_word_embeddings and (weights / "lm_head").info("weight") is None
        head = table if tied else weights / "lm_head"
        self.lm_head = Linear(head, config.hidden_size, config.vocab_size, bias=False)

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> Layer:
        """Hook for architectures with several kinds of layers."""
        del index
        return self.layer(config, weights)

    def forward(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> residual stream [1, S, H] before the final norm."""
        x = self.embed(op, input_ids, state)
        for index, layer in enumerate(self.layers):
            state.residuals.append(x)
            with op.scope(f"layers.{index}"):
                x = state.behind(index, layer.forward(op, x, state, index))
        return x

    def embed(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> the first layer's input [1, S, H]."""
        del op
        return state.embed(self.embed_tokens, input_ids)

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        return self.lm_head(op, self.norm(op, x))
