"""Mixtures of experts by edgellm's kernel, which reads only the chosen experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.function_calls import find_calls, require_known
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart
from edgellm.build.lowering.weights import stored_bytes
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears
from edgellm.build.onnxruntime_cpu.edgellm_kernels.pack_weights import float_kind, packed_bytes
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.onnx_functions import (
    LINEAR,
    ROUTER,
)
from edgellm.device_runtime.kernels.library import DOMAIN
from edgellm.device_runtime.kernels.packed_layout import STRIP, PackedForm, gated_order, pack_floats


def lower_experts(graph: GraphEditor, kernel: OwnLinears) -> None:
    """Rewrite all routers and experts."""
    for call in find_calls(graph.graph, ROUTER):
        graph.cursor = call
        graph.replace(call.outputs[0], _route(graph, call))
    for layer in ExpertLayer.all_of(graph.graph):
        graph.cursor = layer.call
        graph.replace(layer.call.outputs[0], _emit(graph, layer, kernel))


def _route(graph: GraphEditor, call: ir.Node) -> ir.Value:
    """A router with float weights as stored: rounding would choose other experts."""
    require_known(call)
    x, weight = call.inputs
    tensor = weight.const_value if weight is not None else None
    if weight is None or tensor is None:
        raise BrokenArtifactError(
            f"{call.name}: the router is not a stored weight", hint="export the bundle again"
        )
    out, width = (int(dim) for dim in tensor.shape.numpy())
    form = PackedForm(kind=float_kind(tensor.dtype), in_features=width, out_features=out)
    bits = np.uint32 if form.kind == "float32" else np.uint16
    packed = graph.streamed_weight(
        f"{weight.name}.{form.kind}_packed",
        form.num_bytes,
        lambda: pack_floats(form, stored_bytes(tensor).view(bits).reshape(out, width)),
    )
    return graph.node(
        "QuantLinear", [x, packed], domain=DOMAIN, K=form.in_features, N=form.out_features, block=1
    )


def forms_of(layer: ExpertLayer, kernel: OwnLinears) -> tuple[PackedForm, PackedForm]:
    """Packed forms of an expert's gate and up (or up alone), and of its down."""
    _, hidden, width = layer.gate.shape
    kernel = kernel.of_widths(hidden, width)
    first = next(_inner(layer)), next(_downs(layer))
    return (
        kernel.expert_form(first[0], layer.gate.name, is_gated=layer.is_gated),
        kernel.expert_form(first[1], layer.down.name),
    )


def _padded_width(layer: ExpertLayer) -> int:
    """Padded intermediate size: the kernel takes gate and up in strips."""
    return -(-layer.gate.shape[2] // STRIP) * STRIP


def _inner(layer: ExpertLayer) -> Iterator[LinearWeight]:
    """See `ExpertLayer.inner`; padded channels give zero for all activations."""
    shape = layer.gate.shape[1], _padded_width(layer)
    return (_padded(weight, shape) for weight in layer.inner())


def _downs(layer: ExpertLayer) -> Iterator[LinearWeight]:
    """See `ExpertLayer.downs`; padded inputs have zero weights."""
    shape = _padded_width(layer), layer.down.shape[2]
    return (_padded(weight, shape) for weight in layer.downs())


def _padded(weight: LinearWeight, shape: tuple[int, int]) -> LinearWeight:
    """Pad parts [in, out] with zeros to this shape, as floats."""
    return LinearWeight(tuple(_padded_part(part, shape) for part in weight.parts))


def _padded_part(part: WeightPart, shape: tuple[int, int]) -> WeightPart:
    if part.shape == shape:
        return part
    dense = part.dense().T
    padded = np.zeros(shape[::-1], dense.dtype)
    padded[: dense.shape[0], : dense.shape[1]] = dense
    dtype = part.stored[0].dtype if part.kind == "dense" else ir.DataType.FLOAT
    stored = ir.tensor(padded, dtype=dtype, name=part.parameter)
    return WeightPart(
        kind="dense",
        shape=shape,
        block_size=0,
        parameter=part.parameter,
        stored=(stored,),
        operation=LINEAR,
    )


def _padded_bias(bias: np.ndarray, layer: ExpertLayer) -> np.ndarray:
    """Padded biases of gates or ups, [E, width]."""
    return np.pad(bias, ((0, 0), (0, _padded_width(layer) - bias.shape[1])))


def _emit(graph: GraphEditor, layer: ExpertLayer, kernel: OwnLinears) -> ir.Value:
    inner, down = forms_of(layer, kernel)
    order = gated_order(_padded_width(layer)) if layer.is_gated else None
    packed = [
        graph.streamed_weight(
            f"{layer.name}.{part}.{form.kind}_packed", layer.count * form.num_bytes, make
        )
        for part, form, make in (
            ("gate_up", inner, lambda: _stacked(inner, _inner(layer), order)),
            ("down", down, lambda: _stacked(down, _downs(layer))),
        )
    ]
    gate_bias, up_bias, down_bias = layer.biases
    biases: list[ir.Value | None] = []
    if gate_bias is not None and up_bias is not None and down_bias is not None:
        both = _padded_bias(up_bias, layer)
        if order is not None:
            both = np.concatenate([_padded_bias(gate_bias, layer), both], 1)[:, order]
        biases = [
            graph.weight(f"{layer.name}.inner_bias", lambda: both),
            graph.weight(f"{layer.name}.bias", lambda: down_bias),
        ]
    return graph.node(
        "Experts",
        [layer.x, layer.ids, layer.shares, *packed, *biases],
        domain=DOMAIN,
        experts=layer.count,
        top_k=layer.top_k,
        alpha=layer.alpha,
        limit=layer.limit or 0.0,
        offset=layer.offset,
        cubic=layer.cubic,
    )


def _stacked(
    form: PackedForm, weights: Iterable[LinearWeight], order: np.ndarray | None = None
) -> Iterator[bytes]:
    """Records of all experts, then their headers, which a session reads first."""
    headers = []
    for weight in weights:
        pieces = packed_bytes(form, weight, order)
        headers.append(next(pieces))
        yield from pieces
    yield b"".join(headers)
