"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858; the weights are the same).

The network predicts the next input of the base's lm_head from a token's embedding and the previous
hidden state. There is no norm before the first attention, and none before the head. S tokens of a
pass, R tokens with logits, D hidden size.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.graph.draft_head import DraftHead
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama, qwen3
from edgellm.export.onnx.builder import Op


class FirstLayer:
    """Transformer block without a norm before its attention."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        decoder = config.decoder
        size = decoder.hidden_size
        attention = qwen3.Attention if config.qk_norm else llama.Attention
        self.self_attn = attention(decoder, weights / "self_attn")
        self.post_attention_layernorm = RMSNorm(
            weights / "post_attention_layernorm", size, decoder.rms_norm_eps
        )
        self.mlp = GatedMLP(
            weights=weights / "mlp",
            size=size,
            inner_size=decoder.intermediate_size,
            bias=decoder.mlp_bias,
        )

    def forward(self, op: Op, x: ir.Value, state: PassState) -> ir.Value:
        """X [1, S, D] -> [1, S, D]."""
        x = op.Add(x, self.self_attn.forward(op, x, state, 0))
        return op.Add(x, self.mlp(op, self.post_attention_layernorm(op, x)))


class Model:
    """Embedding, fc, layers and the base's lm_head."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        decoder = config.decoder
        size = decoder.hidden_size
        layer = qwen3.DecoderLayer if config.qk_norm else llama.DecoderLayer
        self.embed_tokens = Embedding(
            weights=weights / "embed_tokens", vocab_size=decoder.vocab_size, size=size
        )
        self.fc = Linear(weights / "fc", 2 * size, size, bias=config.fc_bias)
        self.first = FirstLayer(config, weights / config.first_layer)
        self.layers = [
            layer(decoder, weights / f"layers.{index}")
            for index in range(1, decoder.num_hidden_layers)
        ]
        self.lm_head = DraftHead(
            weights=weights, size=size, count=config.draft_vocab_size, low_rank=config.low_rank
        )

    def forward(self, op: Op, input_ids: ir.Value, hidden: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S], hidden states [1, S, D] -> the next hidden states [1, S, D]."""
        both = op.Concat(state.embed(self.embed_tokens, input_ids), hidden, axis=-1)  # [1, S, 2D]
        x = self.fc(op, both)
        with op.scope("layers.0"):
            x = self.first.forward(op, x, state)
        for index, layer in enumerate(self.layers, start=1):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return x

    def head(self, op: Op, x: ir.Value) -> tuple[ir.Value, ...]:
        """X [1, R, D] -> logits, recycled hidden states, which are x, and ids of `DraftHead`."""
        logits, *ids = self.lm_head(op, x)
        return logits, x, *ids
