"""Weights of positions of the calibration text, for each linear layer.

The gradient of the log-likelihood weighs the error of a layer's output (arXiv 2505.07004 weighs
groups of outputs so). Gradients differ by magnitudes between positions. The first position, the
attention sink, has the largest inputs, but a large gradient only for keys and values. Later
positions differ little, so a few samples suffice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from edgellm.quantize.activations.gradients import trace
from edgellm.quantize.formats.tensors import plain_tensor, read_tensor
from edgellm.quantize.plan import Plan

PART = "token_weights"
_SAMPLES = 8  # they take a sixth of the time of all
_LARGEST = 20.0  # times the mean
_TINY = 1e-30

Weights = Mapping[str, torch.Tensor]  # by linear layer of a decoder layer: [S], mean 1


def weighs_tokens(plan: Plan) -> bool:
    """Return whether the scheme uses weights; drafts have none."""
    return bool(plan.recipe.scheme.form) and plan.job.base_model_dir is None


def weigh_tokens(plan: Plan) -> None:
    """Compute the weights of all layers, unless an interrupted run did."""
    work, task = plan.task.work, plan.task
    if work.has(PART):
        return
    rows = task.calibration.rows[:_SAMPLES]
    squares: dict[str, np.ndarray] = {}
    for traced in trace(plan.subject, rows, task.device):
        for name, gradient in traced.gradients.items():
            key = _key(traced.layer, name)
            own = squares.setdefault(key, np.zeros(rows.shape, np.float32))
            own[traced.row] = gradient.square().sum(-1).cpu().numpy()
    work.store(PART, {key: plain_tensor(_weights(each)) for key, each in squares.items()}, {})


def layer_weights(plan: Plan, layer: int) -> Weights:
    """Return the weights of one layer."""
    source = plan.task.work.tensors(PART)
    prefix = _key(layer, "")
    return {
        name.removeprefix(prefix): torch.from_numpy(read_tensor(source, name).floats().copy())
        for name in _names(source.infos(), prefix)
    }


def _weights(squares: np.ndarray) -> np.ndarray:
    """Return weights [S] of squares [samples, S]; roots, since squares overfit to few tokens."""
    roots = np.sqrt(squares)
    limited = np.minimum(roots / max(float(roots.mean()), _TINY), _LARGEST)
    return limited.mean(0).astype(np.float32)


def _names(infos: Mapping[str, object], prefix: str) -> Iterator[str]:
    return (name for name in infos if name.startswith(prefix))


def _key(layer: int, name: str) -> str:
    return f"{layer}/{name}"
