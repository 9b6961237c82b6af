"""Muse-Glimmer's assistant, a DFlash draft as transformers saves it, under the names of z-lab's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgellm.export.checkpoints.checkpoint import Checkpoint, Renamed
from edgellm.export.config.layer_types import SLIDING
from edgellm.export.config.reader import ConfigReader

_MODEL_TYPE, _ARCHITECTURE = "muse_glimmer_assistant", "MuseGlimmerAssistantModel"
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_DEFAULTS = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
_THETA = 5e5


def as_dflash(checkpoint: Checkpoint) -> Checkpoint:
    """An assistant as a DFlash draft; other checkpoints as they are.

    Raises:
        UnsupportedModelError: a value of another type.
    """
    if checkpoint.config.get("model_type") != _MODEL_TYPE:
        return checkpoint
    names = {}
    for stored in checkpoint.tensors.infos():
        old = next((each for each in _RENAMED if stored.startswith(each)), "")
        names[_RENAMED.get(old, "") + stored.removeprefix(old)] = stored
    return replace(
        checkpoint,
        config=_config(checkpoint.config),
        tensors=Renamed(checkpoint.tensors, names),
    )


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in config.items() if value is not None}
    found = {**_DEFAULTS, **given}
    reader = ConfigReader(found)
    layers = reader.positive("num_hidden_layers")
    # There a token attends to as many positions before its own, here to one less
    window = reader.positive("sliding_window") + 1
    rope = {"rope_theta": _THETA, **reader.read("rope_parameters", dict, {})}
    return {
        "layer_types": [SLIDING] * layers,
        **found,
        "model_type": "qwen3",
        "architectures": [_ARCHITECTURE],
        "rope_parameters": rope,
        "sliding_window": window,
        "is_causal": False,
    }
