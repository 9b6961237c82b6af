"""MTP layers of a tiny Qwen3.5 or ERNIE, and the same in torch.

`make_base` and `make_ernie` write a random model with a layer in its folder. The references are
written from the published descriptions; nothing here comes from edgellm but the sizes of the tiny
configs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from conftest import make_checkpoint
from eagle_reference import VOCAB, Layout, rotate
from safetensors.torch import load_file, save_file

from edgellm.export import models

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
Tensors = dict[str, torch.Tensor]


def make_base(folder: Path, model_type: str = "qwen3_5_text", **config: object) -> Path:
    """A hybrid base with `mtp.*`; its layer 1 must be an attention layer."""
    base = make_checkpoint(folder, **{**models.find(model_type).TINY, **config})
    whole, path = load_file(base / "model.safetensors"), base / "config.json"
    save_file({**whole, **make_layer(whole)}, base / "model.safetensors", {"format": "pt"})
    settings = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return base


def add_layer(checkpoint: Path) -> None:
    """Add `mtp.*` to a vision-language model, whose language model's last layer attends."""
    path = checkpoint / "config.json"
    whole = load_file(checkpoint / "model.safetensors")
    base = {name.replace("language_model.", "", 1): tensor for name, tensor in whole.items()}
    layers = {**whole, **make_layer(base)}
    save_file(layers, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads(path.read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    path.write_text(json.dumps(config))


def make_layer(base: Tensors) -> Tensors:
    """Random tensors with the shapes of the base's last layer, which attends."""
    generator = torch.Generator().manual_seed(3)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        values = torch.randn(tensor.shape, generator=generator)
        scaled = values * (0.2 if tensor.ndim == 1 else 2 * tensor.shape[-1] ** -0.5)
        return scaled.to(tensor.dtype)

    hidden = base["model.norm.weight"]
    last = max(int(name.split(".")[2]) for name in base if name.startswith("model.layers."))
    source = f"model.layers.{last}."
    own = {name: like(hidden) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    return {
        "mtp.fc.weight": like(torch.empty(len(hidden), 2 * len(hidden), dtype=hidden.dtype)),
        **{f"mtp.{name}.weight": tensor for name, tensor in own.items()},
        **{
            f"mtp.layers.0.{name.removeprefix(source)}": like(tensor)
            for name, tensor in base.items()
            if name.startswith(source)
        },
    }


def make_ernie(folder: Path, **config: object) -> Path:
    """An ERNIE with `model.mtp_*`, a layer without experts as its first one."""
    base = make_checkpoint(folder, **{**models.find("ernie4_5_moe").TINY, **config})
    whole, path = load_file(base / "model.safetensors"), base / "config.json"
    layer, first = make_layer(whole), "model.layers.0."
    names = {"norm": None, "pre_fc_norm_hidden": "hidden_norm", "pre_fc_norm_embedding": "emb_norm"}
    found = {
        f"model.mtp_{new}.0.weight": 0.5 + layer[f"mtp.{name}.weight"].abs()
        for name, new in names.items()
        if new
    }
    found["model.mtp_linear_proj.0.weight"] = layer["mtp.fc.weight"]
    for name, tensor in whole.items():
        if name.startswith(first):
            own = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
            value = 0.5 + own.abs() if tensor.ndim == 1 else own * 2 * tensor.shape[-1] ** -0.5
            found[f"model.mtp_block.0.{name.removeprefix(first)}"] = value.to(tensor.dtype)
    save_file({**whole, **found}, base / "model.safetensors", {"format": "pt"})
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    return base


class Reference:
    """The MTP layer with a KV cache that can be truncated."""

    layout = Layout(eagle1=True)  # features are hidden rows
    targets = torch.arange(VOCAB)

    def __init__(self, base: Path) -> None:
        self.tensors = load_file(base / "model.safetensors")
        self.config = json.loads((base / "config.json").read_text())
        size = self.config["head_dim"] // 4  # share of a head to which RoPE applies
        self.inv_freq = 1e4 ** -(torch.arange(0, size, 2) / size)
        self.cache = [(torch.zeros(0),) * 2]

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [S, V] and the next features [S, H]; `mask`: the last rows."""
        embedding = self.tensors["model.embed_tokens.weight"]
        both = (
            self._norm("pre_fc_norm_embedding", embedding[ids]),
            self._norm("pre_fc_norm_hidden", hidden),
        )
        x = torch.cat(both, -1) @ self.tensors["mtp.fc.weight"].T
        x = x + self._attention(self._norm("layers.0.input_layernorm", x), positions, mask)
        y = self._norm("layers.0.post_attention_layernorm", x)
        has_experts = "mtp.layers.0.mlp.gate.weight" in self.tensors
        x = x + (self._experts(y) if has_experts else self._glu("mlp", y))
        normed = self._norm("norm", x)
        head = self.tensors.get("lm_head.weight", embedding)
        return (normed @ head[self.targets].T).log_softmax(-1), normed

    def drop_to(self, rows: int) -> None:
        """Truncate the cache to its first."""
        self.cache = [tuple(part[:rows] for part in self.cache[0])]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1 + self.tensors[f"mtp.{name}.weight"])

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"mtp.layers.0.{name}.weight"].T

    def _glu(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self._linear(f"{name}.down_proj", torch.nn.functional.silu(gate) * up)

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        """The chosen experts by their shares, and the one for all rows."""
        chances = self._linear("mlp.gate", x).softmax(-1)
        shares, chosen = chances.topk(self.config["num_experts_per_tok"])
        shares = shares / shares.sum(-1, keepdim=True)
        rows = []
        for row, some, of_row in zip(x, shares, chosen, strict=True):
            parts = [
                share * self._expert(int(one), row) for share, one in zip(some, of_row, strict=True)
            ]
            rows.append(sum(parts))
        gate = self._linear("mlp.shared_expert_gate", x).sigmoid()
        return torch.stack(rows) + gate * self._glu("mlp.shared_expert", x)

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        name = "mtp.layers.0.mlp.experts"
        if f"{name}.gate_up_proj" not in self.tensors:
            return self._glu(f"mlp.experts.{index}", x)
        gate, up = (self.tensors[f"{name}.gate_up_proj"][index] @ x).chunk(2)
        return self.tensors[f"{name}.down_proj"][index] @ (torch.nn.functional.silu(gate) * up)

    def _attention(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Queries and gates of a head are adjacent; RoPE applies to the first numbers of a head."""
        rows, size, turned = len(x), self.config["head_dim"], 2 * len(self.inv_freq)
        q, gate = self._linear("self_attn.q_proj", x).reshape(rows, -1, 2 * size).chunk(2, -1)
        k, v = (self._linear(f"self_attn.{p}_proj", x).reshape(rows, -1, size) for p in "kv")
        normed = (self._norm(f"layers.0.self_attn.{n}_norm", y) for n, y in (("q", q), ("k", k)))
        q, k = (
            torch.cat([rotate(y[..., :turned], positions, self.inv_freq), y[..., turned:]], -1)
            for y in normed
        )
        mixed = self._mixed(q, k, v, mask)
        return self._linear("self_attn.o_proj", (mixed * gate.sigmoid()).reshape(rows, -1))

    def _mixed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Values of the cache and of these rows, [S, heads, size], as queries weigh them."""
        keys, values = (
            torch.cat([old, new]) if len(old) else new
            for old, new in zip(self.cache[0], (k, v), strict=True)
        )
        self.cache = [(keys, values)]
        seen = torch.ones(len(q), len(keys) - mask.shape[1], dtype=torch.bool)
        seen = torch.cat([seen, mask], 1)
        keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (keys, values))
        scores = torch.einsum("shd,thd->hst", q, keys) * q.shape[-1] ** -0.5
        chances = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hst,thd->shd", chances, values)


class ErnieReference(Reference):
    """ERNIE's; features are the base's hidden states after its final norm."""

    def __init__(self, base: Path) -> None:
        self.tensors = load_file(base / "model.safetensors")
        self.config = json.loads((base / "config.json").read_text())
        self.config["head_dim"] = size = (
            self.config["hidden_size"] // self.config["num_attention_heads"]
        )
        self.cache = [(torch.zeros(0),) * 2]
        theta = self.config["rope_parameters"]["rope_theta"]
        self.inv_freq = theta ** -(torch.arange(0, size, 2) / size)

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As that of Qwen's."""
        stream = hidden / self.tensors["model.norm.weight"]  # but for a factor
        return self.continued(ids, stream, positions, mask)

    def continued(
        self, ids: torch.Tensor, stream: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As it is trained: of hidden states [S, H] before the base's final norm."""
        embedding = self.tensors["model.embed_tokens.weight"]
        both = self._norm("mtp_emb_norm.0", embedding[ids]), self._norm("mtp_hidden_norm.0", stream)
        x = torch.cat(both, -1) @ self.tensors["model.mtp_linear_proj.0.weight"].T
        x = x + self._attention(self._norm("mtp_block.0.input_layernorm", x), positions, mask)
        x = x + self._glu("mlp", self._norm("mtp_block.0.post_attention_layernorm", x))
        normed = self._norm("norm", x)
        head = self.tensors.get("lm_head.weight", embedding)
        return (normed @ head[self.targets].T).log_softmax(-1), normed

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"model.{name}.weight"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"model.mtp_block.0.{name}.weight"].T

    def _attention(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """RoPE rotates adjacent pairs."""
        rows, size = len(x), self.config["head_dim"]
        q, k, v = (self._linear(f"self_attn.{p}_proj", x).reshape(rows, -1, size) for p in "qkv")
        q, k = (
            rotate(torch.cat([y[..., ::2], y[..., 1::2]], -1), positions, self.inv_freq)
            for y in (q, k)
        )
        mixed = self._mixed(q, k, v, mask)
        return self._linear("self_attn.o_proj", mixed.reshape(rows, -1))
