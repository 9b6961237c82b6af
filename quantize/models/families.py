"""Structure of each family's layers, as quantization needs it.

ModelOpt detects itself which layers share an input, and folds their smoothing into the norm before
them. Its result is checked against these tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.layers.delta import CONVOLUTIONS
from edgellm.export.models import (
    cohere2,
    falcon_h1,
    gemma2,
    granite,
    muse_glimmer_text,
    olmo_hybrid,
)

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
_LATENT = {
    "self_attn.q_a_layernorm": ("self_attn.q_b_proj",),
    "self_attn.kv_a_layernorm": ("self_attn.kv_b_proj",),
}
# Of Kimi Linear: its gate of decay, and parts of its mixtures
_FORGETS = ("f_a_proj.", "f_b_proj.", "A_log", "dt_bias")
_MIXTURE = ("experts", "gate", "shared_experts")
# Config keys with an entry for each layer
_OF_LAYERS = (
    "layer_types",
    "layers_block_type",
    "no_rope_layers",
    "layer_rope_theta",
    "mlp_layer_types",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
    "intermediate_size",  # of Gemma 3n
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Names of the experts in a family's layers, and in its checkpoints."""

    block: str = "mlp"  # module of transformers' layer; "": the layer itself
    # Parts of experts in checkpoints by those of transformers
    parts: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[str, ...] = ()  # fused tensors of all experts: gate and up, down

    @property
    def prefix(self) -> str:
        """The name of the module that holds the experts."""
        return f"{self.block}.experts".removeprefix(".")

    def canonical(self, name: str) -> str:
        """Return transformers' name of a layer's tensor, with unfused experts."""
        return self._renamed(name, {theirs: ours for ours, theirs in self.parts.items()})

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor."""
        return self._renamed(name, self.parts)

    def is_float(self, name: str) -> bool:
        """Return whether a matrix stays float: routers, and gates of shared experts."""
        block = self.prefix.removesuffix("experts")
        return name.startswith(block) and name.removeprefix(block).startswith(_ROUTERS)

    def _renamed(self, name: str, parts: Mapping[str, str]) -> str:
        if not parts or ".experts." not in name:
            return name
        return ".".join(parts.get(part, part) for part in name.split("."))


_ROUTERS = ("gate.", "router.", "shared_expert_gate.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The structure of one `model_type`'s layers, by transformers' names."""

    readers: Mapping[str, tuple[str, ...]]  # linear layers after each norm; for folded smoothing
    norm_shift: float = 0.0  # added to a norm's stored weight
    attention: str = "sdpa"  # implementation of transformers that supports all its features
    # Config values with which a one-layer model does not scale the layer's input
    neutral: Mapping[str, Any] = field(default_factory=dict)
    # Name prefixes of checkpoints by those of transformers
    stored: Mapping[str, str] = field(default_factory=dict)
    experts: Experts | None = None
    norm: str = "norm"  # final norm
    embedding: str = "embed_tokens"
    attends: str = "self_attn"  # attention module of a layer
    # Norms before the token mixer and, if separate, before the MLP
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    floats: tuple[str, ...] = ()  # float matrices: decay of states
    # Tensors of checkpoints that are joined along the first axis, by transformers' name
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scales_values: bool = True  # whether v_proj may be scaled: no norm or convolution follows it

    def attention_of(self, names: Iterable[str]) -> str:
        """Return the attention module of a layer with these tensors; "": none."""
        own = [name for name in names if name.startswith(f"{self.attends}.")]
        if any(name.endswith(".A_log") for name in own):  # a state instead of a KV cache
            return ""
        queries = f"{self.attends}.q"
        return self.attends if any(name.startswith(queries) for name in own) else ""

    def canonical(self, name: str) -> str:
        """Return transformers' name of a layer's tensor."""
        name = _moved(name, {theirs: ours for ours, theirs in self.stored.items()})
        name = next((ours for ours, parts in self.joined.items() if name in parts), name)
        return name if self.experts is None else self.experts.canonical(name)

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a layer's tensor."""
        name = name if self.experts is None else self.experts.stored_name(name)
        return _moved(name, self.stored)

    def is_float(self, name: str) -> bool:
        """Return whether a matrix of a layer stays float; `name` is transformers'."""
        if name.removesuffix(".weight") in self.floats:
            return True
        return self.experts is not None and self.experts.is_float(name)

    def linear_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return [out, in] of a linear layer by the checkpoint's name; None: not a linear layer.

        For fused experts, [out, in] of each.
        """
        if len(shape) == 2:
            return None if self.is_float(self.canonical(name)) else (shape[0], shape[1])
        is_joined = self.experts is not None and name in self.experts.joined and len(shape) == 3
        return (shape[1], shape[2]) if is_joined else None


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name whose prefix, if it is one of these, is replaced."""
    found = next((each for each in prefixes if name.startswith(each)), "")
    return prefixes.get(found, "") + name.removeprefix(found)


_BEFORE = Family(readers={"input_layernorm": _QKV, "post_attention_layernorm": _GATED})
# Separate in most checkpoints, joined in those of Qwen3-VL and Qwen3.5
_QWEN_EXPERTS = Experts(joined=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
_MIXED = replace(_BEFORE, experts=_QWEN_EXPERTS)
_POST_NORM = Family(readers={})  # norms only after attention and MLP
_SANDWICH = Family(
    readers={"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATED}, norm_shift=1.0
)  # fmt: skip
_UNSCALED = {"embedding_multiplier": 1.0}
_GRANITE_ROUTER = {"block_sparse_moe.router.": "block_sparse_moe.router.layer."}
_GRANITE_EXPERTS = Experts(
    block="block_sparse_moe",
    joined=tuple(f"block_sparse_moe.{way}put_linear.weight" for way in ("in", "out")),
)
_GEMMA4 = Family(
    readers={},
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    scales_values=False,
)
_GEMMA_EXPERTS = Experts(block="", joined=("experts.gate_up_proj", "experts.down_proj"))
# JSON has no infinity; only transformers' file reader parses its form.
_UNBOUNDED = {"time_step_limit": (0.0, math.inf)}
_LFM2 = Family(
    readers={"operator_norm": _QKV, "ffn_norm": ("feed_forward.w1", "feed_forward.w3")},
    norm="embedding_norm",
    norms=("operator_norm", "ffn_norm"),
)
# The projections of decay and beta also follow the input norm, and stay float.
_DELTA = Family(
    readers={"post_attention_layernorm": _GATED},
    norm_shift=1.0,
    floats=tuple(f"linear_attn.in_proj_{name}" for name in ("a", "b", "ba")),
)
FAMILIES = {
    "apertus": Family(
        readers={"attention_layernorm": _QKV, "feedforward_layernorm": ("mlp.up_proj",)},
        norms=("attention_layernorm", "feedforward_layernorm"),
    ),
    "arcee": Family(
        readers={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.up_proj",)}
    ),
    "bamba": Family(
        readers={
            "input_layernorm": _QKV,
            "pre_ff_layernorm": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        },
        neutral=_UNBOUNDED,
        norm="final_layernorm",
        norms=("input_layernorm", "pre_ff_layernorm"),
    ),
    "cohere2": Family(readers={"input_layernorm": _QKV + _GATED}),
    "ernie4_5": _BEFORE,
    "ernie4_5_moe": replace(
        _BEFORE, stored={"mlp.gate.moe_statics.": "mlp.moe_statics."}, experts=Experts()
    ),
    "exaone4": _POST_NORM,
    "gemma2": replace(_SANDWICH, attention="eager"),  # sdpa lacks soft-capping
    "gemma3_text": _SANDWICH,
    "gemma3n_text": Family(
        readers={},
        floats=(
            *(
                f"altup.{name}"
                for name in ("correction_coefs", "modality_router", "prediction_coefs")
            ),
            "laurel.linear_left",
            "laurel.linear_right",
            "per_layer_input_gate",
            "per_layer_projection",
        ),
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        scales_values=False,
    ),
    "gemma4_text": replace(_GEMMA4, floats=("per_layer_input_gate", "per_layer_projection")),
    "gemma4_unified_text": _GEMMA4,
    "glm4": Family(
        readers={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.gate_up_proj",)}
    ),
    "granite": replace(_BEFORE, neutral=_UNSCALED),
    "granitemoe": Family(
        readers={"input_layernorm": _QKV},
        neutral=_UNSCALED,
        stored=_GRANITE_ROUTER,
        experts=_GRANITE_EXPERTS,
    ),
    "granitemoe_swa": Family(
        readers={"input_layernorm": _QKV},
        neutral=_UNSCALED,
        attention="eager",
        experts=Experts(
            block="block_sparse_moe",
            joined=tuple(f"block_sparse_moe.experts.{part}_proj" for part in ("gate_up", "down")),
        ),
    ),
    "granitemoehybrid": Family(
        readers={"input_layernorm": _QKV, "post_attention_layernorm": ("shared_mlp.input_linear",)},
        neutral={**_UNSCALED, **_UNBOUNDED},
    ),
    "granite_swa": replace(_BEFORE, neutral=_UNSCALED, attention="eager"),  # sdpa lacks sinks
    "falcon_h1": Family(
        readers={"pre_ff_layernorm": ("feed_forward.gate_proj", "feed_forward.up_proj")},
        neutral=_UNBOUNDED,
        norm="final_layernorm",
        norms=("input_layernorm", "pre_ff_layernorm"),
    ),
    "internlm3": _BEFORE,
    "hunyuan_v1_dense": _BEFORE,
    "kimi_linear": Family(
        readers={"post_attention_layernorm": _GATED, **_LATENT},
        floats=(
            *(f"self_attn.forget_gate.f_{part}_proj" for part in "ab"),
            "self_attn.b_proj",
        ),
        stored={
            **{f"self_attn.forget_gate.{name}": f"self_attn.{name}" for name in _FORGETS},
            **{f"mlp.{name}.": f"block_sparse_moe.{name}." for name in _MIXTURE},
        },
        joined={
            "self_attn.conv1d.weight": tuple(f"self_attn.{name}" for name in CONVOLUTIONS),
            # Only transformers saves dense networks so
            **{
                f"mlp.{part}_proj.weight": (f"block_sparse_moe.{part}_proj.weight",)
                for part in ("gate", "up", "down")
            },
        },
        experts=Experts(parts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
        scales_values=False,
    ),
    "laguna": replace(
        _MIXED,
        readers={**_MIXED.readers, "input_layernorm": (*_QKV, "self_attn.g_proj")},
        stored={
            "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
            "mlp.shared_experts.": "mlp.shared_expert.",
        },
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        experts=Experts(
            block="feed_forward", parts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        ),
    ),
    "lfm3": replace(
        _LFM2,
        readers={**_LFM2.readers, "operator_norm": (*_QKV, "self_attn.g_proj")},
        stored={"self_attn.g_proj.": "self_attn.gate_proj."},
    ),
    "llama": _BEFORE,
    "minicpm3": Family(
        readers={
            "input_layernorm": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            **_LATENT,
            "post_attention_layernorm": _GATED,
        },
        neutral={"scale_emb": 1},
    ),
    "ministral3": _BEFORE,
    "mistral": _BEFORE,
    "mixtral": replace(
        _BEFORE,
        stored={"mlp.": "block_sparse_moe."},
        experts=Experts(parts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    ),
    "muse_glimmer_text": replace(
        _SANDWICH, readers={**_SANDWICH.readers, "input_layernorm": (*_QKV, "self_attn.gate_proj")}
    ),
    "nemotron_h": Family(
        readers={"norm": tuple(f"mixer.{part}_proj" for part in "qkv")},
        # Transformers limits time steps from below in prefill, but not in decoding.
        neutral={"mamba_dt_min": 0.0, **_UNBOUNDED},
        experts=Experts(block="mixer"),
        norm="norm_f",
        norms=("norm",),
        embedding="embeddings",
        attends="mixer",
    ),
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "olmo_hybrid": Family(
        readers={},  # norms precede the networks of some layers only
        floats=("linear_attn.a_proj", "linear_attn.b_proj"),
        stored={f"{name}.": f"{published}." for name, published in olmo_hybrid.PUBLISHED.items()},
        joined={"linear_attn.conv1d.weight": tuple(f"linear_attn.{name}" for name in CONVOLUTIONS)},
    ),
    "olmoe": _MIXED,
    "phi3": Family(
        readers={
            "input_layernorm": ("self_attn.qkv_proj",),
            "post_attention_layernorm": ("mlp.gate_up_proj",),
        }
    ),
    "qwen2": _BEFORE,
    "qwen2_moe": _MIXED,
    "qwen3": _BEFORE,
    "qwen3_5_moe_text": replace(_DELTA, experts=_QWEN_EXPERTS),
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _MIXED,
    "qwen3_next": replace(_DELTA, experts=Experts()),
    "seed_oss": _BEFORE,
    "smollm3": _BEFORE,
    "starcoder2": Family(
        readers={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.c_fc",)}
    ),
}
# ModelOpt may fold AWQ's smoothing of the second into the first's output channels.
FOLDS = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json."""
    family = FAMILIES[config["model_type"]]
    if config["model_type"] == "granitemoehybrid" and config.get("num_local_experts", 8):
        # Routers read the second norm too.
        readers = {"input_layernorm": family.readers["input_layernorm"]}
        return replace(family, readers=readers, stored=_GRANITE_ROUTER, experts=_GRANITE_EXPERTS)
    if config["model_type"] == "gemma4_text" and config.get("enable_moe_block"):
        return replace(family, experts=_GEMMA_EXPERTS)
    if config["model_type"] == "nemotron_h" and not _has_mixtures(config):
        return replace(family, experts=None)
    return family


def _has_mixtures(config: Mapping[str, Any]) -> bool:
    """Return whether a layer of Nemotron-H has experts, by any of its keys."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    types = next((config[key] for key in keys if config.get(key)), "E")
    return "moe" in types or "E" in types


def check_family(label: str, model_type: str) -> None:
    """Raise `UnsupportedModelError` for an unknown family."""
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{label}: calibration of {model_type!r} is unsupported",
            hint=f"supported: {', '.join(FAMILIES)}; llm_build --quantize int8 or int4 quantizes "
            "the weights of any model without calibration",
        )


def keep_layers(config: Any, layers: range) -> None:
    """Reduce transformers' complete config to some layers."""
    for key in _OF_LAYERS:
        if isinstance(values := vars(config).get(key), (list, tuple)):
            setattr(config, key, [values[index] for index in layers])
    if (attending := getattr(config, "attn_layer_indices", None)) is not None:
        config.attn_layer_indices = [at for at, each in enumerate(layers) if each in attending]
    _keep_shared_kv(config, layers)
    _keep_experts(config, layers)
    if depth := getattr(config, "scale_depth", None):  # divided by the root of the number of layers
        config.scale_depth = depth * (len(layers) / config.num_hidden_layers) ** 0.5
    config.num_hidden_layers = len(layers)


def _keep_shared_kv(config: Any, layers: range) -> None:
    """Keep sizes of heads, and no keys and values in layers that share them."""
    if (shared := getattr(config, "num_kv_shared_layers", None)) is None:
        return
    if config.model_type == "gemma3n_text":  # see `AltUpStates.plain`
        config.num_kv_shared_layers = 0
        return
    sizes = ("head_dim", "num_key_value_heads")
    own = [config.per_layer_config[layer] for layer in layers]
    config.per_layer_config = {
        index: {size: getattr(each, size) for size in sizes} for index, each in enumerate(own)
    }
    is_shared = layers.start >= config.num_hidden_layers - shared
    config.num_kv_shared_layers = len(layers) if is_shared else 0


def _keep_experts(config: Any, layers: range) -> None:
    """Give the first layer experts if it has some at its original index."""
    first = layers.start
    if (dense := getattr(config, "mlp_only_layers", None)) is not None:
        has = first not in dense and (first + 1) % config.decoder_sparse_step == 0
        config.mlp_only_layers, config.decoder_sparse_step = [] if has else [0], 1
    if (dense_layers := getattr(config, "num_dense_layers", None)) is not None:
        config.num_dense_layers = int(first < dense_layers)
    if (begin := getattr(config, "moe_layer_start_index", None)) is not None:
        last, every = config.moe_layer_end_index, config.moe_layer_interval
        has = begin <= first <= last and (first + 1) % every == 0
        config.moe_layer_start_index, config.moe_layer_end_index = 0, 0 if has else -1
        config.moe_layer_interval = 1


def finish_logits(config: DecoderConfig, logits: torch.Tensor) -> torch.Tensor:
    """Apply the family's scaling or soft-capping to the head's output."""
    if isinstance(config, muse_glimmer_text.Config):
        logits = logits * config.logits_multiplier
    if isinstance(config, gemma2.Config) and config.logits_softcap is not None:
        return torch.tanh(logits / config.logits_softcap) * config.logits_softcap
    if isinstance(config, granite.Config):
        return logits / config.logits_scaling
    if isinstance(config, falcon_h1.Config):
        return logits * config.logits_multiplier
    if isinstance(config, cohere2.Config):
        return logits * config.logit_scale
    return logits
