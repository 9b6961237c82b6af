"""What each linear layer read and how the model's answer depends on what it gave.

Gradients are those of the log-likelihood of tokens that the model itself draws: their squares are
the Fisher information. Rows of text pass a layer at a time forwards, their states kept, and a layer
at a time backwards; memory is that of a layer and of the states of some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.models.language_model import Ids, QuantizedNetwork
from edgellm.quantize.models.lm_head import Head, float_head
from edgellm.quantize.models.one_layer_model import linears, run_layer

_KEPT_BYTES = 1 << 29  # of states


@dataclass(frozen=True, slots=True)
class Trace:
    """One row of text in one layer, by the names of linear layers."""

    layer: int
    row: int
    model: PreTrainedModel  # the layer, in floats
    inputs: dict[str, torch.Tensor]  # [S, K]
    gradients: dict[str, torch.Tensor]  # of what they gave [S, out]
    arriving: torch.Tensor  # of what the layer gave [1, S, H]


def trace(subject: QuantizedNetwork, rows: Ids, device: torch.device) -> Iterator[Trace]:
    """All layers from the last to the first for some rows [rows, S], then for the next ones.

    Args:
        subject: a language model.
        rows: token ids.
        device: where to compute.
    """
    states_bytes = 4 * subject.config.hidden_size * rows.shape[1] * len(subject.layers)
    together = max(1, _KEPT_BYTES // states_bytes)
    for begin in range(0, len(rows), together):
        yield from _trace(subject, rows[begin : begin + together], begin, device)


def _trace(
    subject: QuantizedNetwork, rows: Ids, first: int, device: torch.device
) -> Iterator[Trace]:
    entering = [[row.to(device) for row in subject.reader.embedded(rows, 1)]]
    for index in range(len(subject.layers)):
        model = _layer(subject, index, device)
        entering.append([run_layer(model, x) for x in entering[-1]])
    gradients = _head_gradients(subject, entering.pop(), first, device)
    for index in reversed(range(len(subject.layers))):
        model = _layer(subject, index, device)
        for row, x in enumerate(entering.pop()):
            arriving = gradients[row]
            inputs, outputs, gradients[row] = _backward(model, x, arriving)
            yield Trace(index, first + row, model, inputs, outputs, arriving)


def _layer(subject: QuantizedNetwork, index: int, device: torch.device) -> PreTrainedModel:
    source = {name: tensor.floats() for name, tensor in subject.layer_source(index).items()}
    return subject.layer_model(index, source, device)


def _head_gradients(
    subject: QuantizedNetwork, states: list[torch.Tensor], first: int, device: torch.device
) -> list[torch.Tensor]:
    """Of the log-likelihoods of drawn tokens, summed over each row, by the last states.

    A row draws the same tokens whatever was done before: interrupted runs give the same result.
    """
    norm = subject.norm_model(None, device)
    head: Head = float_head(read_tensor(subject.tensors, subject.head_name), device, subject.finish)
    found = []
    for row, x in enumerate(states, first):
        chance = torch.Generator(device).manual_seed(row)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            normed = norm.model(inputs_embeds=leaf, use_cache=False).last_hidden_state
            logs = torch.log_softmax(head(normed[0]), -1)
            drawn = torch.multinomial(logs.detach().exp(), 1, generator=chance)
            found.append(torch.autograd.grad(logs.gather(-1, drawn).sum(), leaf)[0])
    return found


def _backward(
    model: PreTrainedModel, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """What linear layers read, gradients by what they gave, and by the states that enter."""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], None]:
        def keep(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach().flatten(0, -2), output

        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in linears(model).items()]
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = model.model(inputs_embeds=leaf, use_cache=False).last_hidden_state
        entering, *rest = torch.autograd.grad(y, [leaf, *outputs.values()], gradient)
    for each in hooks:
        each.remove()
    flat = [each.flatten(0, -2) for each in rest]
    return inputs, dict(zip(outputs, flat, strict=True)), entering
