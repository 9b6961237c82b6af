"""Inputs of the linear layers of a decoder layer over the calibration text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from edgellm.quantize.models.families import Family
from edgellm.quantize.models.one_layer_model import linears, run_layer

JUDGED_SHARE = 4  # every 4th sample evaluates the fit to the other samples

Group = tuple[str, ...]  # names of linear layers with the same input


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a group."""

    names: Group
    largest: torch.Tensor  # magnitude of each channel over all samples [K]
    largest_fitted: torch.Tensor  # over the samples of the fit [K]
    judged: torch.Tensor  # tokens of the samples that evaluate it [T, K]


def input_groups(model: PreTrainedModel, states: torch.Tensor, family: Family) -> list[Group]:
    """Return the groups of linear layers in the order of computation.

    Args:
        model: of one layer.
        states: that enter it [B, S, H]; one sample suffices.
        family: of the layer; names the float matrices.
    """
    found: dict[int, list[str]] = {}
    alive: list[torch.Tensor] = []  # so that no other tensor gets their id

    def record(name: str, x: torch.Tensor) -> None:
        alive.append(x)
        if not family.is_float(f"{name}.weight"):
            found.setdefault(id(x), []).append(name)

    with _hooked(model, record):
        run_layer(model, states)
    return [tuple(names) for names in found.values()]


def each_input(
    model: PreTrainedModel, batches: Iterable[torch.Tensor], family: Family
) -> Iterator[dict[Group, torch.Tensor]]:
    """Yield the inputs of all groups [S, K] for each sample.

    Args:
        model: of one layer.
        batches: states that enter it [B, S, H].
        family: of the layer.
    """
    groups: dict[str, Group] = {}
    row_inputs: dict[Group, torch.Tensor] = {}

    def record(name: str, x: torch.Tensor) -> None:
        if name in groups:
            row_inputs[groups[name]] = x.flatten(0, -2)

    for batch in batches:
        for row in batch[:, None]:
            if not groups:
                groups |= {names[0]: names for names in input_groups(model, row, family)}
            with _hooked(model, record):
                run_layer(model, row)
            yield dict(row_inputs)


def read_inputs(
    model: PreTrainedModel, batches: Iterable[torch.Tensor], limit: int, family: Family
) -> list[Inputs]:
    """Return ranges of all inputs, and tokens of the samples that evaluate a fit.

    Args:
        model: of one layer.
        batches: states that enter it [B, S, H].
        limit: maximum number of these tokens.
        family: of the layer.
    """
    judged: dict[Group, list[torch.Tensor]] = {}
    fitted: dict[Group, torch.Tensor] = {}
    for number, row in enumerate(each_input(model, batches, family)):
        for names, x in row.items():
            if number % JUDGED_SHARE == 0:
                judged.setdefault(names, []).append(x)
            else:
                largest = x.abs().amax(0)
                fitted[names] = torch.maximum(fitted.get(names, largest), largest)
    return [_inputs(names, rows, fitted.get(names), limit) for names, rows in judged.items()]


def _inputs(
    names: Group, judged: list[torch.Tensor], fitted: torch.Tensor | None, limit: int
) -> Inputs:
    rows = torch.cat(judged)
    largest = rows.abs().amax(0)
    fitted = largest if fitted is None else fitted  # a single sample does both
    return Inputs(
        names=names,
        largest=torch.maximum(largest, fitted),
        largest_fitted=fitted,
        judged=rows[:: -(-len(rows) // limit)],
    )


@contextlib.contextmanager
def _hooked(model: PreTrainedModel, record: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `record` with the name of each linear layer and its input [B, S, K]."""

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor]], None]:
        return lambda _, args: record(name, args[0])

    hooks = [
        module.register_forward_pre_hook(hook(name)) for name, module in linears(model).items()
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
