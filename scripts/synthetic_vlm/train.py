"""The training loop of a captioning model over drawn scenes; resumes after an interrupt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from edgellm.scripts.synthetic_vlm.checkpoint import Model
from edgellm.scripts.synthetic_vlm.conversations import (
    KINDS,
    Conversation,
    Encoded,
    Encoder,
    converse,
)
from edgellm.scripts.synthetic_vlm.scenes import CELLS, ROWS

_STATE = "training.pt"
_TRAINING = 0  # first number of the scenes' seeds; see `evaluate.fresh`
_CELL_WEIGHT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The user's options of the training."""

    steps: int
    batch_size: int  # conversations of a step
    learning_rate: float
    warmup_steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One report of the loop."""

    step: int
    steps: int
    loss: float  # of the answers' tokens
    right_cells: float  # share that the classifier of cells names
    seconds: float  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Conversations of one kind, padded on the right."""

    token_ids: Tensor  # int64 [B, S]
    attends: Tensor  # int64 [B, S]: 1, padding 0
    learned: Tensor  # bool [B, S]
    positions: Tensor  # int64 [3, B, S]
    pixels: Tensor  # float32 [P, 3*T*p*p]
    grids: Tensor  # int64 [images, 3]
    cells: Tensor  # int64 [images, 9]: indices into `CELLS`


def make_batch(conversations: Sequence[Conversation], encoded: Sequence[Encoded]) -> Batch:
    """Stack encoded conversations."""
    longest = max(len(item.token_ids) for item in encoded)

    def stack(arrays: Sequence[np.ndarray]) -> Tensor:
        padded = [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, longest - a.shape[-1])]) for a in arrays]
        return torch.from_numpy(np.stack(padded, -2))

    cells = [
        [CELLS.index(cell) for cell in scene.cells]
        for conversation in conversations
        for scene in conversation.scenes
    ]
    return Batch(
        token_ids=stack([item.token_ids for item in encoded]),
        attends=stack([np.ones(len(item.token_ids), np.int64) for item in encoded]),
        learned=stack([item.learned for item in encoded]),
        positions=stack([item.positions for item in encoded]),
        pixels=torch.from_numpy(np.concatenate([item.pixels for item in encoded])),
        grids=torch.tensor([(1, *grid) for item in encoded for grid in item.grids]),
        cells=torch.tensor(cells),
    )


class Trainer:
    """A model in training; `folder` stores its state."""

    def __init__(self, *, model: Model, encoder: Encoder, recipe: Recipe, folder: Path) -> None:
        self.model, self.encoder, self.recipe, self.folder = model, encoder, recipe, folder
        # Classifies cells from the encoder's output. Without it the encoder's gradient would come
        # only through the decoder, whose input would be uninformative.
        width = 4 * model.config.text_config.hidden_size
        self.cell_head = nn.Linear(width, len(CELLS))
        self.optimizers = _optimizers(nn.ModuleList([model, self.cell_head]), recipe.learning_rate)
        self.step = 0
        self.seconds = 0.0  # of training, over all runs

    def resume(self) -> bool:
        """Resume from the folder's state; return whether there is one."""
        path = self.folder / _STATE
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.cell_head.load_state_dict(state["cell_head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    def save(self) -> None:
        """Write the state atomically."""
        state = {
            "model": self.model.state_dict(),
            "cell_head": self.cell_head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self.folder / f"{_STATE}.partial"
        torch.save(state, partial)
        partial.replace(self.folder / _STATE)

    def run(self, *, save_every: int, report: Callable[[Progress], None]) -> None:
        """Train to the recipe's end, saving the state every `save_every` steps and at the end."""
        recipe = self.recipe
        self.model.train()
        while self.step < recipe.steps:
            start = time.perf_counter()
            loss, right = self._train()
            seconds = time.perf_counter() - start
            self.step, self.seconds = self.step + 1, self.seconds + seconds
            if self.step % save_every == 0 or self.step == recipe.steps:
                self.save()
            report(
                Progress(
                    step=self.step,
                    steps=recipe.steps,
                    loss=loss,
                    right_cells=right,
                    seconds=seconds,
                )
            )
        self.model.eval()

    def _train(self) -> tuple[float, float]:
        recipe = self.recipe
        rate = recipe.learning_rate * _schedule(self.step, recipe.warmup_steps, recipe.steps)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        batches = list(self._batches())
        tokens = sum(int(batch.learned.sum()) for batch in batches)
        cells = sum(batch.cells.numel() for batch in batches)
        total, right = 0.0, 0
        for batch in batches:
            logits, named = self._forward(batch)
            answers = nn.functional.cross_entropy(
                logits, batch.token_ids[batch.learned], reduction="sum"
            )
            names = nn.functional.cross_entropy(
                named.flatten(0, 1), batch.cells.flatten(), reduction="sum"
            )
            (answers / tokens + _CELL_WEIGHT * names / cells).backward()
            total += answers.item()
            right += int((named.argmax(-1) == batch.cells).sum())
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.cell_head.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return total / tokens, right / cells

    def _batches(self) -> Iterator[Batch]:
        """Yield the conversations of a step, batched by kind, since lengths are similar."""
        usual, *others = KINDS
        count = self.recipe.batch_size // 2
        for kind, size in (
            (usual, self.recipe.batch_size - count),
            (others[self.step % len(others)], count),
        ):
            conversations = [
                converse(kind, _TRAINING, self.recipe.seed, self.step, at) for at in range(size)
            ]
            if conversations:
                yield make_batch(conversations, [self.encoder(item) for item in conversations])

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits of learned tokens [L, V], and of cells [images, 9, kinds of cells]."""
        model = self.model.model
        features = torch.cat(model.get_image_features(batch.pixels, batch.grids).pooler_output)
        is_image = batch.token_ids == self.model.config.image_token_id
        embeds = model.get_input_embeddings()(batch.token_ids)
        embeds = embeds.masked_scatter(is_image[..., None], features)
        hidden = model.language_model(
            inputs_embeds=embeds,
            position_ids=batch.positions,
            attention_mask=batch.attends,
            use_cache=False,
        ).last_hidden_state
        before = batch.learned.roll(-1, 1)  # the positions that predict learned tokens
        # [images, rows, 2, columns, 2, H] to [images, 9, 4H]: a cell is 2 x 2 features
        cells = features.reshape(-1, ROWS, 2, ROWS, 2, features.shape[-1])
        cells = cells.transpose(2, 3).reshape(-1, ROWS**2, 4 * features.shape[-1])
        return self.model.lm_head(hidden[before]), self.cell_head(cells)


def _optimizers(network: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon (arXiv 2502.16982) for matrices of layers and blocks, AdamW for the rest."""
    matrices, others = [], []
    for name, value in network.named_parameters():
        is_inner = value.ndim == 2 and ("layers." in name or "blocks." in name or "merger." in name)
        (matrices if is_inner else others).append(value)
    return [
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine to 0.02."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
