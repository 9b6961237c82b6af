"""Experts of a layer: their inputs are recorded, then each expert is quantized alone.

They are hidden from ModelOpt, which would give all experts of a layer one input range; AWQ would
smooth the router's input. Each block takes the scale with the least output error over the expert's
inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.schemes import Recipe
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.models.expert_rounding import Products, round_weight
from edgellm.quantize.models.families import Experts, Family

FEW = 32  # tokens; an expert with fewer is calibrated with all tokens
_PARTS = ("gate_proj", "up_proj", "down_proj")
_NAME = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(?:gate|up|down)_proj\.weight")

Networks = list[tuple[torch.Tensor, ...]]  # the `parts` of each


@dataclass(slots=True)
class ExpertInputs:
    """Inputs of one expert: of gate and up, or up alone (`outer`), and of down (`inner`)."""

    outer: Products
    inner: Products

    @property
    def tokens(self) -> int:
        """The number of tokens routed to it."""
        return self.outer.rows


class ObservedExperts(nn.Module):
    """Replaces transformers' experts; its weights are no parameters, so ModelOpt ignores them.

    Attributes:
        parts: of an expert; without a gate the activation applies to `up`.
        networks: weights [out, in] of each expert.
        seen: recorded inputs of each expert; None: not recorded.
        unrouted: experts to record with all tokens; empty: record routed tokens.
    """

    def __init__(
        self,
        activation: Callable[[torch.Tensor], torch.Tensor],
        parts: tuple[str, ...] = _PARTS,
    ) -> None:
        super().__init__()
        self.activation, self.parts = activation, parts
        self.networks: Networks = []
        self.seen: list[ExpertInputs] | None = None
        self.unrouted: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute [T, H] from X [T, H], expert ids and shares [T, K]."""
        y, seen = torch.zeros_like(x), self.seen
        for index in ids.unique().tolist():
            rows, places = torch.where(ids == index)
            inner = self._inner(index, x[rows])
            if seen is not None and not self.unrouted:
                self._record(seen[index], x[rows], inner)
            added = nn.functional.linear(inner, self.networks[index][-1])
            y.index_add_(0, rows, added * shares[rows, places, None].to(x.dtype))
        if seen is not None:
            for index in self.unrouted:
                self._record(seen[index], x, self._inner(index, x))
        return y

    def _inner(self, index: int, x: torch.Tensor) -> torch.Tensor:
        first, *others = (nn.functional.linear(x, each) for each in self.networks[index][:-1])
        activated = self.activation(first)
        return activated * others[0] if others else activated

    @staticmethod
    def _record(seen: ExpertInputs, x: torch.Tensor, inner: torch.Tensor) -> None:
        seen.outer.add(x)
        seen.inner.add(inner)


def find_experts(layer: nn.Module) -> ObservedExperts | None:
    """Return the experts of a layer, if any."""
    return next((each for each in layer.modules() if isinstance(each, ObservedExperts)), None)


def hide_experts(layer: nn.Module, experts: Experts | None) -> None:
    """Replace transformers' experts, if any, by `ObservedExperts`."""
    if experts is None:
        return
    block = getattr(layer, experts.block, None) if experts.block else layer
    if isinstance(theirs := getattr(block, "experts", None), nn.Module):
        assert isinstance(block, nn.Module)
        activation = theirs.act_fn
        assert callable(activation)
        parts = _PARTS if hasattr(theirs, "gate_up_proj") else _PARTS[1:]
        block.experts = ObservedExperts(activation, parts)


def load_experts(
    layer: nn.Module, tensors: Mapping[str, F32], device: torch.device
) -> dict[str, F32]:
    """Load the weights of a layer's experts; return the other tensors."""
    found, left = _by_expert(tensors), dict(tensors)
    place = find_experts(layer)
    if place is None:
        return left
    for parts in found.values():
        if parts.keys() != {*place.parts}:
            return left  # the loader reports the others
    for parts in found.values():
        own = (torch.from_numpy(left.pop(parts[part])).to(device) for part in place.parts)
        place.networks.append(tuple(own))
    return left


def watch(
    experts: ObservedExperts, run: Callable[[], None]
) -> tuple[list[ExpertInputs], dict[int, int]]:
    """Record the inputs of experts over the calibration text.

    Args:
        experts: of the layer.
        run: runs the layer over the whole text.

    Returns:
        The inputs of each expert, and the number of tokens of those with few, which were recorded
        with all tokens.
    """
    first, down = experts.networks[0][0], experts.networks[0][-1]
    sizes, device = (first.shape[1], down.shape[1]), first.device

    def nothing() -> ExpertInputs:
        outer, inner = (Products.none(size, device) for size in sizes)
        return ExpertInputs(outer, inner)

    seen = experts.seen = [nothing() for _ in experts.networks]
    run()
    few = {index: each.tokens for index, each in enumerate(seen) if each.tokens < FEW}
    if few:
        for index in few:
            seen[index] = nothing()
        experts.unrouted = frozenset(few)
        run()
    experts.seen, experts.unrouted = None, frozenset()
    return seen, few


def round_experts(
    experts: ObservedExperts, seen: list[ExpertInputs], recipe: Recipe, prefix: str
) -> dict[str, Tensor]:
    """Quantize the layer's experts in ModelOpt's unified layout; names begin with `prefix`.

    Other engines require one input scale for all experts of a layer, and one global scale for gate
    and up of an NVFP4 expert.
    """
    largest = [max(each.outer.largest for each in seen), max(each.inner.largest for each in seen)]
    found: dict[str, Tensor] = {}
    for index, (network, own) in enumerate(zip(experts.networks, seen, strict=True)):
        top = max(float(weight.abs().max()) for weight in network[:-1])
        for part, weight in zip(experts.parts, network, strict=True):
            is_inner = part == "down_proj"
            products = own.inner if is_inner else own.outer
            maximum = float(weight.abs().max()) if is_inner else top
            rounded = round_weight(weight, products, recipe, maximum, largest[is_inner])
            found |= {f"{prefix}.{index}.{part}.{name}": each for name, each in rounded.items()}
    return found


def read_canonical(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Return a layer's tensors by transformers' names, each expert's as `experts.3.up_proj`."""
    found: dict[str, Tensor] = {}
    experts = family.experts
    is_turned = experts is not None and _is_turned(tensors, experts)
    for name, parts in family.joined.items():
        if tensors.keys() >= {*parts}:
            found[name] = _joined([tensors[part] for part in parts])
    for name, tensor in tensors.items():
        if experts is not None and name in experts.joined:
            which = experts.joined.index(name)
            found |= dict(_split(experts.prefix, tensor, which, is_turned=is_turned))
        else:
            found.setdefault(family.canonical(name), tensor)
    return found


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return tensors of one type, one after the other along the first axis."""
    first, rows = tensors[0].info, sum(each.info.shape[0] for each in tensors)
    info = TensorInfo(first.dtype, (rows, *first.shape[1:]))
    return Tensor(info, b"".join(bytes(each.data) for each in tensors))


def _is_turned(tensors: Mapping[str, Tensor], experts: Experts) -> bool:
    """Return whether joined tensors are [E, in, out], as in published files of Qwen3-VL."""
    norm = tensors.get("input_layernorm.weight")
    if norm is None or not tensors.keys() >= {*experts.joined} or not experts.joined:
        return False
    gate_up, down = (tensors[name].info.shape for name in experts.joined)
    (hidden,) = norm.info.shape
    return gate_up[1] == hidden and down[2] == hidden


def _split(
    prefix: str, tensor: Tensor, which: int, *, is_turned: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of each expert: gate and up of [E, 2 I, H], or down of [E, H, I]."""
    count, rows, width = tensor.info.shape
    for index in range(count):
        own = Tensor(
            TensorInfo(tensor.info.dtype, (rows, width)), tensor.rows(index, index + 1).data
        )
        own = own.transposed() if is_turned else own
        if which == 1:
            yield f"{prefix}.{index}.down_proj.weight", own
            continue
        both = own.info.shape[0]
        yield f"{prefix}.{index}.gate_proj.weight", own.rows(0, both // 2)
        yield f"{prefix}.{index}.up_proj.weight", own.rows(both // 2, both)


def _by_expert(names: Iterable[str]) -> dict[int, dict[str, str]]:
    """Return the names of the experts' weights by index and part, in order."""
    found: dict[int, dict[str, str]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            part = name.split(".")[-2]
            found.setdefault(int(match[2]), {})[part] = name
    return dict(sorted(found.items()))
