"""ERNIE 4.5 21B-A3B: ERNIE with experts after the first layers, chosen by corrected shares."""

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
from edgellm.export.layers.mlp import GatedMLP
from edgellm.export.models import llama
from edgellm.export.models.ernie4_5 import ROPE
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2,
    "moe_intermediate_size": 48, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """ERNIE's config with experts."""

    routing: Routing = NO_ROUTING
    shared: int = 0  # shared experts, as one of their total width
    first: int = 0  # layers with experts: from this index,
    last: int = 0  # up to this one,
    every: int = 1  # with this interval

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            tie_word_embeddings=True,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
            moe_norm_min=1e-12,
        )
        reader.expect("use_bias", False)  # it would include the head's
        reader.skip("moe_capacity", "moe_use_aux_free")  # for training
        reader.skip("num_nextn_predict_layers")  # MTP layers are exported as drafts
        reader.expect("moe_gate", "topk")
        shared, first, last = (
            reader.read(f"moe_{key}", int)
            for key in ("num_shared_experts", "layer_start_index", "layer_end_index")
        )
        if shared < 0:
            raise UnsupportedModelError(f"config.json: moe_num_shared_experts = {shared}")
        routing = Routing.read(
            reader,
            experts="moe_num_experts",
            top_k="moe_k",
            size="moe_intermediate_size",
            smallest_sum=reader.read("moe_norm_min", float),
        )
        layers = reader.positive("num_hidden_layers")
        return cls.read(
            reader, rope=ROPE, routing=routing, shared=shared, first=first,
            last=layers - 1 if last == -1 else last, every=reader.positive("moe_layer_interval"),
        )  # fmt: skip

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.first <= layer <= self.last and (layer + 1) % self.every == 0


class CorrectedRouter(Router):
    """Router that chooses by shares plus a bias, which is not part of the shares."""

    def __init__(self, weights: Weights, hidden: int, routing: Routing) -> None:
        super().__init__(weights / "gate", hidden, routing)
        self.statics = weights / "moe_statics"

    def bias(self, op: Op) -> ir.Value:
        """Float32 [1, E]."""
        shape = (1, self.routing.experts)
        stored = op.parameter(self.statics.take("e_score_correction_bias", shape, op.dtype))
        return op.Cast(stored, to=int(ir.DataType.FLOAT))


class DecoderLayer(llama.DecoderLayer):
    """Llama's block, with experts in some layers."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.config = config
        hidden, routing, mlp = config.hidden_size, config.routing, weights / "mlp"
        width = config.shared * routing.size
        shared = (
            GatedMLP(
                weights=mlp / "shared_experts",
                size=hidden,
                inner_size=width,
                bias=False,
                activation=config.activation,
            )
            if width
            else None
        )
        stack = experts_of(mlp / "experts", routing.experts, (hidden, routing.size))
        self.experts = Mixture(
            route=CorrectedRouter(mlp, hidden, routing), stack=stack, routing=routing, shared=shared
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        x = op.Add(x, self.self_attn.forward(op, self.input_layernorm(op, x), state, layer))
        network = self.experts if self.config.has_experts(layer) else self.mlp
        return op.Add(x, network(op, self.post_attention_layernorm(op, x)))


class Model(llama.Model):
    """Llama's model with ERNIE's blocks."""

    layer = DecoderLayer
