"""OLMoE 1B-7B: Llama with OLMo's norms of queries and keys, and experts."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Router, Routing
from edgellm.export.models import llama, olmo2
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "olmoe",
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "clip_qkv": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """OLMoE's config."""

    routing: Routing = NO_ROUTING
    clip: float | None = None  # bound of queries, keys and values

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        bias = reader.read("attention_bias", bool, False)
        clip = reader.optional("clip_qkv", float)
        if clip is not None and clip <= 0:
            raise UnsupportedModelError(f"config.json: clip_qkv = {clip} is not positive")
        normalizes = reader.read("norm_topk_prob", bool, False)
        count = "num_local_experts" if reader.optional("num_local_experts", int) else "num_experts"
        return cls.read(
            reader,
            qkv_bias=bias,
            o_proj_bias=bias,
            clip=clip,
            routing=Routing.read(reader, experts=count, normalizes=normalizes),
        )


class Attention(olmo2.Attention):
    """OLMo's attention with clipped queries, keys and values in some models."""

    def attend(
        self, op: Op, state: PassState, layer: int, q: ir.Value, k: ir.Value, v: ir.Value
    ) -> ir.Value:
        """Q [1, S, heads*D], k and v [1, S, kv_heads*D] -> [1, S, heads*D]."""
        clip = self.config.clip if isinstance(self.config, Config) else None
        if clip is not None:
            least, maximum = (op.constant(bound, op.dtype) for bound in (-clip, clip))
            q, k, v = (op.Clip(each, least, maximum) for each in (q, k, v))
        return super().attend(op, state, layer, q, k, v)


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with OLMoE's attention and experts."""

    attention = Attention

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden, routing, mlp = config.hidden_size, config.routing, weights / "mlp"
        stack = experts_of(mlp / "experts", routing.experts, (hidden, routing.size))
        self.mlp = Mixture(
            route=Router(mlp / "gate", hidden, routing), stack=stack, routing=routing
        )


class Model(llama.Model):
    """Llama's model with OLMoE's blocks."""

    layer = DecoderLayer
