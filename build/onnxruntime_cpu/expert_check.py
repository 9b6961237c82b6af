"""Compares each expert of an engine with that of the portable graph.

Rounding may route tokens to other experts, so a whole pass shows less. Here each expert gets one
row, in the engine's operator and in the portable graph a few experts at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.expert_subgraph import slice_experts
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.verify.check import DEVIATIONS, row_errors
from edgellm.build.verify.reference import Source, float_error
from edgellm.build.verify.reference_graphs import plain_versions
from edgellm.build.verify.rounding_simulation import Rounds
from edgellm.build.verify.streamed_eval import run_in_pieces
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph

_AT_ONCE = 8  # experts of the portable graph; each computes the rows of all of them
_INPUTS = ("x", "ids", "shares")
_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)

Rows = NDArray[np.float32]


def check_experts(source: Source, graph: Path, engine: Rounds) -> str:
    """The result for users; "" without experts.

    Args:
        source: the portable graph.
        graph: of the engine, with its weights in the same folder.
        engine: its rounding.

    Raises:
        EdgeLLMError: an expert differs.
    """
    model = source.load()[0]
    layers, random = ExpertLayer.all_of(model.graph), np.random.default_rng(11)
    worst = bound = 0.0
    for layer in layers:
        x = random.standard_normal((layer.count, layer.gate.shape[1]), np.float32)
        found = _of_engine(graph, layer, x)
        for first in range(0, layer.count, _AT_ONCE):
            part = slice(first, min(first + _AT_ONCE, layer.count))
            exact, *rounded = _of_portable(model, layer, source, engine, part, x[part])
            errors = [row_errors(each, exact) for each in rounded]
            allowed = DEVIATIONS * sum(errors, float_error(each.shape[1] for each in layer.stacks))
            for at, (row, wanted) in enumerate(zip(found[part], exact, strict=True), first):
                off = row_errors(row[None], wanted[None])
                if off > allowed:
                    raise _other(layer, at, off, allowed)
                worst = max(worst, off)
            bound = max(bound, allowed)
    if not layers:
        return ""
    count = sum(layer.count for layer in layers)
    return (
        f"{source.role} passed: {count} experts, each alone, relative error {worst:.2g} "
        f"(limit {bound:.2g})"
    )


def _other(layer: ExpertLayer, index: int, off: float, allowed: float) -> EdgeLLMError:
    name = layer.name[max(layer.name.find("model."), 0) :]
    return EdgeLLMError(
        f"expert {index} of {name} computes something else than that of the portable graph: "
        f"its relative error is {off:.2g}, the limit is {allowed:.2g}",
        hint="report it with the bundle's manifest; --noCheck builds without this comparison",
    )


def _passes(indices: Sequence[int], top_k: int, x: Rows) -> dict[str, NDArray[Any]]:
    """One row for each expert, with weight 1."""
    shares = np.zeros((1, len(indices), top_k), np.float32)
    shares[..., 0] = 1
    ids = np.repeat(np.array(indices, np.int64)[None, :, None], top_k, 2)
    return dict(zip(_INPUTS, (x[None], ids, shares), strict=True))


def _of_engine(path: Path, layer: ExpertLayer, x: Rows) -> Rows:
    """Rows [E, H] of the engine's experts."""
    graph = onnx.load(path, load_external_data=False).graph
    node = next(
        node for node in graph.node
        if node.op_type == "Experts" and node.input[3].startswith(f"{layer.name}.gate_up.")
    )  # fmt: skip
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    alone.input[:3], alone.output[:] = _INPUTS, ["y"]
    values = {
        name: onnx.helper.make_tensor_value_info(name, kind, None)
        for name, kind in (*zip(_INPUTS, _TYPES, strict=True), ("y", onnx.TensorProto.FLOAT))
    }
    held = [each for each in graph.initializer if each.name in node.input]
    inputs = [values[name] for name in _INPUTS]
    own = onnx.helper.make_graph([alone], "experts", inputs, [values["y"]], held)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(DOMAIN, 1)]
    place = path.with_name("experts.check.onnx")
    onnx.save(onnx.helper.make_model(own, opset_imports=imports, ir_version=10), place)
    try:
        session = load_graph(place, GraphOptions(optimize=False, own_kernels=True))
        (found,) = session.run(["y"], _passes(range(layer.count), layer.top_k, x))
        return np.asarray(found, np.float32)[0]
    finally:
        place.unlink()


def _of_portable(
    model: ir.Model, layer: ExpertLayer, source: Source, engine: Rounds, part: slice, x: Rows
) -> Iterator[Rows]:
    """Rows [n, H] of some experts, exact and with the engine's rounding, if any."""
    few, rounds = slice_experts(model, layer, part), bool(engine.kernels)
    versions = plain_versions(few, source.bundle, None, engine, len(x), rounds=rounds)
    for found in run_in_pieces(versions, _passes(range(len(x)), layer.top_k, x)):
        yield next(iter(found.values()))[0]
