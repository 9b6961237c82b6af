"""Whisper (arXiv 2212.04356) and Distil-Whisper (2311.00430): speech to text.

Parameter names are those of transformers' WhisperForConditionalGeneration. Shapes: S tokens of a
pass, F frames of a window, A = F / 2 positions of the encoder, H width, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.activations import ACTIVATIONS
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import AttentionKind
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.layers.attention import PassState, split_heads
from edgellm.export.layers.audio_blocks import EPSILON, Attention, WindowEncoder
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "whisper",
    "vocab_size": 161,
    "num_mel_bins": 80,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 80,
    "max_source_positions": 50,
    "max_target_positions": 48,
    "decoder_start_token_id": 101,
    "bos_token_id": 100,
    "eos_token_id": 100,
    "pad_token_id": 100,
}
# Training, decoding (read from generation_config.json) and other tasks
_UNREAD = (
    "activation_dropout",
    "alignment_heads",
    "apply_spec_augment",
    "begin_suppress_tokens",
    "classifier_proj_size",
    "decoder_layerdrop",
    "decoder_start_token_id",
    "dropout",
    "encoder_layerdrop",
    "forced_decoder_ids",
    "init_std",
    "lang_ids",
    "mask_feature_length",
    "mask_feature_min_masks",
    "mask_feature_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_time_prob",
    "max_length",
    "median_filter_width",
    "suppress_ids",
    "suppress_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Whisper's config: the decoder's facts, and those of its encoder."""

    num_mel_bins: int = 80
    num_positions: int = 1500  # A
    encoder_layers: int = 4
    encoder_heads: int = 6
    encoder_inner_size: int = 1536

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*_UNREAD)
        reader.expect("scale_embedding", False)
        reader.expect("use_weighted_layer_sum", False)
        width = reader.positive("d_model", 384)
        heads = reader.positive("decoder_attention_heads", 6)
        encoder_heads = reader.positive("encoder_attention_heads", 6)
        if width % heads or width % encoder_heads:
            raise UnsupportedModelError(
                f"config.json: d_model {width} is no multiple of {heads} and {encoder_heads} heads",
                hint=REMEDY,
            )
        reader.assume(tie_word_embeddings=True, activation_function="gelu")
        reader.replace(
            vocab_size=reader.positive("vocab_size", 51865),
            hidden_size=width,
            num_hidden_layers=reader.positive("decoder_layers", 4),
            num_attention_heads=heads,
            intermediate_size=reader.positive("decoder_ffn_dim", 1536),
            max_position_embeddings=reader.positive("max_target_positions", 448),
            layer_norm_eps=EPSILON,
        )
        config = cls.read(
            reader,
            rope=None,
            epsilon_key="layer_norm_eps",
            activation_key="activation_function",
            activations=("gelu", *ACTIVATIONS),
            num_mel_bins=reader.positive("num_mel_bins", 80),
            num_positions=reader.positive("max_source_positions", 1500),
            encoder_layers=reader.positive("encoder_layers", 4),
            encoder_heads=encoder_heads,
            encoder_inner_size=reader.positive("encoder_ffn_dim", 1536),
        )
        return config.attending((AttentionKind(None),) * config.num_hidden_layers)


class DecoderLayer:
    """Pre-norm block: self-attention, attention to audio, feed-forward network."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.self_attn = Attention(weights / "self_attn", size)
        self.encoder_attn = Attention(weights / "encoder_attn", size)
        self.norms = [
            LayerNorm(weights / name, size, EPSILON)
            for name in (
                "self_attn_layer_norm",
                "encoder_attn_layer_norm",
                "final_layer_norm",
            )
        ]
        self.mlp = FeedForward(
            first=weights / "fc1",
            second=weights / "fc2",
            sizes=(size, config.intermediate_size, size),
            activation=config.activation,
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        own, other = self.self_attn, self.encoder_attn
        norm_self, norm_audio, norm_mlp = self.norms
        h = norm_self(op, x)
        q, k, v = own.q_proj(op, h), own.k_proj(op, h), own.v_proj(op, h)
        x = op.Add(x, own.out_proj(op, state.attend(layer, q, k, v, self.heads)))
        q = other.q_proj(op, norm_audio(op, x))
        x = op.Add(x, other.out_proj(op, state.attend_audio(layer, q, self.heads)))
        return op.Add(x, self.mlp(op, norm_mlp(op, x)))


class Model:
    """The decoder: embeddings of tokens and positions, blocks, final norm, tied head."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        decoder, size = weights / "model.decoder", config.hidden_size
        table = decoder / "embed_tokens"
        self.embed_tokens = Embedding(weights=table, vocab_size=config.vocab_size, size=size)
        self.embed_positions = Embedding(
            weights=decoder / "embed_positions",
            vocab_size=config.max_position_embeddings,
            size=size,
        )
        self.layers = [
            DecoderLayer(config, decoder / f"layers.{index}")
            for index in range(config.num_hidden_layers)
        ]
        self.norm = LayerNorm(decoder / "layer_norm", size, EPSILON)
        head = table if config.tie_word_embeddings else weights / "proj_out"
        self.proj_out = Linear(head, size, config.vocab_size, bias=False)

    def forward(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> residual stream [1, S, H] before the final norm."""
        places = self.embed_positions(op, state.position_ids)
        x = op.Add(state.embed(self.embed_tokens, input_ids), places)
        for index, layer in enumerate(self.layers):
            state.residuals.append(x)
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return x

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        return self.proj_out(op, self.norm(op, x))


class Encoder(WindowEncoder):
    """Features of a window [1, mel bins, F] to hidden states [1, A, H]."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(
            weights=weights / "model.encoder",
            num_mel_bins=config.num_mel_bins,
            num_positions=config.num_positions,
            size=config.hidden_size,
            depth=config.encoder_layers,
            num_heads=config.encoder_heads,
            inner_size=config.encoder_inner_size,
            activation=config.activation,
        )


class CrossKV:
    """Keys and values of audio, of each layer of the decoder."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.head_dim = config.head_dim
        self.readers = [
            Attention(weights / f"model.decoder.layers.{index}.encoder_attn", config.hidden_size)
            for index in range(config.num_hidden_layers)
        ]

    def forward(self, op: Op, hidden: ir.Value) -> Iterator[ir.Value]:
        """Hidden states [1, A, H] -> keys and values [1, heads, A, D], layer by layer."""
        for index, reader in enumerate(self.readers):
            for part, project in (("key", reader.k_proj), ("value", reader.v_proj)):
                with op.scope(f"audio.{index}.{part}"):
                    heads = split_heads(op, project(op, hidden), self.head_dim)
                    yield op.Transpose(heads, perm=[0, 2, 1, 3])
