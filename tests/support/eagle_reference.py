"""EAGLE drafts as the papers and the trainers' documents describe them, in plain torch.

`Layout` is one public way of storing a draft, `make_draft` writes a random checkpoint in it,
`Reference` computes the draft's expected outputs. Nothing here comes from edgellm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.masking_utils import sliding_window_overlay

VOCAB, BASE_HIDDEN, BASE_LAYERS = 96, 96, 8
HEADS, KV_HEADS, INNER, EPSILON = 6, 2, 64, 1e-5
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Contents of a checkpoint, and its config without the sizes of the layer."""

    config: dict[str, object] = field(default_factory=dict)
    inner_config: dict[str, object] | None = None  # nested as speculators does
    first: str = "midlayer"
    eagle1: bool = False
    hidden: int = BASE_HIDDEN
    head_dim: int = 16
    layers: int = 1
    draft_vocab: int = 40
    taps: tuple[int, ...] = (2, 4, 5)
    own_embedding: bool = False
    own_head: bool = True
    d2t: bool = True
    t2d: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_shape: tuple[int, ...] = ()  # of the feature of mask rows but its last number; (): none
    rope_theta: float = 1e4
    file: str = "model.safetensors"
    tied_base: bool = True
    window: int = 0  # of the layers `sliding`
    sliding: tuple[int, ...] = ()
    rank: int = 0  # of the low-rank head in the file; 0: none
    candidates: int = 0  # tokens that it retrieves; 0: all


def sizes(layout: Layout) -> dict[str, object]:
    """The part of a config that all trainers share."""
    return {
        "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": layout.hidden, "intermediate_size": INNER,
        "num_hidden_layers": layout.layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": layout.head_dim, "rms_norm_eps": EPSILON,
        "max_position_embeddings": 128,
    }  # fmt: skip


def make_tensors(layout: Layout, seed: int = 0) -> Tensors:
    """Random tensors under the layout's names."""
    generator = torch.Generator().manual_seed(seed)
    size, fused = layout.hidden, len(layout.taps) * BASE_HIDDEN

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(width: int) -> torch.Tensor:
        return 0.5 + torch.rand(width, generator=generator)

    tensors = {"fc.weight": weight(size, 2 * size if layout.eagle1 else fused)}
    if layout.fc_bias:
        tensors["fc.bias"] = 0.3 * weight(size)
    for layer in range(layout.layers):
        name = f"layers.{layer}" if layer else layout.first
        width = size if layer or layout.eagle1 else 2 * size
        rows = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        for part, heads in rows.items():
            projection = f"{name}.self_attn.{part}_proj"
            tensors[f"{projection}.weight"] = 2 * weight(heads * layout.head_dim, width)
            if layout.qkv_bias:
                tensors[f"{projection}.bias"] = weight(heads * layout.head_dim) * 3
        tensors[f"{name}.self_attn.o_proj.weight"] = weight(size, HEADS * layout.head_dim)
        if layout.qk_norm:
            for part in "qk":
                tensors[f"{name}.self_attn.{part}_norm.weight"] = norm(layout.head_dim)
        for part, shape in (
            ("gate", (INNER, size)),
            ("up", (INNER, size)),
            ("down", (size, INNER)),
        ):
            tensors[f"{name}.mlp.{part}_proj.weight"] = weight(*shape)
        tensors[f"{name}.post_attention_layernorm.weight"] = norm(size)
        if layer or not layout.eagle1:
            tensors[f"{name}.input_layernorm.weight"] = norm(size)
        if not layer and not layout.eagle1:
            tensors[f"{name}.hidden_norm.weight"] = norm(size)
    if not layout.eagle1:
        tensors["norm.weight"] = norm(size)
    if layout.norm_before_fc:
        tensors["input_norm.weight"] = norm(fused)
    for index in range(len(layout.taps) if layout.fc_norm else 0):
        tensors[f"fc_norm.{index}.weight"] = norm(BASE_HIDDEN)
    if layout.mask_shape:
        tensors["mask_hidden"] = 2 * weight(*layout.mask_shape, fused) * fused**0.5
    if layout.own_embedding:
        tensors["embed_tokens.weight"] = weight(VOCAB, size) * 5
    if layout.own_head:
        tensors["lm_head.weight"] = weight(layout.draft_vocab, size) * 3
    targets = torch.randperm(VOCAB, generator=generator)[: layout.draft_vocab].sort().values
    if layout.d2t:
        tensors["d2t"] = targets - torch.arange(layout.draft_vocab)
    if layout.t2d:
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, targets, value=True)
    if layout.rank:  # last, so that the others are those of the same draft without it
        tensors |= low_rank_head(tensors["lm_head.weight"], layout.rank, generator)
    return tensors


def low_rank_head(head: torch.Tensor, rank: int, generator: torch.Generator) -> Tensors:
    """Factors near the truncated SVD of a head."""
    left, singular, right = torch.linalg.svd(head, full_matrices=False)
    scaled = left[:, :rank] * singular[:rank]
    noise = 0.1 * torch.randn(*scaled.shape, generator=generator)
    return {
        "efficient_lm_head.weight": (scaled + noise).contiguous(),
        "efficient_lm_head_down_proj.weight": right[:rank].contiguous(),
    }


def make_draft(folder: Path, layout: Layout, seed: int = 0) -> Path:
    """A random draft in this layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors(layout, seed)
    if layout.file == "sharded":
        shards: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
        for index, (name, tensor) in enumerate(tensors.items()):
            shards["ab"[index % 2] + ".safetensors"][name] = tensor
        for shard, part in shards.items():
            save_file(part, folder / shard)
        index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif layout.file.endswith(".bin"):
        torch.save(tensors, folder / layout.file)
    else:
        save_file(tensors, folder / layout.file)
    inner = {**sizes(layout), **(layout.inner_config or {})}
    config = {**layout.config, "transformer_layer_config": inner}
    if layout.inner_config is None:
        config = {**inner, **layout.config}
    if layout.rank:
        config["num_candidates"] = layout.candidates
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """X [S, heads, D]: pairs (i, i + D/2) rotated by position * inv_freq[i]."""
    angles = positions[:, None, None] * inv_freq
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Reference:
    """A draft with a KV cache that can be truncated."""

    def __init__(self, draft: Path, base: Path, layout: Layout, **scale: float) -> None:
        self.layout = layout
        self.tensors = make_tensors(layout)
        shared = load_file(base / "model.safetensors")
        embedding = shared["model.embed_tokens.weight"]
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        head = shared.get("lm_head.weight", embedding)
        self.head = self.tensors.get("lm_head.weight", head)
        self.retrieval = self.head  # [draft vocabulary, D], whose best tokens are scored
        if layout.rank:
            down = self.tensors["efficient_lm_head_down_proj.weight"]
            self.retrieval = self.tensors["efficient_lm_head.weight"] @ down
        offsets = self.tensors.get("d2t", torch.zeros(len(self.head), dtype=torch.int64))
        self.targets = torch.arange(len(self.head)) + offsets
        exponents = torch.arange(0, layout.head_dim, 2) / layout.head_dim
        self.inv_freq = layout.rope_theta**-exponents / scale.get("linear", 1.0)
        self.cache = [(torch.zeros(0, KV_HEADS, layout.head_dim),) * 2] * layout.layers
        self.places = torch.zeros(0, dtype=torch.int64)  # positions of the cache
        self.folder = draft

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Taps [S, T*H] -> [S, D]; zeros stand for the feature of mask rows."""
        weights = self.tensors
        if self.layout.mask_shape:
            is_mask = (taps == 0).all(-1, keepdim=True)
            taps = torch.where(is_mask, weights["mask_hidden"].reshape(-1), taps)
        if self.layout.norm_before_fc:
            taps = rms_norm(taps, weights["input_norm.weight"])
        if self.layout.fc_norm:
            parts = taps.chunk(len(self.layout.taps), -1)
            normed = [rms_norm(x, weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
            taps = torch.cat(normed, -1)
        return taps @ weights["fc.weight"].T + weights.get("fc.bias", 0)

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [S, draft vocabulary] and recycled rows; `mask`: the last rows."""
        layout, weights = self.layout, self.tensors
        self.places = torch.cat([self.places, positions])
        embedded = self.embedding[ids]
        x = hidden
        if layout.eagle1:
            both = torch.cat([embedded, hidden], -1)
            x = both @ weights["fc.weight"].T + weights.get("fc.bias", 0)
        for layer in range(layout.layers):
            name = f"layers.{layer}" if layer else layout.first
            attended, residual = x, x
            if not layer and not layout.eagle1:
                normed = rms_norm(x, weights[f"{name}.hidden_norm.weight"])
                e = rms_norm(embedded, weights[f"{name}.input_layernorm.weight"])
                attended = torch.cat([e, normed], -1)
                residual = normed if layout.norm_before_residual else x
            elif layer:
                attended = rms_norm(x, weights[f"{name}.input_layernorm.weight"])
            x = residual + self._attention(name, layer, attended, positions, mask)
            y = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"])
            gate, up, down = (
                weights[f"{name}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")
            )
            x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        normed = x if layout.eagle1 else rms_norm(x, weights["norm.weight"])
        logits = normed @ self.head.T
        if layout.candidates:
            kept = (normed @ self.retrieval.T).topk(layout.candidates).indices
            scored = logits.gather(-1, kept)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, scored)
        return logits.log_softmax(-1), normed if layout.norm_output else x

    def drop_to(self, rows: int) -> None:
        """Truncate the cache to its first."""
        self.cache = [(keys[:rows], values[:rows]) for keys, values in self.cache]
        self.places = self.places[:rows]

    def _attention(
        self, name: str, layer: int, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        rows, head_dim = len(x), self.layout.head_dim
        parts = []
        for part in "qkv":
            weight = self.tensors[f"{name}.self_attn.{part}_proj.weight"]
            bias = self.tensors.get(f"{name}.self_attn.{part}_proj.bias", 0)
            y = (x @ weight.T + bias).reshape(rows, -1, head_dim)
            if part != "v":
                if self.layout.qk_norm:
                    y = rms_norm(y, self.tensors[f"{name}.self_attn.{part}_norm.weight"])
                y = rotate(y, positions, self.inv_freq)
            parts.append(y)
        old_keys, old_values = self.cache[layer]
        keys, values = torch.cat([old_keys, parts[1]]), torch.cat([old_values, parts[2]])
        self.cache[layer] = keys, values
        before = len(keys) - mask.shape[1]
        seen = torch.cat([torch.ones(rows, before, dtype=torch.bool), mask], 1)
        if layer in self.layout.sliding:
            seen &= sliding_window_overlay(self.layout.window)(
                0, 0, positions[:, None], self.places
            )
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (keys, values))
        scores = torch.einsum("shd,thd->hst", parts[0], keys) * head_dim**-0.5
        chances = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hst,thd->shd", chances, values).reshape(rows, -1)
        return mixed @ self.tensors[f"{name}.self_attn.o_proj.weight"].T


def tree_mask(parents: list[int]) -> np.ndarray:
    """Bool [nodes, nodes]: every node attends to itself and its ancestors."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
