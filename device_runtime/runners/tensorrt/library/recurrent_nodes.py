"""The nodes of recurrent layers by edgellm's kernels; see `attention_nodes.py`."""

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

CONVOLVE_ROWS, DELTA_ROWS = "convolve_rows", "delta_rows"


def _convolved(_op: Any, of: Shapes, _given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    return (("float16", tuple(of["x"])),)


def _convolve(_op: Any, of: Shapes, given: Given) -> Launch:
    width = given["width"]
    return Launch(
        catalog.CONVOLVE_ROWS,
        (of["x"][1], -(-width // catalog.CHANNELS), 1),
        (given["entry"], width, given["size"]),
    )


def _read(_op: Any, of: Shapes, _given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    return (("float32", tuple(of["v"])),)


def _delta(_op: Any, of: Shapes, given: Given) -> Launch:
    heads, key_dim, value_dim = given["heads"], given["key_dim"], given["value_dim"]
    sizes = given["key_heads"], heads, key_dim, value_dim
    return Launch(
        catalog.delta_rows(takes=bool(given["takes"])),
        (heads, -(-value_dim // catalog.VALUES), 1),
        (given["entry"], of["q"][1], of["tree"][1], *sizes),
    )


PLUGINS = (
    Plugin(
        name=CONVOLVE_ROWS,
        inputs=("x", "taps", "parents", "table"),
        num_outputs=1,
        outputs=_convolved,
        launch=_convolve,
    ),
    Plugin(
        name=DELTA_ROWS,
        inputs=("q", "k", "v", "g", "b", "tree", "table"),
        num_outputs=1,
        outputs=_read,
        launch=_delta,
    ),
)
