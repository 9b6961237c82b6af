"""LoRA adapters as PEFT saves them, and transformers' logits with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# By name: seed, rank, changed layers, and the scale of the products.
ADAPTERS = {
    "all": {"seed": 1, "rank": 4},
    "wide": {"seed": 2, "rank": 8, "lora_alpha": 12},
    "qv": {"seed": 3, "rank": 3, "targets": ("q_proj", "v_proj")},
    "mlp": {"seed": 4, "rank": 2, "targets": ("gate_proj", "down_proj"), "use_rslora": True},
}
SCALES = {"all": 2.0, "wide": 1.5, "qv": 8 / 3, "mlp": 8 / 2**0.5}


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    rank: int = 4,
    seed: int = 1,
    targets: tuple[str, ...] = ALL,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """A random adapter of the layers whose names end as `targets`; `ranks`: of some of them."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not module.endswith(targets):
            continue
        own = (ranks or {}).get(module.rpartition(".")[2], rank)
        a = rng.normal(0, 0.2, (own, weight.shape[1])).astype(np.float32)
        b = rng.normal(0, 0.2, (weight.shape[0], own)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "bias": "none",
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reference(
    checkpoint: Path,
    adapter: Path,
    scales: dict[str, float],
    weights: dict[str, np.ndarray] | None = None,
    kind: str = "AutoModelForCausalLM",
) -> Any:
    """The model in transformers with W + scale * B A; `scales` by ends of names, "": the rest.

    `weights`: in the place of the checkpoint's, by name. `kind`: a class of transformers.
    """
    import torch
    import transformers

    model = getattr(transformers, kind).from_pretrained(checkpoint, dtype=torch.float32)
    for name, weight in (weights or {}).items():
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.from_numpy(np.asarray(weight, np.float32)))
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        if not (found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)):
            continue
        b = load_file(adapter / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
        scale = next(value for end, value in scales.items() if found[1].endswith(end))
        change = scale * torch.from_numpy(b.astype(np.float32) @ tensor.astype(np.float32))
        own = found[1].replace("language_model.model.", "model.language_model.")  # in older files
        with torch.no_grad():
            model.get_submodule(own).weight += change
    return model


def logits_of(model: Any, token_ids: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(token_ids))[None]).logits[0].numpy()
