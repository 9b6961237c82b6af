"""Lowered graphs with edgellm's plugin nodes on the CPU: ONNX Runtime computes the rest.

A node launches what its plugin would give TensorRT (`build/tensorrt/plugins.py`), and the
kernel's reference in numpy computes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from kernel_references import REFERENCES
from numpy.typing import NDArray

from edgellm.core.graph_io import HEAD_ROWS, LOGITS_INDEX, ROWS
from edgellm.device_runtime.kernels.triton.catalog import variants
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN, NAMESPACE
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS

_NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
_BY_NAME = {plugin.name: plugin for plugin in PLUGINS}
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Node:
    name: str
    given: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, node: ir.Node) -> _Node:
        inputs, outputs = (
            tuple(str(value.name) for value in values if value is not None)
            for values in (node.inputs, node.outputs)
        )
        given = json.loads(node.attributes[GIVEN].as_string())
        return cls(node.op_type, given, inputs, outputs)


class KernelGraph:
    """A graph with plugin nodes, which has the interface of an ONNX Runtime session."""

    def __init__(self, path: Path, options: Any, memory: Any, sm: int) -> None:
        """Open the graph; `memory` gives the array at an address, see `attention_references`."""
        self._memory, self._compiled = memory, {each.name for each in variants(sm)}
        model = ir.load(path)
        graph = model.graph
        nodes = [node for node in graph if node.domain == NAMESPACE]
        for node in nodes:
            _apart(graph, node)
        self._nodes = [_Node.of(node) for node in nodes]
        self._inputs = [str(value.name) for value in graph.inputs]
        self._outputs = [str(value.name) for value in graph.outputs]
        made = {name for node in self._nodes for name in node.outputs}
        read = {str(v.name): v for node in nodes for v in node.inputs if v is not None}
        graph.outputs.extend(v for name, v in read.items() if name not in {*made, *self._inputs})
        self._given = {}
        for node in nodes:
            old, users = node.outputs[0], tuple(node.outputs[0].uses())
            if any(user.domain != NAMESPACE for user, _ in users):
                assert old.dtype is not None
                new = ir.val(f"{old.name}.given", old.dtype, old.shape)
                graph.inputs.append(new)
                self._given[str(old.name)] = str(new.name), [*(old.shape or ())], old.dtype.numpy()
                for user, index in users:
                    user.replace_input_with(index, new)
        for node in reversed(nodes):
            graph.remove(node, safe=True)
        _double_rows(graph)
        cut = ir.Model(graph, ir_version=model.ir_version)
        place = path.with_suffix(".cut.onnx")
        ir.save(cut, place)
        self._session = onnxruntime.InferenceSession(
            place, options, providers=["CPUExecutionProvider"]
        )
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("only_execute_path_to_fetches", "1")
        self._options.only_execute_path_to_fetches = True

    def get_inputs(self) -> list[Any]:
        return [each for each in self._session.get_inputs() if each.name in self._inputs]

    def get_outputs(self) -> list[Any]:
        return [each for each in self._session.get_outputs() if each.name in self._outputs]

    def run(self, names: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        sizes = {ROWS: next(iter(feeds.values())).shape[1], HEAD_ROWS: 1}
        if LOGITS_INDEX in feeds:
            sizes[HEAD_ROWS] = len(feeds[LOGITS_INDEX])
        known: Arrays = dict(feeds)
        given = {
            new: np.zeros([d if isinstance(d, int) else sizes[str(d)] for d in shape], dtype)
            for new, shape, dtype in self._given.values()
        }
        for node in self._nodes:
            if missing := [each for each in node.inputs if each not in known]:
                found = self._session.run(missing, {**feeds, **given}, self._options)
                known |= dict(zip(missing, found, strict=True))
            self._launch(node, known)
            if node.outputs[0] in self._given:
                given[self._given[node.outputs[0]][0]] = known[node.outputs[0]]
        return self._session.run(list(names), {**feeds, **given}, self._options)

    def _launch(self, node: _Node, known: Arrays) -> None:
        plugin, facts = _BY_NAME[node.name], node.given
        arrays = [known[each] for each in node.inputs]
        shapes = {key: each.shape for key, each in zip(plugin.inputs, arrays, strict=True)}
        outputs = [
            np.full(shape, np.nan if dtype.startswith("float") else -1, dtype)
            for dtype, shape in plugin.outputs(_NUMBERS, shapes, facts)
        ]
        launch = plugin.launch(_NUMBERS, shapes, facts)
        assert launch.variant.name in self._compiled
        flat = [each.reshape(-1) for each in (*arrays, *outputs)]
        REFERENCES[node.name](
            *flat[: len(arrays)],
            *launch.sizes,
            *flat[len(arrays) :],
            constants={**launch.variant.constants, "grid": launch.grid, "memory": self._memory},
        )
        known |= dict(zip(node.outputs, outputs, strict=True))


def _apart(graph: ir.Graph, node: ir.Node) -> None:
    """Copy the first output of a plugin node if it is an output of the graph."""
    old = node.outputs[0]
    if old in graph.outputs:
        copy = ir.node("Identity", [old], name=f"{node.name}.copy")
        graph.append(copy)
        new, name = copy.outputs[0], old.name
        new.type, new.shape = old.type, old.shape
        old.name, new.name = f"{name}.made", name
        graph.outputs[graph.outputs.index(old)] = new


def _has_rows(value: ir.Value | None) -> bool:
    """Whether a value is by row of the pass; weights are not."""
    if value is None or (node := value.producer()) is None:
        return value is not None and any(str(dim) == ROWS for dim in value.shape or ())
    return any(map(_has_rows, node.inputs))


def _double_rows(graph: ir.Graph) -> None:
    """Make the product of a row batch-invariant.

    ONNX Runtime has another kernel for one row, and last bits decide the nearest code.
    """
    products = [node for node in graph if node.op_type == "MatMul"]
    for product in [node for node in products if not _has_rows(node.inputs[1])]:
        x, y = product.inputs[0], product.outputs[0]
        users = tuple(y.uses())
        twice = ir.node("Concat", [x, x], {"axis": 1}, name=f"{product.name}.twice")
        split = ir.node("Split", [y], {"axis": 1, "num_outputs": 2}, num_outputs=2)
        graph.insert_before(product, twice)
        graph.insert_after(product, split)
        product.replace_input_with(0, twice.outputs[0])
        twice.outputs[0].name, split.name = f"{y.name}.twice", f"{product.name}.first"
        first, second = split.outputs
        first.name, second.name, y.name = y.name, f"{y.name}.second", f"{y.name}.both"
        first.type, first.shape, y.shape = y.type, y.shape, None
        for user, index in users:
            user.replace_input_with(index, first)
        graph.outputs[:] = [first if each is y else each for each in graph.outputs]


def open_graph(path: Path, options: Any, device: Any) -> Any:
    """Session of a lowered graph on the fake GPU."""
    if any(node.domain == NAMESPACE for node in ir.load(path).graph):
        return KernelGraph(path, options, device.memory, device.sm)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
