"""Hugging Face models of one decoder layer and a tiny vocabulary.

ModelOpt quantizes and exports models, not layers. A one-layer model needs the memory of one layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.pipeline.causal_lm import register_causal_lms
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.models.experts import hide_experts, load_experts
from edgellm.quantize.models.families import Family, family_of, keep_layers

_TINY_VOCABULARY = 8
_OTHER_VOCABULARIES = ("vocab_size_per_layer_input",)
LAYER = "model.layers.{}."
Change = Callable[[Any], None]


def quiet_transformers() -> None:
    """Log errors only: warnings on one-layer models would confuse."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def layer_model(
    config: Mapping[str, Any],
    index: int,
    tensors: Mapping[str, F32],
    device: torch.device,
    change: Change = lambda _: None,
) -> PreTrainedModel:
    """Return a float32 model of the layer `index`; its final norm is the identity.

    Args:
        config: config.json of the checkpoint.
        index: of the layer, which decides its type.
        tensors: of that layer, such as "self_attn.q_proj.weight".
        device: where it computes.
        change: of transformers' model without its head, before the tensors are loaded.

    Raises:
        UnsupportedModelError: transformers expects other tensors.
    """
    model = _empty(config, range(index, index + 1), device)
    change(model.model)
    setattr(model.model, family_of(config).norm, nn.Identity())
    load_layer(model, tensors, LAYER.format(index))
    return model


def draft_layer_model(
    config: Mapping[str, Any], tensors: Mapping[str, F32], device: torch.device
) -> PreTrainedModel:
    """Return a draft's layer; its linear layers have the sizes and biases of `tensors`.

    Without input_layernorm it is a first layer. Its hidden states [B, S, D + W] are the residual
    and, after it, the input of q, k and v. Its output is [B, S, D].

    Args:
        config: sizes, RoPE and architecture.
        tensors: as in `layer_model`.
        device: where it computes.
    """
    model = empty_draft_layer(config, tensors, device)
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    if "input_layernorm.weight" not in tensors:
        layer.input_layernorm = _Attended(tensors["self_attn.q_proj.weight"].shape[1])
        model.model.register_forward_pre_hook(_split_states, with_kwargs=True)
    load_layer(model, tensors, "")
    return model.eval().requires_grad_(False)


def empty_draft_layer(
    config: Mapping[str, Any], tensors: Mapping[str, F32], device: torch.device
) -> PreTrainedModel:
    """Return a one-layer model whose linear layers have the sizes of `tensors`."""
    model = _empty(config, range(1), device)
    model.model.norm = nn.Identity()
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    for name in [name for name, each in layer.named_modules() if isinstance(each, nn.Linear)]:
        if (value := tensors.get(f"{name}.weight")) is not None:
            parent, _, own = name.rpartition(".")
            linear = nn.Linear(
                value.shape[1], value.shape[0], bias=f"{name}.bias" in tensors, device=device
            )
            setattr(layer.get_submodule(parent), own, linear)
    return model


class _Attended(nn.Module):
    """Replaces a norm: returns the input of attention that the states include."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.value: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, W]; zeros for token ids, which ModelOpt's export runs."""
        value, self.value = self.value, None
        return x.new_zeros(*x.shape[:2], self.width) if value is None else value


def _split_states(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    states = kwargs.get("inputs_embeds")
    if states is None:
        return args, kwargs
    attended = model.get_submodule("layers.0.input_layernorm")
    assert isinstance(attended, _Attended)
    residual, attended.value = states.split([states.shape[-1] - attended.width, attended.width], -1)
    return args, {**kwargs, "inputs_embeds": residual}


def load_layer(model: PreTrainedModel, tensors: Mapping[str, F32], prefix: str) -> None:
    """Load the model's layer; raise `UnsupportedModelError` with names after `prefix`."""
    layer = model.model.layers[0]
    assert isinstance(layer, nn.Module)
    own = load_experts(layer, tensors, next(layer.parameters()).device)
    state = {name: torch.from_numpy(value) for name, value in own.items()}
    missing, unexpected = layer.load_state_dict(state, strict=False)
    unexpected = [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
    if missing or unexpected:
        names = ", ".join(prefix + name for name in [*missing, *unexpected][:4])
        raise UnsupportedModelError(f"transformers rejects these tensors: {names}")


def head_model(
    config: Mapping[str, Any], norm: Mapping[str, F32], head: F32 | None, device: torch.device
) -> PreTrainedModel:
    """Return a float32 model without layers: final norm and head [V, H], if any.

    Args:
        config: config.json of the checkpoint.
        norm: its tensors [H], "weight" and maybe "bias"; empty: no norm.
        head: weight of the head; None: no head.
        device: where it computes.
    """
    model, name = _empty(config, range(0), device), family_of(config).norm
    if norm:
        state = {part: torch.from_numpy(value.copy()) for part, value in norm.items()}
        model.model.get_submodule(name).load_state_dict(state)
    else:
        setattr(model.model, name, nn.Identity())
    if head is not None:
        vocabulary, hidden = head.shape
        model.lm_head = nn.Linear(hidden, vocabulary, bias=False, device="meta")
        weight = torch.from_numpy(head.copy()).to(device)
        model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return model


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a one-layer model by their names in the layer."""
    found = model.model.layers[0].named_modules()
    return {name: module for name, module in found if isinstance(module, nn.Linear)}


def run_layer(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """Run the model over hidden states [B, S, H], causally; each sample is a sequence."""
    with torch.no_grad():
        return model.model(inputs_embeds=states, use_cache=False).last_hidden_state


def _empty(config: Mapping[str, Any], layers: range, device: torch.device) -> PreTrainedModel:
    """Return a model of these layers with zero weights."""
    family = family_of(config)
    facts = {key: value for key, value in config.items() if key != "quantization_config"}
    facts |= {
        "vocab_size": _TINY_VOCABULARY,
        **{key: _TINY_VOCABULARY for key in _OTHER_VOCABULARIES if key in config},
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **family.neutral,
    }
    facts.pop("architectures", None)
    hf_config = AutoConfig.for_model(**facts)
    keep_layers(hf_config, layers)
    register_causal_lms()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation=family.attention
        )
    for layer in model.model.layers:
        hide_experts(layer, family.experts)
        _hide_floats(layer, family)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _set_buffers(model, hf_config, device)
    model.config.architectures = [type(model).__name__]  # ModelOpt's export reads it
    return model.eval().requires_grad_(False)


class _FloatLinear(nn.Module):
    """A linear layer that ModelOpt does not quantize."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., out] of x [..., in]."""
        return nn.functional.linear(x, self.weight, self.bias)


def _hide_floats(layer: nn.Module, family: Family) -> None:
    """Replace the linear layers that stay float by `_FloatLinear`."""
    for name, module in [*layer.named_modules()]:
        if name in family.floats and isinstance(module, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(layer.get_submodule(parent), own, _FloatLinear(module))


def _set_buffers(model: PreTrainedModel, config: Any, device: torch.device) -> None:
    """Set the buffers that are not stored: `to_empty` left them unset."""
    for name in ("rotary_emb", "pos_emb"):
        rotary = getattr(model.model, name, None)
        if isinstance(rotary, nn.Module):
            setattr(model.model, name, type(rotary)(config=config).to(device))
    own: Any = getattr(model.model, "rotary_embs", [])  # one for each base
    for index, rotary in enumerate(own):
        own[index] = type(rotary)(config=rotary.config).to(device)
    for layer in model.model.layers:
        if (mamba := getattr(layer, "mamba", None)) is not None and hasattr(mamba, "mup_vector"):
            theirs: Any = sys.modules[type(mamba).__module__]
            mamba.mup_vector = theirs.compute_mup_vector(config).to(device)
