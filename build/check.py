"""Whether a lowered graph computes what the portable one does, on a few random passes.

The reference is the portable graph itself in ONNX Runtime, node by node. Rounding of layers' inputs
is left out of it, since lowered graphs round inputs in their own way; weights and cached rows that
the build rounds are rounded in it, too. It is mapped from the bundle's files, and one weight is
decoded at a time, so a check takes little memory whatever the model's size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm import contract
from edgellm.build.lowering.round_int4 import ROUNDED_SCALE, load_portable
from edgellm.build.lowering.rounded_inputs import lower_inputs
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.samples import Inputs, held_inputs, sample_passes
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph
from edgellm.manifest import Bundle, GraphSpec, KVCacheSpec

Numbers = list[dict[str, NDArray[Any]]]
_CAPACITY = 32  # rows of the reference's cache, over all of which it attends
_GRAPH = "reference.onnx"
_LAYER = "layer_input."  # outputs of graphs that are searched for the first fault
_NORMS = ("RMSNormalization", "LayerNormalization")
# The largest relative error of a row that rounding may leave. Measured: 1e-5 and 0.004 for floats,
# at most 0.15 for int8 and int4 (SmolLM2-135M, the tests' models); a mask that is left out, another
# rope table in one layer and swapped weights give 0.5 to 2.7 in SmolLM2, whatever the precision.
FLOATS, HALVES, ROUNDED = 2e-3, 0.03, 0.4


@dataclass(frozen=True, slots=True)
class Reference:
    """What the portable graph of a role computes of some passes."""

    role: str
    bundle: Bundle
    cache: KVCacheSpec | None  # of the engine's graph
    passes: list[Inputs]
    numbers: Numbers
    why_not: str = ""  # why there are none
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Of all passes that a check compares; of images 0."""
        ids = (each.get(contract.INPUT_IDS) for each in self.passes)
        return sum(each.shape[1] for each in ids if each is not None)

    def differs(self, runner: Runner) -> float:
        """The largest relative error of a row of a runner's outputs."""
        return difference(run_passes(runner, self.role, self.bundle, self.passes), self.numbers)


def difference(found: Numbers, expected: Numbers) -> float:
    """The largest relative error of a row."""
    return max(
        _error(one[name], other[name])
        for one, other in zip(found, expected, strict=True)
        for name in other if name in one
    )  # fmt: skip


def run_passes(runner: Runner, role: str, bundle: Bundle, passes: list[Inputs]) -> Numbers:
    """What a runner gives for passes one behind the other; floats only."""
    runner.hold(held_inputs(role, bundle))
    found = []
    for inputs in passes:
        outputs = runner.run(inputs)
        arrays = {name: np.array(outputs[name]) for name in outputs}
        if contract.CANDIDATE_IDS in arrays:
            _by_id(arrays)
        found.append({name: each for name, each in arrays.items() if each.dtype == np.float32})
    return found


def _by_id(arrays: dict[str, NDArray[Any]]) -> None:
    """Candidates in the order of their ids, which small errors do not change."""
    ids = arrays.pop(contract.CANDIDATE_IDS)
    order = np.argsort(ids, axis=-1, kind="stable")
    scores = np.take_along_axis(arrays[contract.CANDIDATE_LOG_PROBS], order, -1)
    arrays[contract.CANDIDATE_LOG_PROBS] = scores
    arrays["sorted_ids"] = np.take_along_axis(ids, order, -1).astype(np.float32)


def _error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Of the row that differs most; what all numbers of a row have in common does not count."""
    if not np.isfinite(found).all():
        return float("inf")
    wanted = expected - expected.mean(axis=-1, keepdims=True)
    given = found - found.mean(axis=-1, keepdims=True)
    sizes = np.linalg.norm(wanted, axis=-1)
    return float((np.linalg.norm(given - wanted, axis=-1) / np.maximum(sizes, 1e-6)).max())


def make_reference(
    role: str,
    bundle: Bundle,
    cache: KVCacheSpec | None,
    portable: Path,
    rounded: WeightFile | None,
    folder: Path,
) -> Reference:
    """Compute it.

    Args:
        role: of the graph.
        bundle: that it is of.
        cache: of the engine's graph, where it has one.
        portable: the graph.
        rounded: where the build keeps weights that it rounds.
        folder: of the engine in the making; holds a graph for a while.
    """
    passes = sample_passes(role, bundle, _CAPACITY, _CAPACITY)
    model = _in_its_own_type(load_portable(portable, rounded), bundle)
    start = time.perf_counter()
    try:
        with _opened(model, bundle, cache, folder) as runner:
            numbers = run_passes(runner, role, bundle, passes)
    except (EdgeLLMError, OSError) as error:
        return Reference(role, bundle, cache, passes, [], why_not=str(error))
    return Reference(role, bundle, cache, passes, numbers, seconds=time.perf_counter() - start)


def _in_its_own_type(model: ir.Model, bundle: Bundle) -> ir.Model:
    """Weights that the build rounded are decoded to float32, whatever activations are."""
    if bundle.dtype == "float16":
        for node in [node for node in model.graph if node.op_type == "MatMul"]:
            decoded = node.inputs[1].producer() if node.inputs[1] is not None else None
            if decoded is None or decoded.op_type != "DequantizeLinear":
                continue
            scale = decoded.inputs[1]
            if scale is not None and str(scale.name).endswith(ROUNDED_SCALE):
                cast = ir.node("Cast", [node.inputs[1]], {"to": int(ir.DataType.FLOAT16)})
                model.graph.insert_before(node, cast)
                node.replace_input_with(1, cast.outputs[0])
    return model


@contextmanager
def _opened(
    model: ir.Model, bundle: Bundle, cache: KVCacheSpec | None, folder: Path
) -> Iterator[Runner]:
    """The portable graph without the rounding of inputs; its weights are linked into `folder`.

    ONNX Runtime takes weights from the graph's own folder only.
    """
    lower_inputs(model)
    if cache is not None and cache.dtype == "int8":
        _round_cached_rows(model, cache)
    tensors = (value.const_value for value in model.graph.initializers.values())
    sources = {Path(each.path) for each in tensors if isinstance(each, ir.ExternalTensor)}
    links = [folder / each.name for each in sources if each.parent != folder]
    try:
        for source in sources:
            if source.parent != folder:
                os.link(source, folder / source.name)
        ir.save(model, folder / _GRAPH)
        graph = LoadedGraph(load_graph(folder / _GRAPH, optimize=False))
        yield OnnxRuntimeRunner([graph], bundle.cache if cache is not None else None, _CAPACITY)
    finally:
        for path in (folder / _GRAPH, *links):
            path.unlink(missing_ok=True)


def _round_cached_rows(model: ir.Model, cache: KVCacheSpec) -> None:
    """To int8 and back, before they are written; one scale for each tensor."""
    assert cache.ranges is not None
    for layer, pair in enumerate(zip(cache.ranges.keys, cache.ranges.values, strict=True)):
        for part, largest in zip(("key", "value"), pair, strict=True):
            past = contract.past_name(layer, part)
            (node,) = (
                each for each in model.graph
                if each.op_type == "TensorScatter"
                and each.inputs[0] is not None and each.inputs[0].name == past
            )  # fmt: skip
            rows, dtype = node.inputs[1], node.inputs[0].dtype  # type: ignore[union-attr]
            assert dtype is not None
            tensors = np.array(largest / 127, dtype.numpy()), np.int8(0)
            scale, zero = (
                ir.Value(name=f"{past}.{name}", const_value=ir.tensor(np.asarray(array)))
                for name, array in zip(("scale", "zero"), tensors, strict=True)
            )
            for value in (scale, zero):
                model.graph.register_initializer(value)
            codes = ir.node("QuantizeLinear", [rows, scale, zero])
            back = ir.node("DequantizeLinear", [codes.outputs[0], scale, zero])
            model.graph.insert_before(node, [codes, back])
            node.replace_input_with(1, back.outputs[0])


def bound_of(bundle: Bundle, graphs: Sequence[GraphSpec], cache: KVCacheSpec | None) -> float:
    """The error that the precision of an engine's graphs and cache may leave."""
    has_int8_cache = cache is not None and cache.dtype == "int8"
    if has_int8_cache or any(graph.precision not in ("fp32", "fp16") for graph in graphs):
        return ROUNDED
    return HALVES if bundle.dtype == "float16" else FLOATS


def require_alike(
    reference: Reference, runner: Runner, bound: float, search: Callable[[], str]
) -> str:
    """Stop a build whose graph computes something else.

    Args:
        reference: of the role.
        runner: of what was built.
        bound: error of a row that is rounding's.
        search: names the first layer that differs.

    Returns:
        What people should know of the check.

    Raises:
        EdgeLLMError: says how far it is off, and where that begins.
    """
    if reference.why_not:
        return f"{reference.role}: not compared with the portable graph: {reference.why_not}"
    start = time.perf_counter()
    error = reference.differs(runner)
    if error > bound:
        raise EdgeLLMError(
            f"the lowered {reference.role} graph computes something else than the portable one: "
            f"a row is off by {error:.1%}, of which {bound:.1%} may be rounding; it begins before "
            f"{search()}",
            hint="report it with the bundle's manifest",
        )
    seconds = reference.seconds + time.perf_counter() - start
    rows = f"{reference.rows} rows" if reference.rows else "samples"
    return (
        f"{reference.role}: {rows} differ by {error:.2g} at most from the portable graph's "
        f"(rounding: {bound:g}); {seconds:.1f} s"
    )


def first_difference(
    reference: Reference,
    portable: Path,
    rounded: WeightFile | None,
    folder: Path,
    bound: float,
    open_lowered: Callable[[ir.Model], Runner],
) -> str:
    """The first norm whose input differs; both graphs are made anew, with these as outputs."""
    role, bundle = reference.role, reference.bundle
    model = _in_its_own_type(load_portable(portable, rounded), bundle)
    names = _show_layers(model, bundle)
    with _opened(model, bundle, reference.cache, folder) as runner:
        expected = run_passes(runner, role, bundle, reference.passes)
    lowered = load_portable(portable, rounded)
    _show_layers(lowered, bundle)
    found = run_passes(open_lowered(lowered), role, bundle, reference.passes)
    for output, node in names.items():
        pairs = zip(found, expected, strict=True)
        if any(_error(one[output], other[output]) > bound for one, other in pairs):
            return node
    return "the outputs"


def _show_layers(model: ir.Model, bundle: Bundle) -> dict[str, str]:
    """Make what norms read outputs of the graph; the norms' names by the outputs'."""
    dtype, shown = ir.DataType[{"float16": "FLOAT16", "float32": "FLOAT"}[bundle.dtype]], {}
    for node in model.graph:
        value = node.inputs[0] if node.op_type in _NORMS else None
        made_by = value.producer() if value is not None else None
        if value is None or made_by is None or value in model.graph.outputs:
            continue
        if made_by.op_type == "Gather":  # a look-up, whose type lowerings choose
            continue
        value.name, value.type = f"{_LAYER}{len(shown)}", ir.TensorType(dtype)
        model.graph.outputs.append(value)
        name = str(node.name).removesuffix(f".{node.op_type}")
        shown[value.name] = name[max(name.find("model."), 0) :]
    return shown
