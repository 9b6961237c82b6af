"""Qwen3-ASR as its authors publish it, under transformers' names.

Source: the package qwen-asr 0.0.6 (configuration and modelling files), transformers' conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed
from edgellm.export.config.reader import ConfigReader

_MODEL_TYPE, _NESTED = "qwen3_asr", "thinker_config"
_PREFIXES = {  # the first that fits
    "thinker.model.": "model.language_model.",
    "thinker.lm_head.": "lm_head.",
    "thinker.audio_tower.proj1.": "model.multi_modal_projector.linear_1.",
    "thinker.audio_tower.proj2.": "model.multi_modal_projector.linear_2.",
    "thinker.": "model.",
}
# Keys that do not change the computation, and those that other keys decide
_TOP = (_NESTED, "support_languages", "tie_word_embeddings")
_STORED = ("model_type", "architectures", "dtype", "transformers_version", "quantization_config")
_THINKER = (
    "audio_config",
    "text_config",
    "audio_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "user_token_id",
    "initializer_range",
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
)
_AUDIO = ("max_source_positions", "conv_chunksize", "num_hidden_layers", "tie_word_embeddings")
_EXPERTS = (  # left from Qwen3-Omni: the text model is dense
    "decoder_sparse_step",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "num_experts",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
    "mlp_only_layers",
)
_AXES = ("mrope_section", "mrope_interleaved", "interleaved")  # all axes have one position
_AUDIO_DEFAULTS = {
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "n_window": 100,
    "n_window_infer": 400,
    "output_dim": 3584,
}
_TEXT_DEFAULTS = {
    "hidden_size": 4096,
    "max_position_embeddings": 128000,
    "rope_theta": 5e6,
    "tie_word_embeddings": False,
}


def as_transformers(checkpoint: Checkpoint) -> Checkpoint:
    """A published checkpoint of Qwen3-ASR in transformers' layout; others as they are.

    Keys that are unknown here become keys of `text_config`, whose reader rejects them.

    Raises:
        UnsupportedModelError: a forced aligner, or a value of another type.
    """
    config = checkpoint.config
    if config.get("model_type") != _MODEL_TYPE or config.get(_NESTED) is None:
        return checkpoint
    thinker = ConfigReader(config).read(_NESTED, dict)
    if thinker.get("classify_num") is not None:
        raise UnsupportedModelError(
            f"{checkpoint.label} is a forced aligner: its timestamps are not computed here",
            hint="give a checkpoint of Qwen3-ASR that transcribes",
        )
    names = {_renamed(stored): stored for stored in checkpoint.tensors.infos()}
    return replace(
        checkpoint, config=_config(config, thinker), tensors=Renamed(checkpoint.tensors, names)
    )


def _renamed(name: str) -> str:
    old = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(old, "") + name.removeprefix(old)


def _config(config: Mapping[str, Any], thinker: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model in transformers' layout."""
    reader = ConfigReader(thinker)
    audio = {**_AUDIO_DEFAULTS, **_without(reader.read("audio_config", dict), _AUDIO)}
    text = _text_config(reader.read("text_config", dict))
    stored = {key: config[key] for key in _STORED if key in config}
    facts = {key: thinker[key] for key in ("audio_token_id", "dtype") if key in thinker}
    others = _without(thinker, _THINKER) | _without(config, (*_TOP, *_STORED))
    return {
        "tie_word_embeddings": text["tie_word_embeddings"],
        **facts,
        **stored,
        "audio_config": {**audio, "model_type": "qwen3_asr_encoder"},
        "text_config": {**others, **text, "model_type": "qwen3"},
    }


def _text_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """A published text config as one of Qwen3."""
    reader = ConfigReader(text)
    reader.expect("model_type", "qwen3_asr_text", "qwen3")
    found = {**_TEXT_DEFAULTS, **_without(text, _EXPERTS)}
    for key in ("rope_parameters", "rope_scaling"):
        if (rope := reader.optional(key, dict)) is not None:
            found[key] = _without(rope, _AXES)
    return found


def _without(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys and value is not None}
