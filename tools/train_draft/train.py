"""The training loop over the base's hidden states; resumes after interrupts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from edgellm.tools.train_draft.data.corpus import Sample
from edgellm.tools.train_draft.data.hidden_states import (
    Batch,
    FeatureCache,
    make_batch,
    plan,
    row_lengths,
)
from edgellm.tools.train_draft.methods.method import Learner

STATE_FILE = "training.pt"
_STEPS_PER_READ = 16  # on a GPU: steps between two reads of the loss, which wait for all kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training options; the defaults suit a base of some hundred million parameters."""

    epochs: int
    unrolls: int  # draft steps of the training-time test; with "eagle", of the estimate
    unroll_weight: float  # loss weight of step j: unroll_weight ** j; of head j: ** (j + 1)
    learning_rate: float
    warmup_steps: int
    batch_tokens: int
    max_tokens: int
    max_gradient_norm: float
    seed: int
    feature_noise: float = 0.0  # width of uniform noise; for "eagle" only
    minutes: float = 0.0  # the training ends, annealed, after this time; 0: after all epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One report of the loop."""

    step: int
    steps: int  # with a limit in minutes: an estimate
    loss: float
    tokens_per_second: float
    acceptance_length: float | None  # estimate for a chain on held-out text; None between saves


class Trainer:
    """Trainer of a draft; `folder` stores its state and the cached hidden states."""

    def __init__(
        self, *, learner: Learner, recipe: Recipe, folder: Path, device: torch.device
    ) -> None:
        self.learner, self.recipe = learner, recipe
        self.folder, self.device = folder, device
        self._module = learner.module.to(device)
        self.optimizers = _optimizers(learner, recipe.learning_rate)
        self.step, self.seconds, self._loss = 0, 0.0, math.nan

    def resume(self) -> bool:
        """Load the folder's state; return whether there was one."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        self._module.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state.get("seconds", 0.0)
        return True

    def save(self) -> None:
        """Write the state atomically."""
        state = {
            "draft": self._module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self.folder / f"{STATE_FILE}.partial"
        with partial.open("wb") as stream:
            try:
                torch.save(state, stream)
            except RuntimeError as error:  # torch's error hides the disk's
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        partial.replace(self.folder / STATE_FILE)

    def run(
        self,
        samples: Sequence[Sample],
        held_out: Sequence[Sample],
        *,
        cache: FeatureCache | None,
        save_every: int,
        report: Callable[[Progress], None],
    ) -> None:
        """Train to the recipe's end, saving the state every `save_every` steps and at the end."""
        recipe, lengths = self.recipe, row_lengths(samples, self.recipe.max_tokens)
        groups: list[list[int]] = []
        for epoch in range(recipe.epochs):
            order = np.random.default_rng([recipe.seed, epoch])
            groups += plan(lengths, recipe.batch_tokens, order)
        tokens, start, earlier = 0, time.perf_counter(), self.seconds
        for numbers in groups[self.step :]:
            if self._share_of_time() >= 1:
                return
            batch = make_batch(samples, numbers, recipe.max_tokens)
            loss = self._train(batch, self._features(batch, cache), len(groups))
            self.step, tokens = self.step + 1, tokens + batch.num_tokens
            self.seconds = earlier + time.perf_counter() - start
            steps, held = self._planned(len(groups)), None
            if self.step % save_every == 0 or self.step == steps:
                if cache is not None:
                    cache.save()  # first: resuming needs all hidden states that the state has used
                self.save()
                held = self.acceptance_length(held_out)
            rate = tokens / (time.perf_counter() - start)
            report(
                Progress(
                    step=self.step,
                    steps=steps,
                    loss=loss,
                    tokens_per_second=rate,
                    acceptance_length=held,
                )
            )

    def _share_of_time(self) -> float:
        """Return the used share of the limit in minutes, 0 without a limit."""
        return self.seconds / (60 * self.recipe.minutes) if self.recipe.minutes else 0.0

    def _planned(self, steps: int) -> int:
        """Return the step at which the training ends, at the measured speed if time is limited."""
        share = self._share_of_time()
        if share >= 1:
            return min(self.step, steps)
        return min(math.ceil(self.step / share) + 1, steps) if share else steps

    def _features(self, batch: Batch, cache: FeatureCache | None) -> Tensor:
        if cache is not None and cache.has(batch):
            return cache.load(batch).to(self.device)
        features = self.learner.tapped(batch.rows)
        if cache is not None:
            cache.store(batch, features)
        return features.clone()  # inference tensors cannot enter autograd

    def _train(self, batch: Batch, features: Tensor, steps: int) -> float:
        recipe = self.recipe
        done = max((self.step - recipe.warmup_steps) / max(steps - recipe.warmup_steps, 1), 0)
        factor = _schedule(self.step, recipe.warmup_steps, max(done, self._share_of_time()))
        rate = recipe.learning_rate * factor
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        loss = self.learner.loss(batch, features, self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), recipe.max_gradient_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.device.type == "cpu" or self.step % _STEPS_PER_READ == 0:
            self._loss = loss.item()
        return self._loss

    @torch.no_grad()
    def acceptance_length(self, held_out: Sequence[Sample]) -> float:
        """Estimate the tokens per round of a greedy chain of all steps, bonus token included."""
        totals = torch.zeros(2, self.learner.steps, device=self.device)
        lengths = row_lengths(held_out, self.recipe.max_tokens)
        for numbers in plan(lengths, self.recipe.batch_tokens, None):
            batch = make_batch(held_out, numbers, self.recipe.max_tokens)
            totals += torch.stack(self.learner.hits(batch, self._features(batch, None)))
        hits, counts = totals
        return 1 + float((hits / counts.clamp(min=1)).cumprod(0).sum())


def _optimizers(learner: Learner, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon (arXiv 2502.16982) for inner matrices, AdamW for vectors and output heads."""
    named, outputs = list(learner.module.named_parameters()), learner.outputs
    matrices = [value for name, value in named if value.ndim == 2 and name not in outputs]
    others = [value for name, value in named if value.ndim != 2 or name in outputs]
    return [
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, warmup: int, done: float) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay to 0.05.

    `done` is the share of the training after the warm-up, or of the time, that has passed.
    """
    return min((step + 1) / warmup, 1.0) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
