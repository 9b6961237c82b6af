"""KL divergence that quantizing one decoder layer alone adds, measured on the quantized layer.

To second order (see `sensitivity`) it is half the mean square, over tokens, of the gradient of a
sampled token's log-likelihood times the change of the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from edgellm.quantize.activations.gradients import trace
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.tensors import plain_tensor, read_tensor
from edgellm.quantize.plan import Plan

PART = "layer_gradients"
_SAMPLES = 4  # held-out samples


def measures_layers(plan: Plan) -> bool:
    """Return whether layer costs are needed: one more forward and backward pass."""
    return plan.job.keep_budget is not None


def find_gradients(plan: Plan) -> None:
    """Compute gradients by the outputs of all layers, unless an interrupted run did."""
    work, task = plan.task.work, plan.task
    if work.has(PART):
        return
    rows = task.calibration.held_out[:_SAMPLES]
    found: dict[int, list[torch.Tensor]] = {}
    for traced in trace(plan.subject, rows, task.device):
        found.setdefault(traced.layer, []).append(traced.arriving.cpu())
    tensors = {str(layer): plain_tensor(torch.cat(each).numpy()) for layer, each in found.items()}
    work.store(PART, tensors, {})


def divergence(
    plan: Plan,
    index: int,
    quantized: Callable[[torch.Tensor], torch.Tensor],
    before: States,
    after: States,
) -> float:
    """Return the KL divergence that the layer alone adds, nats a token.

    Args:
        plan: of the run.
        index: of the layer.
        quantized: the layer, states [B, S, H] in and out.
        before: states of the float model that enter it, over the held-out text.
        after: states after it.
    """
    device = plan.task.device
    stored = read_tensor(plan.task.work.tensors(PART), str(index)).floats()
    gradients = torch.from_numpy(stored.copy()).to(device)
    total = row = 0.0
    for entering, leaving in zip(before.batches(device), after.batches(device), strict=True):
        own = gradients[int(row) : int(row) + len(entering)]
        if not len(own):
            break
        change = quantized(entering[: len(own)]) - leaving[: len(own)]
        total += float((own * change).sum(-1).square().sum())
        row += len(own)
    return total / 2 / (gradients.shape[0] * gradients.shape[1])
