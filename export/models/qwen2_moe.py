"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts, and one for all rows after a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Router, Routing
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP, GatedMLP
from edgellm.export.models import llama
from edgellm.export.models.qwen2 import expect_full_attention
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "qwen2_moe", "tie_word_embeddings": False, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [1],
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """The config of a Qwen with experts in some layers."""

    routing: Routing = NO_ROUTING
    shared_size: int = 0  # intermediate size of the shared expert
    every: int = 1  # layer `every`, 2 * `every`, ... has experts
    dense_layers: tuple[int, ...] = ()  # exceptions without experts

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        expect_full_attention(reader)
        bias = reader.read("qkv_bias", bool, True)
        return cls.read(
            reader, qkv_bias=bias, **read_mixture(reader),
            shared_size=reader.positive("shared_expert_intermediate_size"),
        )  # fmt: skip

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.every == 0


def read_mixture(reader: ConfigReader) -> dict[str, Any]:
    """Facts of `Config` that all Qwens with experts share."""
    count = "num_local_experts" if reader.optional("num_local_experts", int) else "num_experts"
    if count == "num_local_experts":  # its name in newer files
        reader.expect("num_experts", reader.read(count, int))
    dense = reader.read("mlp_only_layers", list, [])
    if not all(isinstance(layer, int) for layer in dense):
        raise UnsupportedModelError(f"config.json: mlp_only_layers = {dense!r}")
    normalizes = reader.read("norm_topk_prob", bool, False)
    return {
        "routing": Routing.read(
            reader, experts=count, size="moe_intermediate_size", normalizes=normalizes
        ),
        "every": reader.positive("decoder_sparse_step", 1),
        "dense_layers": tuple(dense),
    }


class SharedExpert:
    """Shared expert, times the sigmoid of a gate per token."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.gate = Linear(weights / "shared_expert_gate", config.hidden_size, 1, bias=False)
        self.mlp = GatedMLP(
            weights=weights / "shared_expert",
            size=config.hidden_size,
            inner_size=config.shared_size,
            bias=False,
            activation=config.activation,
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        return op.Mul(op.Sigmoid(self.gate(op, x)), self.mlp(op, x))


def mixture(config: Config, weights: Weights, shared: MLP | None) -> MLP:
    """The experts below `weights`."""
    hidden, routing = config.hidden_size, config.routing
    stack = experts_of(weights / "experts", routing.experts, (hidden, routing.size))
    return Mixture(
        route=Router(weights / "gate", hidden, routing), stack=stack, routing=routing, shared=shared
    )


class DecoderLayer(llama.DecoderLayer):
    """Llama's block, with experts in some layers."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.config = config
        self.experts = mixture(config, weights / "mlp", self.shared(config, weights / "mlp"))

    def shared(self, config: Config, weights: Weights) -> MLP | None:
        """The shared expert."""
        return SharedExpert(config, weights)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        x = op.Add(x, self.self_attn.forward(op, self.input_layernorm(op, x), state, layer))
        network = self.experts if self.config.has_experts(layer) else self.mlp
        return op.Add(x, network(op, self.post_attention_layernorm(op, x)))


class Model(llama.Model):
    """Llama's model with experts."""

    layer = DecoderLayer
