"""Runs a large graph a few nodes at a time, so that few of its weights are in memory at once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.function_calls import LINEARS, find_calls
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import Joined, slice_first, stored_tensor
from edgellm.build.lowering.linears.weights import WeightPart
from edgellm.build.verify.merge_graphs import SECOND, together
from edgellm.core.resources import trim
from edgellm.device_runtime.runners.onnxruntime_graphs import load_in_memory

SLICE = 16 << 20  # numbers of a weight that one product decodes at once
# Maximum values of a piece's weights, unless one node reads more: ONNX Runtime may decode all of
# them before its first product.
PIECE = 2 * SLICE
_PLANE_STEPS = 2  # values held for each code that is joined of planes
CONTRIB = "com.microsoft"
CUT = "cut."  # prefix of inputs that are a slice of a layer's


# ------------------------------------------------------------------------------------ slices
Slices = dict[str, tuple[str, int]]  # by name: the whole weight and its outputs; 0: unchanged


def slice_layers(graph: GraphEditor) -> Slices:
    """Split large layers by outputs, inputs or experts, so that each part decodes few weights.

    A layer becomes several calls, each with a slice of the first axis of the stored tensors.

    Args:
        graph: portable, with its function calls.
    """
    whole: Slices = {}
    for call in find_calls(graph.graph, *LINEARS):
        weight = WeightPart.of(call)
        assert weight is not None
        graph.cursor = call
        if weight.is_by_output:
            _slice_outputs(graph, call, weight, whole)
        else:
            _slice_inputs(graph, call, weight, whole)
    for layer in ExpertLayer.all_of(graph.graph):
        graph.cursor = layer.call
        _slice_experts(graph, layer, whole)
    return whole


def _slice_outputs(graph: GraphEditor, call: ir.Node, weight: WeightPart, whole: Slices) -> None:
    width, out = weight.shape
    found = []
    for part in _parts(weight.stored[0], out, width):
        count = part.stop - part.start
        stored = [_operand(graph, value, part, whole, count) for value in call.inputs[1:]]
        found.append(_call_again(graph, call, [call.inputs[0], *stored]))
    if found:
        _replace(graph, call, graph.node("Concat", found, axis=-1))


def _slice_inputs(graph: GraphEditor, call: ir.Node, weight: WeightPart, whole: Slices) -> None:
    width, out = weight.shape
    x, codes, *factors = call.inputs
    block, found = weight.block_size, []
    for part in _parts(weight.stored[0], width, out, block or 1):
        bounds = [graph.constant(f"at.{at}", np.array([at])) for at in (part.start, part.stop, -1)]
        some = graph.node("Slice", [x, *bounds])
        some.name = f"{CUT}{some.name}"
        stored = [_operand(graph, codes, part, whole, out), *factors]
        if block:
            blocks = slice(part.start // block, part.stop // block)
            stored[1:] = [_operand(graph, value, blocks, whole, out) for value in factors]
        found.append(_call_again(graph, call, [some, *stored]))
    _replace_by_sum(graph, call, found)


def _slice_experts(graph: GraphEditor, layer: ExpertLayer, whole: Slices) -> None:
    count, width, inner = layer.gate.shape
    (x, ids, shares, *stored), found = layer.call.inputs, []
    for part in _parts(stored_tensor(layer.gate.values[0], layer.call), count, width * inner):
        first = graph.constant(f"expert.{part.start}", np.array(part.start, np.int64))
        own = graph.node("Sub", [ids, first])  # ids of other experts are out of range
        some = [_operand(graph, value, part, whole, 0) for value in stored]
        found.append(_call_again(graph, layer.call, [x, own, shares, *some]))
    _replace_by_sum(graph, layer.call, found)


def _parts(codes: ir.TensorProtocol, entries: int, each: int, steps: int = 1) -> list[slice]:
    """Slices of the first axis in whole steps of entries with `each` values; []: not sliced."""
    step = max(1, SLICE // (each * steps)) * steps
    bits = codes.dtype.bitwidth * math.prod(codes.shape.numpy()[1:])
    if step >= entries or bits % 8 or not isinstance(codes, (ir.ExternalTensor, Joined)):
        return []
    return [slice(first, min(first + step, entries)) for first in range(0, entries, step)]


def _operand(
    graph: GraphEditor, value: ir.Value | None, part: slice, whole: Slices, outputs: int
) -> ir.Value | None:
    """A slice of a layer's operand; quantized scales stay quantized."""
    if value is None:
        return None
    if value.const_value is None:
        factors = value.producer()
        assert factors is not None
        inputs = [_operand(graph, each, part, whole, outputs) for each in factors.inputs]
        return _call_again(graph, factors, inputs)
    some = slice_first(value.const_value, part)
    if some is value.const_value:
        return value
    name = f"{value.name}.{part.start}-{part.stop}"
    whole[name] = str(value.name), outputs
    if name not in graph.graph.initializers:
        some.name = name
        kind = ir.TensorType(some.dtype)
        graph.graph.register_initializer(
            ir.Value(name=name, shape=some.shape, type=kind, const_value=some)  # type: ignore[arg-type]
        )
    return graph.graph.initializers[name]


def _call_again(graph: GraphEditor, call: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
    given = {name: each.value for name, each in call.attributes.items()}
    return graph.node(call.op_type, inputs, domain=call.domain, **given)


def _replace_by_sum(graph: GraphEditor, call: ir.Node, found: Sequence[ir.Value]) -> None:
    if found:
        _replace(graph, call, reduce(lambda y, more: graph.node("Add", [y, more]), found))


def _replace(graph: GraphEditor, call: ir.Node, value: ir.Value) -> None:
    graph.replace(call.outputs[0], value)
    graph.graph.remove(call, safe=True)


def read_as_stored(graph: GraphEditor) -> None:
    """Remove transposes and casts of stored weights from products of a float32 graph.

    Stored tensors alone then identify a weight, see `together`.
    """
    for node in graph.find("MatMul"):
        x, weight = node.inputs
        transposed = _made_by(weight, "Transpose")
        inner = transposed.inputs[0] if transposed is not None else weight
        cast = _made_by(inner, "Cast", "CastLike")
        stored = cast.inputs[0] if cast is not None else inner
        if stored is None or not (_is_matrix(stored) or _is_decoded(stored) or _is_like(cast)):
            continue
        graph.cursor = node
        if not _is_decoded(stored) and stored.dtype != ir.DataType.FLOAT:
            stored = graph.node("Cast", [stored], to=int(ir.DataType.FLOAT))
        perm = transposed.attributes["perm"].as_ints() if transposed is not None else ()
        if len(perm) == 2:
            y = graph.node("FusedMatMul", [x, stored], domain=CONTRIB, transB=1)
        else:  # unchanged, or for each expert
            transposed = graph.node("Transpose", [stored], perm=perm) if perm else stored
            y = graph.node("MatMul", [x, transposed])
        _replace(graph, node, y)


def _made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in op_types else None


def _is_matrix(value: ir.Value) -> bool:
    """Whether a value is a stored float weight."""
    kinds = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    stored = value.const_value
    return stored is not None and stored.dtype in kinds and len(stored.shape) == 2


def _is_like(cast: ir.Node | None) -> bool:
    """Whether a weight is cast to the type of the other operand."""
    return cast is not None and cast.op_type == "CastLike"


def _is_decoded(value: ir.Value) -> bool:
    """Whether a value is a matrix dequantized to float32."""
    decoding = _made_by(value, "DequantizeLinear")
    codes, scales = decoding.inputs[:2] if decoding is not None else (None, None)
    if codes is None or scales is None or codes.const_value is None:
        return False
    cast = _made_by(scales, "Cast")
    kind = scales.dtype if cast is None else ir.DataType(cast.attributes["to"].as_int())
    return kind == ir.DataType.FLOAT


# -------------------------------------------------------------------------------------- runs
def run_in_pieces(
    models: Sequence[ir.Model],
    inputs: Mapping[str, NDArray[Any]],
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> list[dict[str, NDArray[Any]]]:
    """Outputs of inlined graphs for `inputs`; weights are read from their files in order.

    Two versions of a graph are computed together if that reads weights once. `on_progress`:
    how many pieces of how many were computed.

    Raises:
        BrokenArtifactError: ONNX Runtime rejects a graph.
    """
    stored = {
        name: value.const_value
        for model in models
        for name, value in model.graph.initializers.items()
    }
    paths = {
        str(each.location): Path(each.path)
        for each in stored.values()
        if isinstance(each, ir.ExternalTensor)
    }
    sizes = {name: each.size for name, each in stored.items() if each is not None}
    for model in models:
        sizes |= _codes_of_planes(model.graph)
    protos = [ir.to_proto(model) for model in models]
    both = together(*protos) if len(protos) == 2 else None
    with _Mapped(paths) as files:
        if both is None:
            return [_run_all(each, inputs, sizes, files, on_progress) for each in protos]
        found = _run_all(both, inputs, sizes, files, on_progress)
    names = [value.name for value in protos[0].graph.output]
    return [{name: found[name + end] for name in names} for end in ("", SECOND)]


def _codes_of_planes(graph: ir.Graph) -> dict[str, int]:
    """Values of a plane of an inlined graph, by its name: its codes, and what joins them."""
    found = {}
    for shift in graph:
        apart = _made_by(shift.inputs[0], "Unsqueeze") if shift.op_type == "BitShift" else None
        plane = apart.inputs[0] if apart is not None else None
        by = shift.inputs[1].producer() if apart is not None and shift.inputs[1] else None
        if plane is not None and plane.const_value is not None and by is not None:
            codes = plane.const_value.size * by.attributes["value"].as_tensor().size
            found[str(plane.name)] = _PLANE_STEPS * codes
    return found


def _run_all(
    proto: onnx.ModelProto,
    inputs: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    files: Mapping[str, mmap.mmap],
    on_progress: Callable[[int, int], None],
) -> dict[str, NDArray[Any]]:
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    known = {
        name: np.asarray(array, onnx.helper.tensor_dtype_to_np_dtype(types[name]))
        for name, array in inputs.items()
        if name in types
    }
    wanted = [value.name for value in proto.graph.output]
    constants = {node.output[0]: node for node in proto.graph.node if node.op_type == "Constant"}
    nodes = [node for node in proto.graph.node if node.op_type != "Constant"]
    pieces = [
        [*_read_of(constants, piece), *piece] for piece in _pieces(nodes, sizes)
    ]  # shapes of a piece are known before it runs
    uses = {name: at for at, piece in enumerate(pieces) for node in piece for name in node.input}
    uses |= dict.fromkeys(wanted, len(pieces))
    for at, piece in enumerate(pieces):
        made = [name for node in piece for name in node.output if name and name not in constants]
        known |= _run(
            proto, piece, known, [name for name in made if uses.get(name, -1) > at], files
        )
        known = {name: array for name, array in known.items() if uses.get(name, -1) > at}
        for each in files.values():
            each.madvise(mmap.MADV_DONTNEED)
        trim()
        on_progress(at + 1, len(pieces))
    return {name: known[name] for name in wanted}


def _read_of(
    constants: Mapping[str, onnx.NodeProto], piece: Sequence[onnx.NodeProto]
) -> list[onnx.NodeProto]:
    read = dict.fromkeys(name for node in piece for name in node.input)
    return [constants[name] for name in read if name in constants]


def _pieces(
    nodes: Sequence[onnx.NodeProto], sizes: Mapping[str, int]
) -> Iterator[list[onnx.NodeProto]]:
    """Nodes one after the other; a piece begins where a weight is read that would be too much."""
    piece: list[onnx.NodeProto] = []
    held: set[str] = set()
    for node in nodes:
        reads = {name for name in node.input if name in sizes and name not in held}
        if reads and held and sum(map(sizes.__getitem__, held | reads)) > PIECE:
            yield piece
            piece, held = [], set()
        piece.append(node)
        held |= {name for name in node.input if name in sizes}
    yield piece


def _run(
    proto: onnx.ModelProto,
    piece: Sequence[onnx.NodeProto],
    known: Mapping[str, NDArray[Any]],
    wanted: list[str],
    files: Mapping[str, mmap.mmap],
) -> dict[str, NDArray[Any]]:
    read = {name for node in piece for name in node.input}
    if not wanted:
        return {}
    fed = {name: array for name, array in known.items() if name in read}
    graph = onnx.GraphProto(
        name="piece",
        node=piece,
        initializer=[each for each in proto.graph.initializer if each.name in read],
        input=[
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in fed.items()
        ],
        output=[onnx.ValueInfoProto(name=name) for name in wanted],
    )
    model = onnx.ModelProto(
        ir_version=proto.ir_version,
        opset_import=proto.opset_import,
        graph=graph,
        functions=proto.functions,
    )
    used = {
        entry.value
        for each in graph.initializer
        for entry in each.external_data
        if entry.key == "location"
    }
    session = load_in_memory(
        model.SerializeToString(), {name: each for name, each in files.items() if name in used}
    )
    found = map(np.asarray, session.run(wanted, fed))
    return dict(zip(wanted, found, strict=True))


class _Mapped:
    """Memory-mapped weight files of a graph, by their names in the graph."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> Mapping[str, mmap.mmap]:
        for name, path in self._paths.items():
            with path.open("rb") as stream:
                self._maps[name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps

    def __exit__(self, *_: object) -> None:
        self._maps.clear()
