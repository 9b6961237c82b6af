"""Running a large graph a few nodes at a time, so that few of its weights are in memory at once."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.together import SECOND, together
from edgellm.device_runtime.runners.onnxruntime_graphs import load_in_memory

PIECE_BYTES = 128 << 20  # of stored weights that a piece reads, unless one node reads more
SLICE = 16 << 20  # numbers of a weight that one product decodes at once
CONTRIB = "com.microsoft"


# ------------------------------------------------------------------------------------ slices
def slice_products(graph: GraphEditor) -> dict[str, tuple[str, int]]:
    """Let products read their weights as they are stored, and large ones some outputs at a time.

    Args:
        graph: inlined, in float32. `MatMul(x, Transpose(w))` of a matrix [out, in], stored or
            decoded from codes, becomes a product that transposes as it reads.

    Returns:
        By the names of slices: the names of the whole weights, and the outputs of the slices.
    """
    whole: dict[str, tuple[str, int]] = {}
    for node in graph.find("MatMul"):
        x, transposed = node.inputs
        weight = _stored_rows(transposed)
        graph.cursor = node
        decoded = _transposed(graph, transposed) if weight is None else None
        if x is None or (weight is None and decoded is None):
            continue
        slices = _slices(graph, weight, whole) if weight is not None else [decoded]
        found = [_product(graph, x, each) for each in slices if each is not None]
        y = found[0] if len(found) == 1 else graph.node("Concat", found, axis=-1)
        graph.replace(node.outputs[0], y)
        graph.graph.remove(node, safe=True)
    return whole


def _stored_rows(value: ir.Value | None) -> ir.Value | None:
    """The initializer [out, in] behind `Transpose(Cast(w))`, where it is one of floats."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose" or not node.inputs:
        return None
    inner = node.inputs[0]
    cast = inner.producer() if inner is not None else None
    if cast is not None and cast.op_type in ("Cast", "CastLike"):
        inner = cast.inputs[0]
    stored = inner.const_value if inner is not None else None
    kinds = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if stored is None or stored.dtype not in kinds or len(stored.shape) != 2:
        return None
    return inner


def _transposed(graph: GraphEditor, value: ir.Value | None) -> ir.Value | None:
    """The matrix [out, in] that is transposed, cast to float32 rather than like something."""
    node = value.producer() if value is not None else None
    order = node.attributes.get("perm") if node is not None else None
    if node is None or node.op_type != "Transpose" or order is None:
        return None
    inner = node.inputs[0] if [*order.as_ints()] == [1, 0] else None
    cast = inner.producer() if inner is not None else None
    if cast is None or cast.op_type != "CastLike":
        return inner
    return graph.node("Cast", [cast.inputs[0]], to=int(ir.DataType.FLOAT))


def _slices(
    graph: GraphEditor, weight: ir.Value, whole: dict[str, tuple[str, int]]
) -> Iterator[ir.Value]:
    """A weight [out, in], in parts of some outputs where it is large and lies in a file."""
    tensor = weight.const_value
    assert tensor is not None
    out, width = map(int, tensor.shape.numpy())
    step = max(1, SLICE // width)
    if step >= out or not isinstance(tensor, ir.ExternalTensor):
        yield weight
        return
    for first in range(0, out, step):
        end = min(first + step, out)
        part = _rows_of(graph, tensor, first, end)
        whole[str(part.name)] = str(weight.name), end - first
        yield part


def _product(graph: GraphEditor, x: ir.Value, weight: ir.Value) -> ir.Value:
    """X [..., in] by a stored weight [out, in]."""
    if weight.const_value is not None and weight.dtype != ir.DataType.FLOAT:
        weight = graph.node("Cast", [weight], to=int(ir.DataType.FLOAT))
    return graph.node("FusedMatMul", [x, weight], domain=CONTRIB, transB=1)


def slice_codes(graph: GraphEditor) -> None:
    """Let products with blocked INT4 codes [in, out] decode these, some inputs at a time."""
    for node in graph.find("MatMul"):
        x, decoded = node.inputs
        cast = decoded.producer() if decoded is not None else None
        source = cast.inputs[0] if cast is not None and cast.op_type == "CastLike" else decoded
        decoding = source.producer() if source is not None else None
        if x is None or decoding is None or decoding.op_type != "DequantizeLinear":
            continue
        parts = _code_slices(graph, decoding)
        if not parts:
            continue
        graph.cursor, block = node, decoding.attributes["block_size"].as_int()
        total: ir.Value | None = None
        for first, end, codes, scales in parts:
            bounds = [graph.constant(f"at.{at}", np.array([at])) for at in (first, end, -1)]
            some = graph.node("Slice", [x, *bounds]) if len(parts) > 1 else x
            weight = graph.node("DequantizeLinear", [codes, scales], axis=0, block_size=block)
            y = graph.node("MatMul", [some, weight])
            total = y if total is None else graph.node("Add", [total, y])
        assert total is not None
        graph.replace(node.outputs[0], total)
        graph.graph.remove(node, safe=True)


def _code_slices(
    graph: GraphEditor, decoding: ir.Node
) -> list[tuple[int, int, ir.Value, ir.Value]]:
    """First input, end, codes and scales of each slice; none where the codes are others."""
    tensors = [value.const_value for value in decoding.inputs if value is not None]
    if len(tensors) != 2 or not all(isinstance(each, ir.ExternalTensor) for each in tensors):
        return []
    codes, scales = (each for each in tensors if isinstance(each, ir.ExternalTensor))
    block, dims = decoding.attributes.get("block_size"), codes.shape.numpy()
    if len(dims) != 2:  # those of experts
        return []
    if codes.dtype != ir.DataType.INT4 or scales.dtype != ir.DataType.FLOAT or block is None:
        return []
    rows, out = map(int, dims)
    step = max(1, SLICE // out // block.as_int()) * block.as_int()
    if step >= rows or out % 2:
        stored = [value for value in decoding.inputs if value is not None]
        return [(0, rows, stored[0], stored[1])]
    found = []
    for first in range(0, rows, step):
        end = min(first + step, rows)
        blocks = first // block.as_int(), end // block.as_int()
        found.append(
            (first, end, _rows_of(graph, codes, first, end), _rows_of(graph, scales, *blocks))
        )
    return found


def _rows_of(graph: GraphEditor, tensor: ir.ExternalTensor, first: int, end: int) -> ir.Value:
    """Rows of a stored matrix, as an initializer of its own."""
    rows, width = map(int, tensor.shape.numpy())
    name, row_bytes = f"{tensor.name}.rows{first}", tensor.nbytes // rows
    if name not in graph.graph.initializers:
        part = ir.ExternalTensor(
            tensor.location, (tensor.offset or 0) + first * row_bytes, (end - first) * row_bytes,
            tensor.dtype, shape=ir.Shape([end - first, width]), name=name, base_dir=tensor.base_dir,
        )  # fmt: skip
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=part.shape, type=kind, const_value=part)
        graph.graph.register_initializer(value)
    return graph.graph.initializers[name]


# -------------------------------------------------------------------------------------- runs
def run_in_pieces(
    models: Sequence[ir.Model],
    inputs: Mapping[str, NDArray[Any]],
    told: Callable[[int, int], None] = lambda *_: None,
) -> list[dict[str, NDArray[Any]]]:
    """What inlined graphs give for `inputs`; their weights are read from their files in order.

    Two versions of a graph are computed side by side, where that reads weights once. `told`: how
    many pieces of how many were computed.

    Raises:
        BrokenArtifactError: ONNX Runtime does not take one.
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
    sizes = {name: each.nbytes for name, each in stored.items() if each is not None}
    protos = [ir.to_proto(model) for model in models]
    both = together(*protos) if len(protos) == 2 else None
    with _Mapped(paths) as files:
        if both is None:
            return [_run_all(each, inputs, sizes, files, told) for each in protos]
        found = _run_all(both, inputs, sizes, files, told)
    names = [value.name for value in protos[0].graph.output]
    return [{name: found[name + end] for name in names} for end in ("", SECOND)]


def _run_all(
    proto: onnx.ModelProto,
    inputs: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    files: Mapping[str, mmap.mmap],
    told: Callable[[int, int], None],
) -> dict[str, NDArray[Any]]:
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    known = {
        name: np.asarray(array, onnx.helper.tensor_dtype_to_np_dtype(types[name]))
        for name, array in inputs.items()
        if name in types
    }
    wanted = [value.name for value in proto.graph.output]
    pieces = list(_pieces(proto.graph.node, sizes))
    uses = {name: at for at, piece in enumerate(pieces) for node in piece for name in node.input}
    uses |= dict.fromkeys(wanted, len(pieces))
    for at, piece in enumerate(pieces):
        made = [name for node in piece for name in node.output if name]
        known |= _run(
            proto, piece, known, [name for name in made if uses.get(name, -1) > at], files
        )
        known = {name: array for name, array in known.items() if uses.get(name, -1) > at}
        for each in files.values():
            each.madvise(mmap.MADV_DONTNEED)
        told(at + 1, len(pieces))
    return {name: known[name] for name in wanted}


def _pieces(
    nodes: Sequence[onnx.NodeProto], sizes: Mapping[str, int]
) -> Iterator[list[onnx.NodeProto]]:
    """Nodes one behind the other; a piece begins where a weight is read that would be too much."""
    piece: list[onnx.NodeProto] = []
    held: set[str] = set()
    for node in nodes:
        reads = {name for name in node.input if name in sizes and name not in held}
        if reads and held and sum(map(sizes.__getitem__, held | reads)) > PIECE_BYTES:
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
    """Weight files of a graph, mapped by the names that the graph has for them."""

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
