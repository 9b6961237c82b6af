"""The nodes of embeddings and heads by edgellm's kernels; see `attention_nodes.py`."""

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

LOOK_UP_ROWS, HEAD_ROWS = "look_up_rows", "head_rows"
_Outputs = tuple[tuple[str, tuple[Size, ...]], ...]


def _rows(_op: Any, of: Shapes, given: Given) -> _Outputs:
    return (("float16", (of["ids"][0], of["ids"][1], given["hidden"])),)


def _look_up(_op: Any, of: Shapes, given: Given) -> Launch:
    grid = of["ids"][1], -(-given["hidden"] // catalog.LOOKED_UP), 1
    return Launch(catalog.look_up_rows(given["codes"]), grid, (given["matrix"], *_sizes(given)))


def _logits(_op: Any, of: Shapes, given: Given) -> _Outputs:
    return (("float32", (of["x"][0], of["x"][1], given["vocab"])),)


def _multiply(op: Any, of: Shapes, given: Given) -> Launch:
    rows = of["x"][1]
    tiles = op.cdiv(rows, catalog.HEAD_ROWS[1])
    grid = tiles, -(-given["vocab"] // catalog.HEAD_OUTPUTS), 1
    return Launch(catalog.head_rows(given["codes"]), grid, (given["matrix"], rows, *_sizes(given)))


def _sizes(given: Given) -> tuple[Size, ...]:
    return given["vocab"], given["hidden"], given["block"]


PLUGINS = (
    Plugin(
        name=LOOK_UP_ROWS,
        inputs=("ids", "table"),
        num_outputs=1,
        outputs=_rows,
        launch=_look_up,
    ),
    Plugin(name=HEAD_ROWS, inputs=("x", "table"), num_outputs=1, outputs=_logits, launch=_multiply),
)
