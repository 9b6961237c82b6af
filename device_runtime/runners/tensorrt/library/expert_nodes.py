"""The nodes of mixtures of experts by edgellm's kernels; see `attention_nodes.py`."""

from __future__ import annotations

from typing import Any

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    Given,
    Launch,
    Plugin,
    Shapes,
    Size,
)

ROUTE_ROWS, GROUP_ROWS, SUM_EXPERTS = "route_rows", "group_rows", "sum_experts"
EXPERT_GATES, EXPERT_DOWNS = "expert_gates", "expert_downs"
# Of `RoutingForm`, in the order of the kernel's arguments.
STEPS = "offset", "capped", "sigmoid", "biased", "normalized", "weighted"
_Outputs = tuple[tuple[str, tuple[Size, ...]], ...]


def _routed(_op: Any, of: Shapes, given: Given) -> _Outputs:
    rows = of["logits"][0], of["logits"][1], given["top_k"]
    return ("int64", rows), ("float16", rows)


def _route(_op: Any, of: Shapes, given: Given) -> Launch:
    sizes = given["experts"], given["top_k"], *given["steps"], *given["number_bits"]
    return Launch(catalog.route_rows(given["experts"]), (of["logits"][1], 1, 1), sizes)


def _grouped(_op: Any, of: Shapes, given: Given) -> _Outputs:
    ids = of["ids"]
    return ("int32", tuple(ids)), ("int32", (ids[0], given["experts"] + 1))


def _group(_op: Any, of: Shapes, given: Given) -> Launch:
    pairs = of["ids"][1] * given["top_k"]
    return Launch(catalog.GROUP_ROWS, (given["experts"] + 1, 1, 1), (pairs,))


def _gated(_op: Any, of: Shapes, given: Given) -> _Outputs:
    return (("float16", (of["x"][0], of["x"][1], given["top_k"] * given["inner"])),)


def _gates(_op: Any, _of: Shapes, given: Given) -> Launch:
    grid = given["experts"], -(-given["inner"] // catalog.EXPERT_OUTPUTS), 1
    sizes = *_sizes(given), given["top_k"], *given["gating_bits"]
    return Launch(catalog.expert_gates(given["codes"]), grid, sizes)


def _parts(_op: Any, of: Shapes, given: Given) -> _Outputs:
    return (("float16", (of["x"][0], of["x"][1], given["top_k"] * given["hidden"])),)


def _downs(_op: Any, _of: Shapes, given: Given) -> Launch:
    grid = given["experts"], -(-given["hidden"] // catalog.EXPERT_OUTPUTS), 1
    return Launch(catalog.expert_downs(given["codes"]), grid, _sizes(given))


def _sizes(given: Given) -> tuple[Size, ...]:
    return given["matrix"], given["hidden"], given["inner"], given["block"]


def _summed(_op: Any, of: Shapes, given: Given) -> _Outputs:
    return (("float16", (of["parts"][0], of["parts"][1], given["hidden"])),)


def _sum(_op: Any, of: Shapes, given: Given) -> Launch:
    grid = of["parts"][1], -(-given["hidden"] // catalog.SUMMED), 1
    return Launch(catalog.SUM_EXPERTS, grid, (given["hidden"], given["top_k"]))


PLUGINS = (
    Plugin(
        name=ROUTE_ROWS,
        inputs=("logits", "offsets", "bias", "factors"),
        num_outputs=2,
        outputs=_routed,
        launch=_route,
    ),
    Plugin(name=GROUP_ROWS, inputs=("ids",), num_outputs=2, outputs=_grouped, launch=_group),
    Plugin(
        name=EXPERT_GATES,
        inputs=("x", "order", "begins", "table"),
        num_outputs=1,
        outputs=_gated,
        launch=_gates,
    ),
    Plugin(
        name=EXPERT_DOWNS,
        inputs=("x", "shares", "order", "begins", "table"),
        num_outputs=1,
        outputs=_parts,
        launch=_downs,
    ),
    Plugin(name=SUM_EXPERTS, inputs=("parts",), num_outputs=1, outputs=_summed, launch=_sum),
)
