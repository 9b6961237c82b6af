"""How the answers of the quantized model differ: perplexity, KL divergence, agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from edgellm.quantize.block import run_layer
from edgellm.quantize.linear import DecodedLinear
from edgellm.quantize.rounding import round_input
from edgellm.quantize.states import States
from edgellm.quantize.tensors import Tensor

_TOKENS, _VOCABULARY = 256, 8192  # of a product of states and head

Head = Callable[[torch.Tensor], torch.Tensor]  # [T, H] -> [T, V]


@dataclass(frozen=True, slots=True)
class Quality:
    """Over held-out text, every token predicted from those before it in its row."""

    tokens: int
    perplexity_float: float
    perplexity_quantized: float
    kl_divergence: float  # of the quantized from the float distribution, nats a token
    top1_agreement: float


def float_head(weight: Tensor, device: torch.device) -> Head:
    """The head [V, H] as it is stored, made float32 in parts."""

    def head(states: torch.Tensor) -> torch.Tensor:
        parts = [
            states @ torch.from_numpy(weight.rows(begin, begin + _VOCABULARY).floats().copy())
            .to(device).T
            for begin in range(0, weight.info.shape[0], _VOCABULARY)
        ]  # fmt: skip
        return torch.cat(parts, -1)

    return head


def quantized_head(linear: DecodedLinear, device: torch.device) -> Head:
    """The exported head, its input rounded."""
    weight = torch.from_numpy(linear.weight).to(device)
    smooth = linear.pre_quant_scale
    scale = 1.0 if smooth is None else torch.from_numpy(smooth.copy()).to(device)

    def head(states: torch.Tensor) -> torch.Tensor:
        return round_input(states * scale, linear.input_type, linear.input_scale) @ weight.T

    return head


def measure(
    rows: NDArray[np.int64],
    states: tuple[States, States],
    norm: PreTrainedModel,
    heads: tuple[Head, Head],
    device: torch.device,
) -> Quality:
    """Compare the float with the quantized model.

    Args:
        rows: token ids [rows, S].
        states: of the float and the quantized model behind the last layer.
        norm: a model without layers, for its final norm.
        heads: the float one and that of the quantized model.
        device: where to compute.
    """
    sums = np.zeros(4)  # negative log-likelihoods, KL, agreements
    count = 0
    for pair, ids in _chunks(rows, states, norm, device):
        logs = [torch.log_softmax(head(x), -1) for head, x in zip(heads, pair, strict=True)]
        target = ids[:, None]
        divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
        agree = logs[0].argmax(-1) == logs[1].argmax(-1)
        values = [-log.gather(-1, target) for log in logs] + [divergence, agree]
        sums += [float(value.double().sum()) for value in values]
        count += len(ids)
    loss_float, loss_quantized, divergence, agreement = sums / count
    return Quality(
        count, math.exp(loss_float), math.exp(min(loss_quantized, 700)), divergence, agreement
    )


def _chunks(
    rows: NDArray[np.int64],
    states: tuple[States, States],
    norm: PreTrainedModel,
    device: torch.device,
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Normed states [T, H] of both models, and the ids [T] that follow."""
    width = states[0].shape[-1]
    row = 0
    for pair in zip(*(one.batches(device) for one in states), strict=True):
        normed = [run_layer(norm, batch)[:, :-1].reshape(-1, width) for batch in pair]
        ids = torch.from_numpy(rows[row : row + len(pair[0]), 1:].reshape(-1)).to(device)
        row += len(pair[0])
        for begin in range(0, len(ids), _TOKENS):
            part = slice(begin, begin + _TOKENS)
            yield [batch[part] for batch in normed], ids[part]
