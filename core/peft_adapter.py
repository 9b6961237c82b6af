"""LoRA adapters in PEFT's format: linear layers that they change, ranks and scales.

A layer that computes x W^T becomes x W^T + scale * (x A^T) B^T, A [rank, in], B [out, rank].
Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.artifact import hash_file
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.resources import require_regular_files
from edgellm.core.safetensors_io import Safetensors
from edgellm.core.strict_json import parse

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_TOWERS = re.compile(r"\b(?:language_model|text_model|thinker)\.")
_FLOATS = "F32", "F16", "BF16"
HEAD = "lm_head"  # the only linear layer outside of others
# Keys that the tensors imply as well, or that concern training only.
_NOT_NEEDED = frozenset(
    [
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "auto_mapping",
        "peft_version",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",
        "eva_config",
        "qalora_group_size",
        "megatron_core",
    ]
)
_READ = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "init_lora_weights",
    ]
)
# Other initializations change the base, so it is not the one that the config names.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_MERGE = (
    "merge it with PEFT, model.merge_and_unload().save_pretrained(...), and export the result as "
    "--model_dir"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The low-rank update of a linear layer."""

    a: str  # the tensor [rank, in]
    b: str  # the tensor [out, rank]
    rank: int
    in_features: int
    out_features: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder with an adapter of PEFT."""

    folder: Path
    layers: Mapping[str, LowRank]  # by `plain_name` of PEFT's names
    tensors: Safetensors


def plain_name(name: str) -> str:
    """A layer's name in a language model without encoder: "model.layers.0.mlp.up_proj"."""
    return _TOWERS.sub("", name).replace("model.model.", "model.")


def read_adapter(folder: Path) -> Adapter:
    """Read config and tensor headers of an adapter, without weights.

    Raises:
        EdgeLLMError: the folder has no adapter.
        UnsupportedModelError: it does more than add products to linear layers.
        BrokenArtifactError: damaged files, or a config that contradicts the tensors.
    """
    config = _read_config(folder)
    _require_plain_lora(folder, config)
    if not (folder / WEIGHTS).exists():
        raise EdgeLLMError(
            f"{folder} has no {WEIGHTS}",
            hint="save the adapter with PEFT's save_pretrained(..., safe_serialization=True)",
        )
    tensors = Safetensors([folder / WEIGHTS])
    return Adapter(folder, _layers(folder, config, tensors), tensors)


def hash_adapters(folders: Mapping[str, str]) -> dict[str, str]:
    """Hashes of the files of adapters by name; missing files are left out."""
    paths = {
        f"adapter {name}, {file}": Path(folder).expanduser() / file
        for name, folder in folders.items()
        for file in (CONFIG, WEIGHTS)
    }
    return {name: hash_file(path).sha256 for name, path in paths.items() if path.is_file()}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not folder.is_dir():
        raise EdgeLLMError(f"no such folder: {folder}", hint="give the folder that PEFT saved")
    require_regular_files(folder)
    try:
        config = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        raise EdgeLLMError(
            f"{folder} holds no {CONFIG}", hint="give the folder that PEFT saved"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenArtifactError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise BrokenArtifactError(f"{path} does not hold a JSON object")
    return config


def _require_plain_lora(folder: Path, config: Mapping[str, Any]) -> None:
    """Reject adapters that are not the sum in this module's docstring."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{folder} is an adapter of the kind {kind!r}, not LORA")
    more = {name: value for name, value in config.items() if name not in _READ | _NOT_NEEDED}
    stated = next((f"{name}: {value!r}" for name, value in more.items() if value), "")
    if config.get("bias", "none") != "none":
        stated = f"bias: {config['bias']!r}"
    if stated:
        raise UnsupportedModelError(f"{folder / CONFIG} has {stated[:80]}", hint=_MERGE)
    begun = config.get("init_lora_weights")
    if not any(begun is one or (isinstance(one, str) and begun == one) for one in _BEGINNINGS):
        raise UnsupportedModelError(
            f"{folder / CONFIG} has init_lora_weights: {begun!r}, which changes the base, too",
            hint="save the adapter with PEFT's path_initial_model_for_weight_conversion",
        )


def _layers(folder: Path, config: Mapping[str, Any], tensors: Safetensors) -> dict[str, LowRank]:
    pairs: dict[str, dict[str, str]] = {}
    for name, info in tensors.infos().items():
        found = _TENSOR.fullmatch(name)
        if found is None or ("." not in found[1] and found[1] != HEAD):
            raise UnsupportedModelError(f"{folder / WEIGHTS} has the tensor {name}", hint=_MERGE)
        if info.dtype not in _FLOATS or len(info.shape) != 2:
            raise BrokenArtifactError(
                f"{folder / WEIGHTS}: {name} is {info.dtype} {list(info.shape)}, not a matrix of "
                "floats"
            )
        pairs.setdefault(found[1], {})[found[2]] = name
    if not pairs:
        raise BrokenArtifactError(f"{folder / WEIGHTS} has no tensors")
    layers: dict[str, LowRank] = {}
    for module, names in pairs.items():
        if len(names) < 2:
            other = "B" if "A" in names else "A"
            raise BrokenArtifactError(f"{folder / WEIGHTS} lacks lora_{other} of {module}")
        layers[plain_name(module)] = _layer(folder, config, tensors, module, names)
    return layers


def _layer(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Safetensors,
    module: str,
    names: Mapping[str, str],
) -> LowRank:
    rank = _number(folder, "r", _of_pattern(folder, config, "rank_pattern", module, "r"))
    alpha = _number(
        folder, "lora_alpha", _of_pattern(folder, config, "alpha_pattern", module, "lora_alpha")
    )
    infos = tensors.infos()
    a, b = infos[names["A"]].shape, infos[names["B"]].shape
    if a[0] != rank or b[1] != rank:
        raise BrokenArtifactError(
            f"{folder}: {module} has rank {a[0]} in lora_A and {b[1]} in lora_B, {CONFIG} says "
            f"{rank:g}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(
        a=names["A"], b=names["B"], rank=a[0], in_features=a[1], out_features=b[0], scale=scale
    )


def _of_pattern(
    folder: Path, config: Mapping[str, Any], patterns: str, module: str, default: str
) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in PEFT."""
    found = config.get(patterns) or {}
    try:
        for pattern, value in found.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    except (re.error, AttributeError, TypeError) as error:
        raise BrokenArtifactError(f"{folder / CONFIG}: {patterns} is damaged: {error}") from None
    return config.get(default)


def _number(folder: Path, name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (name == "r" and value <= 0):
        raise BrokenArtifactError(f"{folder / CONFIG}: {name} is {value!r}")
    return value
