"""How much each place of a row of the calibration text counts in each linear layer.

An error of a layer's output costs what the gradient of the model's answer makes of it (arXiv
2505.07004 weighs so by groups of outputs). Places differ in that by magnitudes: the first of a
context, on which attention rests, has the largest inputs of all, a gradient that counts for keys
and values, and hardly one elsewhere. After it tokens differ little, so that some rows tell of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from edgellm.quantize.activations.gradients import trace
from edgellm.quantize.formats.tensors import plain_tensor, read_tensor
from edgellm.quantize.plan import Plan

PART = "token_weights"
_ROWS = 8  # of text, which take a sixth of the time of all
_LARGEST = 20.0  # of the mean
_TINY = 1e-30

Weights = Mapping[str, torch.Tensor]  # by linear layer of a layer: [S], of mean one


def weighs_tokens(plan: Plan) -> bool:
    """Whether the scheme has a use for them; a draft's answer is not the model's."""
    return bool(plan.recipe.scheme.form) and plan.job.base_model_dir is None


def weigh_tokens(plan: Plan) -> None:
    """Find them for all layers, unless an interrupted run has."""
    work, task = plan.task.work, plan.task
    if work.has(PART):
        return
    rows = task.calibration.rows[:_ROWS]
    squares: dict[str, np.ndarray] = {}
    for traced in trace(plan.subject, rows, task.device):
        for name, gradient in traced.gradients.items():
            key = _key(traced.layer, name)
            own = squares.setdefault(key, np.zeros(rows.shape, np.float32))
            own[traced.row] = gradient.square().sum(-1).cpu().numpy()
    work.store(PART, {key: plain_tensor(_weights(each)) for key, each in squares.items()}, {})


def layer_weights(plan: Plan, layer: int) -> Weights:
    """Those of one layer."""
    source = plan.task.work.tensors(PART)
    prefix = _key(layer, "")
    return {
        name.removeprefix(prefix): torch.from_numpy(read_tensor(source, name).floats().copy())
        for name in _names(source.infos(), prefix)
    }


def _weights(squares: np.ndarray) -> np.ndarray:
    """[rows, S] to [S]. Roots: whole squares leave too few that count, and fit to these."""
    roots = np.sqrt(squares)
    limited = np.minimum(roots / max(float(roots.mean()), _TINY), _LARGEST)
    return limited.mean(0).astype(np.float32)


def _names(infos: Mapping[str, object], prefix: str) -> Iterator[str]:
    return (name for name in infos if name.startswith(prefix))


def _key(layer: int, name: str) -> str:
    return f"{layer}/{name}"
