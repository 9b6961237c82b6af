"""Float and quantized heads, and the comparison of their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.activation_rounding import round_input
from edgellm.quantize.formats.quantized_linear import DecodedLinear
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.metrics.divergence import Quality, Score, Targets
from edgellm.quantize.models.one_layer_model import run_layer

_TOKENS, _VOCABULARY = 256, 8192  # chunk of tokens, and of the head's outputs

Head = Callable[[torch.Tensor], torch.Tensor]  # [T, H] -> [T, V]
Finish = Callable[[torch.Tensor], torch.Tensor]  # [T, V] -> [T, V]


def float_head(weight: Tensor, device: torch.device, finish: Finish) -> Head:
    """Return the stored head [V, H], cast to float32 in parts; `finish` computes its logits."""

    def head(states: torch.Tensor) -> torch.Tensor:
        parts = [
            states
            @ torch.from_numpy(weight.rows(begin, begin + _VOCABULARY).floats().copy()).to(device).T
            for begin in range(0, weight.info.shape[0], _VOCABULARY)
        ]
        return finish(torch.cat(parts, -1))

    return head


def quantized_head(linear: DecodedLinear, device: torch.device, finish: Finish) -> Head:
    """Return the exported head with quantized input; `finish` computes its logits."""
    weight = torch.from_numpy(linear.weight).to(device)
    smooth = linear.pre_quant_scale
    scale = 1.0 if smooth is None else torch.from_numpy(smooth.copy()).to(device)

    def head(states: torch.Tensor) -> torch.Tensor:
        rounded = round_input(states * scale, linear.input_type, linear.input_scale)
        return finish(rounded @ weight.T)

    return head


def greedy(states: torch.Tensor, head: Head) -> NDArray[np.int64]:
    """Return the greedy ids [B, S] for normed states [B, S, H]."""
    flat = states.flatten(0, 1)
    parts = [head(flat[at : at + _TOKENS]).argmax(-1) for at in range(0, len(flat), _TOKENS)]
    return torch.cat(parts).view(states.shape[:2]).cpu().numpy()


def measure(
    targets: Targets,
    states: tuple[States, States],
    norm: PreTrainedModel,
    heads: tuple[Head, Head],
    device: torch.device,
) -> Quality:
    """Compare the float with the quantized model.

    Args:
        targets: of the first T states of each sample.
        states: of the float and the quantized model after the last layer.
        norm: a model of the final norm.
        heads: of the float and the quantized model.
        device: where to compute.
    """
    score, at = Score(targets.names), 0
    kinds = targets.kinds.reshape(-1)
    for pair, ids in _chunks(targets.ids, states, norm, device):
        floats, rounded = (head(x) for head, x in zip(heads, pair, strict=True))
        score.add(floats, rounded, ids, kinds[at : at + len(ids)])
        at += len(ids)
    return score.quality()


def _chunks(
    targets: NDArray[np.int64],
    states: tuple[States, States],
    norm: PreTrainedModel,
    device: torch.device,
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield normed states [T, H] of both models, and the right ids [T]."""
    length = targets.shape[1]
    row = 0
    for pair in zip(*(one.batches(device) for one in states), strict=True):
        normed = [run_layer(norm, batch)[:, :length].flatten(0, 1) for batch in pair]
        ids = torch.from_numpy(targets[row : row + len(pair[0])].reshape(-1)).to(device)
        row += len(pair[0])
        for begin in range(0, len(ids), _TOKENS):
            part = slice(begin, begin + _TOKENS)
            yield [batch[part] for batch in normed], ids[part]
