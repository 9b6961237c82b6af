"""Training of block drafters: DFlash (arXiv 2602.06036) or DSpark (2607.05147).

Blocks begin at random tokens of the answers. The mask tokens of a block learn the base's
predictions at their positions. They attend to the hidden states of the text before the block and
to the block itself, whose other tokens are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.strict_json import parse
from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.checkpoint_writers import (
    draft_config,
    draft_shape,
    write_checkpoint,
)
from edgellm.tools.train_draft.data.corpus import Sample, draft_vocabulary
from edgellm.tools.train_draft.data.hidden_states import Batch, TappedBase
from edgellm.tools.train_draft.methods.dflash_network import BlockDraft
from edgellm.tools.train_draft.methods.losses import cut_head, head_loss

DSPARK = "dspark"
_WEIGHTS, _RANK = "model.safetensors", 256
_ANCHORS = 0.5  # share of the tokens of a batch that begin blocks
_NEWEST, _OWN = "sample_from_anchor", "dflash_config"


class Blocks:
    """See `Learner`; a head of its own has only the most frequent tokens of the corpus."""

    outputs = frozenset(
        ["lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    )

    def __init__(
        self,
        *,
        base: Base,
        method: str,
        taps: tuple[int, ...],
        draft_vocab_size: int,
        block_size: int,
        num_layers: int,
        decay: float,
        sliding_window: int = 0,
    ) -> None:
        """Create the network.

        Args:
            base: the base model.
            method: "dflash" or "dspark".
            taps: layers whose inputs the draft reads.
            draft_vocab_size: tokens of its head; with the base's size, it uses the base's head.
            block_size: tokens of a block.
            num_layers: number of layers of the draft.
            decay: the loss weight of step j is decay ** j.
            sliding_window: see `DraftShape`; at least a block.
        """
        self.tapped, self._decay, self._is_dspark = TappedBase(base, taps), decay, method == DSPARK
        self._size, vocab_size = block_size, base.config.vocab_size
        # In DSpark, the first token of a block also predicts.
        self._first = 0 if self._is_dspark else 1
        self.steps = block_size - self._first
        self._has_norms = hasattr(base.layers[-1].get_submodule("self_attn"), "q_norm")
        shape = draft_shape(base.config, draft_vocab_size, len(taps), sliding_window)
        self.module = BlockDraft(
            shape=replace(shape, mrope_section=()),  # one position per token, also after images
            num_layers=num_layers,
            has_norms=self._has_norms,
            has_head=draft_vocab_size < vocab_size,
            markov=(vocab_size, _RANK) if self._is_dspark else None,
        )

    def start(self, samples: Sequence[Sample]) -> None:
        """See `Learner`: `fc` selects the last tap, layers are the base's last ones."""
        base, size = self.tapped.base, self.module.shape.hidden_size
        vocab_size = base.config.vocab_size
        size_of_head = self.module.shape.draft_vocab_size
        self._set_vocabulary(draft_vocabulary(list(samples), vocab_size, size_of_head))
        self._mask_id = _unused_token(samples, vocab_size)
        module = self.module
        with torch.no_grad():
            nn.init.normal_(module.fc.weight, std=0.01)
            module.fc.weight[:, -size:] += torch.eye(size)
            _copy(module.hidden_norm, base.layers[-1], "input_layernorm.")
            _copy(module.norm, base.decoder, "norm.")
            for layer, theirs in zip(
                module.layers, base.layers[-len(module.layers) :], strict=True
            ):
                _copy(layer, theirs)
            if module.lm_head is not None:
                module.lm_head.weight.copy_(self._base_head)

    def load(self, folder: Path) -> None:
        """See `Learner`."""
        try:
            config = parse((folder / "config.json").read_text("utf-8"))
            self._mask_id = config[_OWN]["mask_token_id"]
            theirs = [tap + 1 for tap in config[_OWN]["target_layer_ids"]]
            tensors = load_file(folder / _WEIGHTS)
            count = self.module.shape.draft_vocab_size
            ids = tensors.pop("d2t", torch.zeros(count, dtype=torch.int64)) + torch.arange(count)
            tensors.pop("t2d", None)
            self.module.load_state_dict({name: value.float() for name, value in tensors.items()})
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            detail = (str(error) or repr(error)).splitlines()[0]
            raise BrokenArtifactError(
                f"{folder} holds no draft of these sizes: {detail}",
                hint="give a draft of this command for this base, with the same flags",
            ) from None
        if theirs != list(self.tapped.taps) or config["block_size"] != self._size:
            raise EdgeLLMError(
                f"{folder} uses the hidden taps {theirs} and predicts blocks of "
                f"{config['block_size']}",
                hint=f"give --hidden_taps {','.join(map(str, theirs))} and that --block_size",
            )
        self._set_vocabulary(ids.numpy())

    def _set_vocabulary(self, vocabulary: np.ndarray) -> None:
        self.vocabulary = vocabulary
        self._base_head, self._in_vocabulary = cut_head(self.tapped.base.head, vocabulary)

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """See `Learner`: soft cross entropy with the base's distribution, step by step."""
        random = torch.Generator().manual_seed(step)
        predicted, head = self._predict(batch, features, random), self._head(features)
        importance = self._decay ** torch.arange(self.steps, device=features.device)
        importance = importance / importance.sum()
        one, total = torch.ones(1, device=features.device), head.sum() * 0
        for weight, (hidden, states, known) in zip(importance, predicted, strict=True):
            if known.any():
                with torch.no_grad():
                    targets = (states[known] @ self._base_head.T).softmax(-1)
                total = total + weight * head_loss(hidden[known][None], head, targets, one)
        return total

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Learner`; tokens outside of the head's vocabulary are misses."""
        random = torch.Generator().manual_seed(0)
        head, hits, counts = self._head(features), [], []
        for hidden, states, known in self._predict(batch, features, random):
            wanted = (states[known] @ self._base_head.T).argmax(-1)
            hits.append(((hidden[known] @ head.T).argmax(-1) == wanted).sum())
            counts.append(len(hidden))
        return torch.stack(hits), torch.tensor(counts, device=features.device)

    def _head(self, features: Tensor) -> Tensor:
        """Return the head for states of `_predict`: [Vd, H], or with DSpark's table [Vd, H + r]."""
        dtype, module = self.tapped.base.head.dtype, self.module
        head = self._base_head if module.lm_head is None else module.lm_head.weight
        head = head.to(features.device, dtype)
        if module.markov_head is None:
            return head
        return torch.cat([head, module.markov_head.markov_w2.weight.to(dtype)], 1)

    def _predict(
        self, batch: Batch, features: Tensor, random: torch.Generator
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Run the draft on random blocks.

        Returns:
            Per step: the draft's states [R, H], the base's [R, H], and bool [R], whether the
            token is in the head's vocabulary.
        """
        device, base = features.device, self.tapped.base
        ids, learned = batch.rows.ids.to(device), batch.learned.to(device)
        anchors, is_one = _choose(batch.learned, random, _ANCHORS)
        anchors, is_one = anchors.to(device), is_one.to(device)
        blocks = torch.full((*anchors.shape, self._size), self._mask_id, device=device)
        blocks[..., 0] = ids.gather(1, anchors)
        dtype = base.head.dtype
        taps = features[:, :, : len(self.tapped.taps)].flatten(2).to(dtype)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            hidden = self.module(taps, functional.embedding(blocks, base.embedding), anchors)
        found = []
        for step in range(self.steps):
            places = anchors + 1 + step  # of the tokens that are predicted
            clamped = places.clamp(max=ids.shape[1] - 1)
            taken = is_one & (places < ids.shape[1]) & learned.gather(1, clamped)
            row, column = taken.nonzero(as_tuple=True)
            place = places[row, column]
            own = hidden[row, column, step + self._first].to(dtype)
            if self.module.markov_head is not None:
                before = self.module.markov_head.markov_w1(ids[row, place - 1])
                own = torch.cat([own, before.to(dtype)], 1)
            states = features[row, place - 1, len(self.tapped.taps)].to(dtype)
            found.append((own, states, self._in_vocabulary[ids[row, place]]))
        return found

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """See `Learner`: in z-lab's layout; with a smaller head, in speculators' layout."""
        base, module = self.tapped.base.config, self.module
        architecture = "DSparkDraftModel" if self._is_dspark else "DFlashDraftModel"
        own = {
            "mask_token_id": self._mask_id,
            "target_layer_ids": [tap - 1 for tap in self.tapped.taps],
        }
        if module.shape.sliding_window:
            own["causal"] = False  # readers take blocks with windows for causal
        config = {
            **draft_config(module.shape, base, architecture),
            "model_type": "qwen3" if self._has_norms else "llama",
            "num_hidden_layers": len(module.layers),
            "num_target_layers": base.num_hidden_layers,
            "block_size": self._size,
            "layer_types": ["full_attention"] * len(module.layers),
            **module.shape.window_config(len(module.layers)),
            _OWN: own,
        }
        if self._is_dspark:
            config |= {_NEWEST: True, "markov_head_type": "vanilla", "markov_rank": _RANK}
        tensors = dict(module.state_dict())
        if module.lm_head is not None:
            ids = torch.from_numpy(self.vocabulary)
            known = torch.zeros(base.vocab_size, dtype=torch.bool)
            known[ids] = True
            config["draft_vocab_size"] = len(ids)
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        write_checkpoint(folder, _WEIGHTS, tensors, config, training)


def _choose(learned: Tensor, random: torch.Generator, share: float) -> tuple[Tensor, Tensor]:
    """Choose random anchors, whose next tokens are trained: int64 [B, A], and a validity mask."""
    allowed = functional.pad(learned[:, 1:], (0, 1))
    allowed[:, 0] = False  # no text before it
    maximum = max(1, int(share * int(allowed.sum(1).max())))
    keys = torch.rand(allowed.shape, generator=random).masked_fill(~allowed, -1)
    found = keys.topk(maximum, 1)
    return found.indices, found.values >= 0


def _unused_token(samples: Sequence[Sample], vocab_size: int) -> int:
    """Return the last token that the corpus does not contain, used as mask token."""
    used = np.zeros(vocab_size, np.bool_)
    for sample in samples:
        used[list(sample.ids)] = True
    unused = np.flatnonzero(~used)
    return int(unused[-1]) if len(unused) else vocab_size - 1


def _copy(module: nn.Module, theirs: nn.Module, prefix: str = "") -> None:
    """Copy all parameters by name."""
    for name, own in module.named_parameters():
        own.copy_(theirs.get_parameter(prefix + name))
