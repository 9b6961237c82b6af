"""Medusa heads as their project describes them, in plain torch; nothing here is edgellm's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from eagle_reference import BASE_HIDDEN, VOCAB
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def make_tensors(heads: int = 3, blocks: int = 1, *, prefix: str = "", seed: int = 0) -> Tensors:
    """Random heads under the project's names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            name = f"{prefix}{head}.{block}.linear"
            tensors[f"{name}.weight"] = 2 * random(BASE_HIDDEN, BASE_HIDDEN)
            tensors[f"{name}.bias"] = 3 * random(BASE_HIDDEN)
        tensors[f"{prefix}{head}.{blocks}.weight"] = random(VOCAB, BASE_HIDDEN)
    return tensors


def make_heads(
    folder: Path, tensors: Tensors | None = None, file: str = "medusa_lm_head.pt", **config: object
) -> Path:
    """A checkpoint of heads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors() if tensors is None else tensors
    (torch.save if file.endswith(".pt") else save_file)(tensors, folder / file)
    facts = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "a/base"}
    (folder / "config.json").write_text(json.dumps({**facts, **config}))
    return folder


def add_to_model(folder: Path, tensors: Tensors, **config: object) -> Path:
    """Add heads to the checkpoint of their model."""
    whole = load_file(folder / "model.safetensors")
    save_file({**whole, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def log_probs(tensors: Tensors, feature: torch.Tensor, heads: int, blocks: int) -> torch.Tensor:
    """Log-probabilities [heads, V] of the heads after a hidden state [H]."""
    rows = []
    for head in range(heads):
        x = feature
        for block in range(blocks):
            weight, bias = (tensors[f"{head}.{block}.linear.{part}"] for part in ("weight", "bias"))
            x = x + torch.nn.functional.silu(weight @ x + bias)
        rows.append((tensors[f"{head}.{blocks}.weight"] @ x).log_softmax(-1))
    return torch.stack(rows)
