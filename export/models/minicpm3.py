"""MiniCPM 3: keys and values from a latent vector; RoPE applies to a part of each key.

Multi-head latent attention (arXiv 2405.04434). The cache holds what the latent expands to: keys of
a head and, with zeros after them, its values, so that every backend's attention computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import AttentionKind
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RULES, RopeTraits, read_rope
from edgellm.export.layers.attention import PassState, merge_heads, split_heads
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import granite, llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "minicpm3", "num_key_value_heads": 6, "q_lora_rank": 64,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 48,
}  # fmt: skip
# YaRN's factor would apply to the scores, too.
_ROPE = RopeTraits(rules={kind: RULES[kind] for kind in ("default", "linear", "longrope")})
_NORM_EPSILON = 1e-6  # of latent vectors, independent of the config


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(granite.Config):
    """MiniCPM 3's config; `head_dim` is that of a key."""

    rotary_dim: int = 0  # rotary dimensions of a key
    value_dim: int = 0  # of a head
    query_rank: int | None = None  # of the latent vector of queries; None: none
    rank: int = 0  # of the latent vector of keys and values

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            num_key_value_heads=40, tie_word_embeddings=True, kv_lora_rank=256, q_lora_rank=768,
            qk_nope_head_dim=64, qk_rope_head_dim=32, scale_emb=12, scale_depth=1.4,
            dim_model_base=256,
        )  # fmt: skip
        found = cls.latent(
            reader,
            mlp_bias=reader.read("mlp_bias", bool, False),
            embedding_scale=reader.nonzero("scale_emb", 1.0),
        )
        layers, hidden = found.num_hidden_layers, found.hidden_size
        depth = reader.optional("scale_depth", float)
        base = reader.optional("dim_model_base", int) or hidden
        rope = read_rope(reader, found.rotary_dim, found.max_position_embeddings, _ROPE)
        config = replace(
            found,
            residual_multiplier=1.0 if depth is None else depth / layers**0.5,
            logits_scaling=hidden / base,
        )
        return config.attending((AttentionKind(rope),) * layers)

    @classmethod
    def latent(cls, reader: ConfigReader, **traits: Any) -> Config:
        """Facts of all models with latent attention; `traits` are their own.

        Raises:
            UnsupportedModelError: heads share keys, or values are wider than keys.
        """
        heads, hidden = (reader.positive(key) for key in ("num_attention_heads", "hidden_size"))
        reader.expect("num_key_value_heads", heads)
        reader.skip("qk_head_dim")  # transformers derives it
        rotary_dim = reader.positive("qk_rope_head_dim")
        head_dim = reader.positive("qk_nope_head_dim") + rotary_dim
        value_dim = reader.optional("v_head_dim", int) or hidden // heads
        if not 0 < value_dim <= head_dim:
            raise UnsupportedModelError(
                f"config.json: v_head_dim = {value_dim}, but keys have {head_dim}"
            )
        query_rank = reader.optional("q_lora_rank", int)
        if query_rank is not None and query_rank < 1:
            raise UnsupportedModelError(f"config.json: q_lora_rank = {query_rank}")
        reader.replace(head_dim=head_dim)
        bias = reader.read("attention_bias", bool, False)
        found = cls.read(
            reader,
            rope=None,
            qkv_bias=bias,
            o_proj_bias=bias,
            rotary_dim=rotary_dim,
            value_dim=value_dim,
            query_rank=query_rank,
            rank=reader.positive("kv_lora_rank"),
            **traits,
        )
        assert isinstance(found, cls)
        return found


class Attention(llama.Attention):
    """Attention with queries, keys and values from latent vectors."""

    def __init__(self, config: Config, weights: Weights) -> None:
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.latent, rank = config, config.query_rank
        query, bias = heads * config.head_dim, config.qkv_bias
        self.q_norm = None
        if rank is None:
            self.q_proj = Linear(weights / "q_proj", hidden, query, bias=False)
        else:
            self.q_a_proj = Linear(weights / "q_a_proj", hidden, rank, bias=bias)
            self.q_norm = RMSNorm(weights / "q_a_layernorm", rank, _NORM_EPSILON)
            self.q_proj = Linear(weights / "q_b_proj", rank, query, bias=False)
        both = config.rank + config.rotary_dim
        self.kv_a_proj = Linear(weights / "kv_a_proj_with_mqa", hidden, both, bias=bias)
        self.kv_norm = RMSNorm(weights / "kv_a_layernorm", config.rank, _NORM_EPSILON)
        fixed, value = heads * (config.head_dim - config.rotary_dim), heads * config.value_dim
        expanded = {"kv_b_proj": fixed + value}
        if (weights / "k_b_proj").info("weight") is not None:  # GGUF files may have two
            expanded = {"k_b_proj": fixed, "v_b_proj": value}
        self.expand = [
            Linear(weights / name, config.rank, width, bias=False)
            for name, width in expanded.items()
        ]
        self.o_proj = Linear(weights / "o_proj", value, hidden, bias=config.o_proj_bias)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        config = self.latent
        heads, fixed = config.num_attention_heads, config.head_dim - config.rotary_dim
        rows = x if self.q_norm is None else self.q_norm(op, self.q_a_proj(op, x))
        q = split_heads(op, self.q_proj(op, rows), config.head_dim)
        q_fixed, q_rotary = _split(op, q, fixed, config.rotary_dim)
        latent, rotary = _split(op, self.kv_a_proj(op, x), config.rank, config.rotary_dim)
        k_fixed, v = self._expanded(op, self.kv_norm(op, latent), fixed)
        shared = split_heads(op, rotary, config.rotary_dim)  # among all heads
        k_rotary = op.Expand(shared, op.constant([1, 1, heads, 1]))
        queries, keys = (  # rotary dimensions first, as in other models
            merge_heads(op, op.Concat(first, second, axis=-1))
            for first, second in ((q_rotary, q_fixed), (k_rotary, k_fixed))
        )
        values = merge_heads(op, _padded(op, v, config.head_dim - config.value_dim))
        y = split_heads(op, state.attend(layer, queries, keys, values, heads), config.head_dim)
        bounds = (op.constant([at]) for at in (0, config.value_dim, -1))
        return self.o_proj(op, merge_heads(op, op.Slice(y, *bounds)))

    def _expanded(self, op: Op, latent: ir.Value, fixed: int) -> tuple[ir.Value, ...]:
        """Keys without rotary dimensions and values [1, S, heads, n] of latent [1, S, rank]."""
        first, *others = (layer(op, latent) for layer in self.expand)
        value_dim = self.latent.value_dim
        if others:
            return split_heads(op, first, fixed), split_heads(op, others[0], value_dim)
        return _split(op, split_heads(op, first, fixed + value_dim), fixed, value_dim)


def _split(op: Op, x: ir.Value, first: int, second: int) -> tuple[ir.Value, ...]:
    return op.outputs(2, "Split", x, op.constant(np.array([first, second])), axis=-1)


def _padded(op: Op, x: ir.Value, count: int) -> ir.Value:
    """X [1, S, heads, n] with zeros after it, whatever x holds; not every backend has Pad."""
    if not count:
        return x
    first = op.Slice(x, *(op.constant([at]) for at in (0, 1, -1)))
    nothing = op.Where(op.constant(np.False_), first, op.constant(0, op.dtype))
    return op.Concat(x, op.Expand(nothing, op.constant([1, 1, 1, count])), axis=-1)


class DecoderLayer(granite.DecoderLayer):
    """Granite's block with such attention."""

    attention = Attention


class Model(granite.Model):
    """Granite's model with such blocks."""

    layer = DecoderLayer
