"""What rounding one unit alone would cost in KL divergence, for all of them in one backward pass.

To second order the divergence of a model from itself with changed outputs is half the mean square
of (gradient of the log-likelihood of a token that the model itself draws) times (change): the
Fisher information. The model passes a layer at a time forwards, its states kept, and a layer at a
time backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.quantize.allocation import Form, Unit
from edgellm.quantize.error_feedback import Grid, round_nearest
from edgellm.quantize.families import Family
from edgellm.quantize.layer_inputs import Group, input_groups
from edgellm.quantize.logits import Head, float_head
from edgellm.quantize.one_layer_model import linears, run_layer
from edgellm.quantize.subject import Subject, Task
from edgellm.quantize.tensors import read_tensor

FLOAT_FORM = "16"
FLOAT_BITS = 16
_SCALE_BITS = 16  # of a scale where it is read
_ROWS = 4  # of text


def estimate(subject: Subject, task: Task, grids: dict[str, Grid]) -> list[Unit]:
    """The forms of every unit with their divergences.

    Args:
        subject: a language model.
        task: gives text and device.
        grids: the forms that are not floats, by name.
    """
    rows = task.calibration.rows[:_ROWS]
    states = [row.to(task.device) for row in subject.reader.embedded(rows, 1)]
    entering = [states]
    for index in range(len(subject.layers)):
        model = _layer(subject, index, task.device)
        states = [run_layer(model, x) for x in states]
        entering.append(states)
    gradients = _head_gradients(subject, entering.pop(), task.device)
    found: list[Unit] = []
    for index in reversed(range(len(subject.layers))):
        model = _layer(subject, index, task.device)
        units, gradients = _layer_units(
            model, index, entering.pop(), gradients, grids, subject.family
        )
        found = units + found
    return found


def _layer(subject: Subject, index: int, device: torch.device) -> PreTrainedModel:
    source = {name: tensor.floats() for name, tensor in subject.layer_source(index).items()}
    return subject.layer_model(index, source, device)


def _head_gradients(
    subject: Subject, states: list[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Of the log-likelihoods of drawn tokens, summed over each row, by the last states."""
    norm = subject.norm_model(None, device)
    head: Head = float_head(read_tensor(subject.tensors, subject.head_name), device, subject.finish)
    found = []
    for x in states:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            normed = norm.model(inputs_embeds=leaf, use_cache=False).last_hidden_state
            logs = torch.log_softmax(head(normed[0]), -1)
            drawn = torch.multinomial(logs.detach().exp(), 1)
            found.append(torch.autograd.grad(logs.gather(-1, drawn).sum(), leaf)[0])
    return found


@dataclass(slots=True)
class _Trace:
    """What linear layers read and gave in one pass."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


def _layer_units(
    model: PreTrainedModel,
    index: int,
    states: list[torch.Tensor],
    gradients: list[torch.Tensor],
    grids: dict[str, Grid],
    family: Family,
) -> tuple[list[Unit], list[torch.Tensor]]:
    """The units of a layer, and the gradients by the states that enter it."""
    groups = input_groups(model, states[0], family)
    changes: dict[tuple[Group, str], dict[str, torch.Tensor]] = {}
    sums: dict[tuple[Group, str], float] = {}
    before, tokens = [], sum(x.shape[1] for x in states)
    for x, gradient in zip(states, gradients, strict=True):
        trace, entering, by_output = _backward(model, x, gradient)
        before.append(entering)
        changes = changes or _changes(model, groups, trace, grids)
        for key, by_name in changes.items():
            each = sum(
                ((by_output[name] @ change) * trace.inputs[name]).sum(-1)
                for name, change in by_name.items()
            )
            assert isinstance(each, torch.Tensor)
            sums[key] = sums.get(key, 0.0) + float(each.square().sum()) / 2 / tokens
    sizes = {name: module.weight.shape for name, module in linears(model).items()}
    units = []
    for names in groups:
        shapes = [(sizes[name][0], sizes[name][1]) for name in names]
        weights = sum(out * width for out, width in shapes)
        forms = [Form(FLOAT_FORM, FLOAT_BITS * weights, 0.0)]
        forms += [
            Form(form, _bits(grid, shapes), sums[names, form]) for form, grid in grids.items()
        ]
        units.append(Unit(index, names, weights, tuple(forms)))
    return units, before


def _backward(
    model: PreTrainedModel, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[_Trace, torch.Tensor, dict[str, torch.Tensor]]:
    """A pass with its gradients by the states that enter and by the output of each linear layer."""
    trace = _Trace()

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], None]:
        def keep(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            trace.inputs[name], trace.outputs[name] = args[0].detach(), output

        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in linears(model).items()]
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = model.model(inputs_embeds=leaf, use_cache=False).last_hidden_state
        wanted = [leaf, *trace.outputs.values()]
        entering, *rest = torch.autograd.grad(y, wanted, gradient)
    for each in hooks:
        each.remove()
    return trace, entering, dict(zip(trace.outputs, rest, strict=True))


def _changes(
    model: PreTrainedModel, groups: list[Group], trace: _Trace, grids: dict[str, Grid]
) -> dict[tuple[Group, str], dict[str, torch.Tensor]]:
    """What each form changes in the weights of a group [out, in]."""
    modules = linears(model)
    found: dict[tuple[Group, str], dict[str, torch.Tensor]] = {}
    for names in groups:
        rows = trace.inputs[names[0]].flatten(0, -2)
        importance = rows.square().mean(0)
        for form, grid in grids.items():
            weights = {name: modules[name].weight.detach() for name in names}
            found[names, form] = {
                name: round_nearest(weight, importance, grid).values() - weight
                for name, weight in weights.items()
            }
    return found


def _bits(grid: Grid, shapes: list[tuple[int, int]]) -> float:
    """Codes and scales."""
    code = (grid.highest - grid.lowest).bit_length()
    return sum(
        out * (width * code + width // (grid.block or width) * _SCALE_BITS) for out, width in shapes
    )
