"""Inputs of each linear layer, and gradients of the log-likelihood by its outputs.

The log-likelihood is that of tokens sampled from the model: squared gradients are the Fisher
information. Forward and backward run one layer at a time. Memory holds one layer, and the hidden
states of a batch of samples.
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

_STATES_BYTES = 1 << 29  # maximum bytes of hidden states


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Inputs and gradients of one layer for one sample, by linear layer."""

    layer: int
    row: int  # index of the sample
    model: PreTrainedModel  # the float layer
    inputs: dict[str, torch.Tensor]  # [S, K]
    gradients: dict[str, torch.Tensor]  # by outputs [S, out]
    arriving: torch.Tensor  # gradient by the layer's output [1, S, H]


def trace(subject: QuantizedNetwork, rows: Ids, device: torch.device) -> Iterator[Trace]:
    """Yield traces of batches of samples [samples, S], each from the last layer to the first.

    Args:
        subject: a language model.
        rows: token ids of the samples.
        device: where to compute.
    """
    states_bytes = 4 * subject.config.hidden_size * rows.shape[1] * len(subject.layers)
    batch_size = max(1, _STATES_BYTES // states_bytes)
    for begin in range(0, len(rows), batch_size):
        yield from _trace(subject, rows[begin : begin + batch_size], begin, device)


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
            yield Trace(
                layer=index,
                row=first + row,
                model=model,
                inputs=inputs,
                gradients=outputs,
                arriving=arriving,
            )


def _layer(subject: QuantizedNetwork, index: int, device: torch.device) -> PreTrainedModel:
    source = {name: tensor.floats() for name, tensor in subject.layer_source(index).items()}
    return subject.layer_model(index, source, device)


def _head_gradients(
    subject: QuantizedNetwork, states: list[torch.Tensor], first: int, device: torch.device
) -> list[torch.Tensor]:
    """Return gradients of the log-likelihood of sampled tokens by the last hidden states.

    The seed is the index of the sample, so that resumed runs give the same result.
    """
    norm = subject.norm_model(None, device)
    head: Head = float_head(read_tensor(subject.tensors, subject.head_name), device, subject.finish)
    found = []
    for row, x in enumerate(states, first):
        generator = torch.Generator(device).manual_seed(row)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            normed = norm.model(inputs_embeds=leaf, use_cache=False).last_hidden_state
            logs = torch.log_softmax(head(normed[0]), -1)
            sampled = torch.multinomial(logs.detach().exp(), 1, generator=generator)
            found.append(torch.autograd.grad(logs.gather(-1, sampled).sum(), leaf)[0])
    return found


def _backward(
    model: PreTrainedModel, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs of linear layers, gradients by their outputs, and by the layer's input."""
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
