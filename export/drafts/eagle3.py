"""EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (2605.09992) and EAGLE-4: one layer over fused features.

The first layer attends over the token's embedding and the hidden row, concatenated; what it gives
to the next step is its output before the final norm (EAGLE-3.1 with `norm_output`: after it).
EAGLE-4 adds a window and a low-rank head (`export.draft_checkpoints.low_rank_head`).
S rows of a pass, R rows of its head, H hidden size of the base, T taps, D hidden size of the draft.
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


class Fuse:
    """Hidden taps of the base [1, S, T*H] to hidden states of the draft [1, S, D]."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        size, taps = config.base_hidden_size, len(config.hidden_taps)
        epsilon = config.decoder.rms_norm_eps
        self.size, self.width = size, taps * size
        self.input_norm = (
            RMSNorm(weights / "input_norm", taps * size, epsilon)
            if config.norms.before_fc
            else None
        )
        self.fc_norm = [
            RMSNorm(weights / f"fc_norm.{index}", size, epsilon)
            for index in range(taps if config.norms.fc_norm else 0)
        ]
        self.fc = Linear(
            weights / "fc", taps * size, config.decoder.hidden_size, bias=config.fc_bias
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the graph."""
        if self.input_norm is not None:
            x = self.input_norm(op, x)
        if self.fc_norm:
            parts = [norm(op, self._tap(op, x, index)) for index, norm in enumerate(self.fc_norm)]
            x = op.Concat(*parts, axis=-1)
        return self.fc(op, x)

    def _tap(self, op: Op, x: ir.Value, index: int) -> ir.Value:
        begin, end = index * self.size, (index + 1) * self.size
        return op.Slice(x, op.constant([begin]), op.constant([end]), op.constant([2]))


class FirstLayer:
    """The layer that reads embeddings and hidden rows, concatenated."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        decoder = config.decoder
        size, epsilon = decoder.hidden_size, decoder.rms_norm_eps
        self.norm_before_residual = config.norms.before_residual
        self.input_layernorm = RMSNorm(weights / "input_layernorm", size, epsilon)
        self.hidden_norm = RMSNorm(weights / "hidden_norm", size, epsilon)
        attention = qwen3.Attention if config.qk_norm else llama.Attention
        self.self_attn = attention(decoder, weights / "self_attn", 2 * size)
        self.post_attention_layernorm = RMSNorm(weights / "post_attention_layernorm", size, epsilon)
        self.mlp = GatedMLP(
            weights=weights / "mlp",
            size=size,
            inner_size=decoder.intermediate_size,
            bias=decoder.mlp_bias,
        )

    def forward(self, op: Op, embedded: ir.Value, hidden: ir.Value, state: PassState) -> ir.Value:
        """Embedded and hidden [1, S, D] -> [1, S, D]."""
        normed = self.hidden_norm(op, hidden)
        both = op.Concat(self.input_layernorm(op, embedded), normed, axis=-1)  # [1, S, 2D]
        residual = normed if self.norm_before_residual else hidden
        x = op.Add(residual, self.self_attn.forward(op, both, state, 0))
        return op.Add(x, self.mlp(op, self.post_attention_layernorm(op, x)))


class Model:
    """Embedding, the first layer, regular layers if any, final norm and lm_head."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        decoder = config.decoder
        size = decoder.hidden_size
        layer = qwen3.DecoderLayer if config.qk_norm else llama.DecoderLayer
        self.norm_output = config.norms.output
        self.embed_tokens = Embedding(
            weights=weights / "embed_tokens", vocab_size=decoder.vocab_size, size=size
        )
        self.first = FirstLayer(config, weights / config.first_layer)
        self.layers = [
            layer(decoder, weights / f"layers.{index}")
            for index in range(1, decoder.num_hidden_layers)
        ]
        self.norm = RMSNorm(weights / "norm", size, decoder.rms_norm_eps)
        self.lm_head = DraftHead(
            weights=weights, size=size, count=config.draft_vocab_size, low_rank=config.low_rank
        )

    def forward(self, op: Op, input_ids: ir.Value, hidden: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] and hidden [1, S, D] -> [1, S, D] before the final norm."""
        with op.scope("layers.0"):
            x = self.first.forward(op, state.embed(self.embed_tokens, input_ids), hidden, state)
        for index, layer in enumerate(self.layers, start=1):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return x

    def head(self, op: Op, x: ir.Value) -> tuple[ir.Value, ...]:
        """X [1, R, D] -> logits, recycled hidden states [1, R, D], and ids of `DraftHead`."""
        normed = self.norm(op, x)
        logits, *ids = self.lm_head(op, normed)
        return logits, normed if self.norm_output else x, *ids
