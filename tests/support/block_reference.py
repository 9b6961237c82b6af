"""Block drafts as their papers and public files describe them, in plain torch.

`Blocks` is one layout, `make_blocks` writes a random checkpoint in it, `predicted` computes the
log-probabilities of a block. Nothing here comes from edgellm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from eagle_reference import (
    BASE_HIDDEN,
    BASE_LAYERS,
    EPSILON,
    HEADS,
    INNER,
    KV_HEADS,
    VOCAB,
    Tensors,
    rms_norm,
    rotate,
)
from safetensors.torch import load_file, save_file
from transformers.masking_utils import sliding_window_overlay

MASK, RANK, HEAD_DIM = 95, 8, 16


@dataclass(frozen=True)
class Blocks:
    """What a checkpoint holds."""

    kind: str = "dflash"
    taps: tuple[int, ...] = (2, 4, 6)
    layers: int = 2
    size: int = 6
    draft_vocab: int = VOCAB
    own_head: bool = False
    qk_norm: bool = True
    from_newest: bool = False
    is_causal: bool = False
    convolves: bool = False
    group: int = 16
    config: dict[str, object] = field(default_factory=dict)
    own: dict[str, object] = field(default_factory=dict)  # of `dflash_config`
    sizes: dict[str, object] = field(default_factory=dict)  # added to those of all layouts
    window: int = 0  # of the layers `sliding`
    sliding: tuple[int, ...] = ()
    is_nested: bool = False  # as speculators writes it

    @property
    def selects(self) -> bool:
        return self.kind == "dflash2"

    @property
    def is_markov(self) -> bool:
        return self.kind == "dspark"


_SPECULATORS = {
    "speculators_model_type": "dspark",
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "sample_from_anchor": True,
    "mask_token_id": MASK,
    "block_size": 6,
    "draft_vocab_size": 40,
    "max_anchors": 9,
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "speculators_version": "0.7",
    "speculators_config": {"algorithm": "dspark"},
}
_DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": RANK,
    "selector_top_k": 16,
    "block_size": 6,
}
LAYOUTS = {
    "dflash": Blocks(config={"architectures": ["DFlashDraftModel"], "block_size": 6}),
    "jetspec": Blocks(
        "jetspec",
        is_causal=True,
        qk_norm=False,
        own={"causal_head": True},
        config={"architectures": ["JetSpecDraftModel"], "block_size": 6},
    ),
    "deepspec": Blocks(
        "dspark",
        own_head=True,
        from_newest=True,
        config={
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 6,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "num_anchors": 7,
        },
    ),
    "speculators": Blocks(
        "dspark",
        own_head=True,
        draft_vocab=40,
        from_newest=True,
        config=_SPECULATORS,
        is_nested=True,
    ),
    "dflash2": Blocks(
        "dflash2",
        convolves=True,
        own=_DFLASH2,
        config={"architectures": ["DFlash2DraftModel"]},
    ),
}


def _windows(*types: str) -> dict[str, object]:
    return {
        "sliding_window": 7,
        "use_sliding_window": True,
        "layer_types": [f"{each}_attention" for each in types],
    }


WINDOWED = {
    "causal_window": Blocks(
        "jetspec",
        is_causal=True,
        config={"architectures": ["DFlashDraftModel"], "block_size": 6},
        sizes=_windows("sliding", "sliding"),
        window=7,
        sliding=(0, 1),
    ),
    "one_window": Blocks(
        own={"causal": False},
        config={"architectures": ["DFlashDraftModel"], "block_size": 6},
        sizes=_windows("sliding", "full"),
        window=7,
        sliding=(0,),
    ),
    "speculators_window": Blocks(
        "dspark",
        own_head=True,
        draft_vocab=40,
        from_newest=True,
        config={**_SPECULATORS, "sliding_window_non_causal": True},
        is_nested=True,
        sizes=_windows("sliding", "sliding"),
        window=7,
        sliding=(0, 1),
    ),
}


def make_tensors(layout: Blocks) -> Tensors:
    """Random tensors under the layout's names."""
    random = torch.Generator().manual_seed(3)
    size = BASE_HIDDEN

    def weight(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * scale * shape[-1] ** -0.5

    def norm(width: int) -> torch.Tensor:
        return 0.5 + torch.rand(width, generator=random)

    found = {
        "fc.weight": weight(size, len(layout.taps) * size),
        "hidden_norm.weight": norm(size),
        "norm.weight": norm(size),
    }
    for layer in range(layout.layers):
        name = f"layers.{layer}"
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{name}.self_attn.{part}_proj.weight"] = weight(heads * HEAD_DIM, size, scale=2)
        found[f"{name}.self_attn.o_proj.weight"] = weight(size, HEADS * HEAD_DIM)
        for part in "qk" if layout.qk_norm else "":
            found[f"{name}.self_attn.{part}_norm.weight"] = norm(HEAD_DIM)
        for part in ("gate", "up"):
            found[f"{name}.mlp.{part}_proj.weight"] = weight(INNER, size)
        found[f"{name}.mlp.down_proj.weight"] = weight(size, INNER)
        found[f"{name}.input_layernorm.weight"] = norm(size)
        found[f"{name}.post_attention_layernorm.weight"] = norm(size)
        for part in ("attention_conv", "mlp_conv") if layout.convolves else ():
            found[f"{name}.{part}.base_kernel"] = 0.5 + weight(2, 2, size)
            rows = 2 * 2 * size // layout.group
            found[f"{name}.{part}.kernel_projection.weight"] = weight(rows, size)
    if layout.own_head:
        found["embed_tokens.weight"] = weight(VOCAB, size, scale=9)
        found["lm_head.weight"] = weight(layout.draft_vocab, size, scale=3)
    if layout.draft_vocab < VOCAB:
        kept = torch.randperm(VOCAB, generator=random)[: layout.draft_vocab].sort().values
        found["d2t"] = kept - torch.arange(layout.draft_vocab)
    if layout.is_markov:
        found["markov_head.markov_w1.weight"] = weight(VOCAB, RANK, scale=4)
        found["markov_head.markov_w2.weight"] = weight(layout.draft_vocab, RANK, scale=4)
        found["confidence_head.proj.weight"] = weight(1, size + RANK)
        found["confidence_head.proj.bias"] = torch.zeros(1)
    if layout.selects:
        found["candidate_selector.predecessor_codebook"] = weight(VOCAB, RANK, scale=4)
        found["candidate_selector.successor_codebook"] = weight(VOCAB, RANK, scale=4)
        found["candidate_selector.hidden_projection.weight"] = weight(RANK, size)
    return found


def make_blocks(folder: Path, layout: Blocks, **more: object) -> Path:
    """A random draft in this layout; `more` goes to the top of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(make_tensors(layout), folder / "model.safetensors")
    sizes = {
        "model_type": "qwen3" if layout.qk_norm else "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "hidden_size": BASE_HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layout.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": 128,
        "rope_theta": 1e4,
        **layout.sizes,
    }
    own = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in layout.taps]}
    config = {**sizes, "num_target_layers": BASE_LAYERS, "dflash_config": {**own, **layout.own}}
    if layout.is_nested:
        config = {"transformer_layer_config": sizes}
    (folder / "config.json").write_text(json.dumps({**config, **layout.config, **more}))
    return folder


class BlockReference:
    """A draft and its base's table and head; computes everything anew."""

    def __init__(self, base: Path, layout: Blocks) -> None:
        self.layout, self.tensors = layout, make_tensors(layout)
        shared = load_file(base / "model.safetensors")
        embedding = shared["model.embed_tokens.weight"]
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.head = self.tensors.get("lm_head.weight", shared.get("lm_head.weight", embedding))
        offsets = self.tensors.get("d2t", torch.zeros(len(self.head), dtype=torch.int64))
        self.targets = torch.arange(len(self.head)) + offsets
        self.inv_freq = 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def predicted(self, taps: torch.Tensor, newest: int, rows: int) -> torch.Tensor:
        """Normed rows [rows, H] of a block after a text with these features [S, T*H]."""
        w, layout = self.tensors, self.layout
        text = rms_norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = self.embedding[torch.tensor([newest, *[MASK] * (rows - 1)])]
        for layer in range(layout.layers):
            name = f"layers.{layer}"
            read = rms_norm(x, w[f"{name}.input_layernorm.weight"])
            x = x + self._around(
                f"{name}.attention_conv", read, lambda rows, n=layer: self._attend(n, rows, text)
            )
            read = rms_norm(x, w[f"{name}.post_attention_layernorm.weight"])
            x = x + self._around(f"{name}.mlp_conv", read, lambda rows, n=name: self._mlp(n, rows))
        return rms_norm(x, w["norm.weight"])

    def log_probs(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, draft vocabulary]."""
        return (rows @ self.head.T).log_softmax(-1)

    def pair_scores(self, rows: torch.Tensor, row: int, before: int) -> torch.Tensor:
        """What a token before adds to the logits of a row, [draft vocabulary]."""
        w = self.tensors
        if self.layout.is_markov:
            return w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
        name = "candidate_selector"
        left = w[f"{name}.predecessor_codebook"][before]
        own = w[f"{name}.hidden_projection.weight"] @ rows[row]
        return w[f"{name}.successor_codebook"] @ (left * own)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            self.tensors[f"{name}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _attend(self, layer: int, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}"
        both, before = torch.cat([text, x]), len(text)
        positions = torch.arange(len(both))
        q, k, v = (
            (rows @ self.tensors[f"{name}.self_attn.{p}_proj.weight"].T).unflatten(
                -1, (-1, HEAD_DIM)
            )
            for p, rows in (("q", x), ("k", both), ("v", both))
        )
        if self.layout.qk_norm:
            q = rms_norm(q, self.tensors[f"{name}.self_attn.q_norm.weight"])
            k = rms_norm(k, self.tensors[f"{name}.self_attn.k_norm.weight"])
        q, k = rotate(q, positions[before:], self.inv_freq), rotate(k, positions, self.inv_freq)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("shd,thd->hst", q, k) * HEAD_DIM**-0.5
        if self.layout.is_causal:
            future = torch.ones(len(x), len(both), dtype=torch.bool).triu(1 + before)
            scores = scores.masked_fill(future, -torch.inf)
        if layer in self.layout.sliding:
            near = sliding_window_overlay(self.layout.window)
            seen = near(0, 0, positions[before:, None], positions)
            scores = scores.masked_fill(~seen, -torch.inf)
        mixed = torch.einsum("hst,thd->shd", scores.softmax(-1), v).flatten(1)
        return mixed @ self.tensors[f"{name}.self_attn.o_proj.weight"].T

    def _around(self, name, x, part):
        if not self.layout.convolves:
            return part(x)
        added = x @ self.tensors[f"{name}.kernel_projection.weight"].T
        added = added.reshape(len(x), 2, 2, -1).repeat_interleave(self.layout.group, -1)
        kernels = self.tensors[f"{name}.base_kernel"] + added  # [rows, side, tap, H]
        return self._convolve(part(self._convolve(x, kernels[:, 0])), kernels[:, 1])

    def _convolve(self, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        return x * kernel[:, 0] + before * kernel[:, 1]
