"""Nemotron-H and Nemotron 3: layers of Mamba 2, attention, MLP or experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import EXPERTS, FULL, NETWORK, AttentionKind, check_length
from edgellm.export.config.layer_types import LINEAR as MAMBA
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.experts import (
    NO_ROUTING,
    SQUARED_RELU,
    Mixture,
    Routing,
    SigmoidRouter,
)
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mamba import NO_MAMBA, Mamba2, MambaSizes, expect_unbounded
from edgellm.export.layers.mlp import MLP, FeedForward
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

_LETTERS = {"M": MAMBA, "E": EXPERTS, "*": FULL, "-": NETWORK}
_OLDER = {"mamba": MAMBA, "attention": FULL}
TINY = {
    **{
        key: value for key, value in llama.TINY.items() if not key.startswith(("rms", "num_hidden"))
    },
    "model_type": "nemotron_h",
    "tie_word_embeddings": False,
    "layers_block_type": [MAMBA, FULL, EXPERTS, NETWORK, MAMBA],
    "head_dim": 32,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
}
# Of training, of other tools, and of layers that predict tokens, which are beside the model.
_UNREAD = (
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_chunk_size",
    "mamba_dt_init_floor",
    "mamba_dt_max",
    "mamba_expand",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "output_router_logits",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "use_mamba_kernels",
)
# Keys of expert routing.
_OF_EXPERTS = (
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_local_experts",
    "routed_scaling_factor",
    "topk_group",
)
_LEAST_STEP = 0.01  # time steps that a lower bound would change


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Nemotron-H's config."""

    types: tuple[str, ...] = ()  # of the layers
    mamba: MambaSizes = NO_MAMBA
    routing: Routing = NO_ROUTING
    shared_size: int = 0  # width of the shared expert
    latent_size: int | None = None  # of the experts' input; None: the hidden size

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*_UNREAD)
        types = _layer_types(reader)
        reader.assume(
            num_hidden_layers=len(types),
            mlp_hidden_act="relu2",
            layer_norm_epsilon=1e-5,
            head_dim=128,
            max_position_embeddings=4096,
            intermediate_size=21504,
        )
        for key in ("attention_bias", "mamba_proj_bias", "tie_word_embeddings"):
            reader.expect(key, False)
        reader.expect("sliding_window")
        check_length(reader, "layers_block_type", types)
        config = cls.read(
            reader,
            rope=None,
            activation_key="mlp_hidden_act",
            epsilon_key="layer_norm_epsilon",
            mlp_bias=reader.read("mlp_bias", bool, False),
            is_recurrent=MAMBA in types,
            types=tuple(types),
            mamba=_mamba_sizes(reader),
            **_experts(reader) if EXPERTS in types else {},
        )
        reader.skip(*_OF_EXPERTS)
        attends = AttentionKind(None)
        return config.attending(tuple(attends if each == FULL else None for each in types))


def _layer_types(reader: ConfigReader) -> list[str]:
    """Layer types, from one of three keys."""
    found: list[list[str] | None] = [
        reader.optional(key, list) for key in ("layers_block_type", "layer_types")
    ]
    if letters := reader.optional("hybrid_override_pattern", str):
        found.append([_LETTERS.get(letter, letter) for letter in letters])
    given = [
        [_OLDER.get(str(each), each) for each in types] for types in found if types is not None
    ]
    types = given[0] if given else [MAMBA, EXPERTS, FULL, NETWORK]
    if any(other != types for other in given):
        raise UnsupportedModelError("config.json: layers_block_type and its like contradict")
    if unknown := [each for each in types if each not in _LETTERS.values()]:
        raise UnsupportedModelError(
            f"config.json: layers_block_type names {unknown[0]!r}, which is not supported",
            hint=f"supported: {', '.join(_LETTERS.values())}",
        )
    if FULL not in types:
        raise UnsupportedModelError("config.json: no layer attends, which is not supported")
    return types


def _mamba_sizes(reader: ConfigReader) -> MambaSizes:
    reader.expect("mamba_hidden_act", "silu", "swish")
    reader.expect("mamba_ssm_cache_dtype", "float32")
    expect_unbounded(reader)
    _expect_small_steps(reader)
    for key, older in (
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
        ("use_conv_bias", "mamba_conv_bias"),
    ):
        if (value := reader.optional(older, object)) is not None:
            reader.replace(**{key: value})
    bias = reader.read("use_bias", bool, False)
    return MambaSizes(
        heads=reader.positive("mamba_num_heads", 128),
        head_dim=reader.positive("mamba_head_dim", 64),
        groups=reader.positive("n_groups", 8),
        state=reader.positive("ssm_state_size", 128),
        window=reader.positive("conv_kernel", 4),
        conv_bias=reader.read("use_conv_bias", bool, True),
        in_bias=bias,
        out_bias=bias,
    )


def _expect_small_steps(reader: ConfigReader) -> None:
    """`time_step_min` is where training began.

    Transformers bounds the steps of a prompt by it, but not those after; the models were trained
    without a bound.
    """
    for key in ("time_step_min", "mamba_dt_min"):
        least = reader.read(key, float, 0.001)
        if not least <= _LEAST_STEP:
            raise UnsupportedModelError(f"config.json: {key} = {least} would bound steps")


def _experts(reader: ConfigReader) -> dict[str, Any]:
    for key in ("n_group", "n_shared_experts", "topk_group"):
        reader.expect(key, 1)
    reader.expect("mlp_hidden_act", "relu2")
    count = "num_local_experts" if reader.optional("num_local_experts", int) else "n_routed_experts"
    reader.assume(n_routed_experts=8, num_experts_per_tok=2)
    reader.assume(moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688)
    routing = Routing.read(
        reader,
        experts=count,
        size="moe_intermediate_size",
        normalizes=reader.read("norm_topk_prob", bool, True),
        added=1e-20,
        scale=reader.read("routed_scaling_factor", float, 1.0),
    )
    latent = reader.optional("moe_latent_size", int)
    if latent is not None and latent < 1:
        raise UnsupportedModelError(f"config.json: moe_latent_size = {latent} is not positive")
    shared = reader.positive("moe_shared_expert_intermediate_size")
    routing = replace(routing, gating=SQUARED_RELU)
    return {"routing": routing, "shared_size": shared, "latent_size": latent}


class Mamba(Mamba2):
    """Nemotron's Mamba 2."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(
            sizes=config.mamba,
            weights=weights,
            hidden=config.hidden_size,
            epsilon=config.rms_norm_eps,
            rows=ROWS,
        )


def _network(config: Config, weights: Weights, inner: int) -> FeedForward:
    sizes = config.hidden_size, inner, config.hidden_size
    first, second = weights / "up_proj", weights / "down_proj"
    return FeedForward(
        first=first, second=second, sizes=sizes, activation=config.activation, bias=config.mlp_bias
    )


def _mixture(config: Config, weights: Weights) -> Mixture:
    hidden, routing, latent = config.hidden_size, config.routing, config.latent_size
    gate = weights / "gate"
    router = SigmoidRouter(
        weights=gate, hidden=hidden, routing=routing, bias=(gate, "e_score_correction_bias")
    )
    names, sizes = ("up_proj", "up_proj", "down_proj"), (latent or hidden, routing.size)
    bias = config.mlp_bias
    between = None
    if latent is not None:
        between = (
            Linear(weights / "fc1_latent_proj", hidden, latent, bias=bias),
            Linear(weights / "fc2_latent_proj", latent, hidden, bias=bias),
        )
    return Mixture(
        route=router,
        stack=experts_of(weights / "experts", routing.experts, sizes, names, is_gated=False),
        routing=routing,
        shared=_network(config, weights / "shared_experts", config.shared_size),
        around=between,
    )


class DecoderLayer:
    """Norm and mixer of any type."""

    def __init__(self, config: Config, weights: Weights, kind: str) -> None:
        mixer = weights / "mixer"
        self.norm = RMSNorm(weights / "norm", config.hidden_size, config.rms_norm_eps)
        self.sequential: llama.Layer | None = None
        self.network: MLP | None = None
        if kind == MAMBA:
            self.sequential = Mamba(config, mixer)
        elif kind == FULL:
            self.sequential = llama.Attention(config, mixer)
        elif kind == EXPERTS:
            self.network = _mixture(config, mixer)
        else:
            self.network = _network(config, mixer, config.intermediate_size)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        rows = self.norm(op, x)
        if self.sequential is not None:
            return op.Add(x, self.sequential.forward(op, rows, state, layer))
        assert self.network is not None
        return op.Add(x, self.network(op, rows))


class Model(llama.Model):
    """Llama's model with such blocks."""

    embedding_name, norm_name = "embeddings", "norm_f"

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> DecoderLayer:
        """A block of the layer's type."""
        assert isinstance(config, Config)
        return DecoderLayer(config, weights, config.types[index])
