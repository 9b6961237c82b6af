"""Lowerings read each call of a function separately, and reject unsupported attributes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from portable import open_portable

from edgellm.build.lowering.function_calls import find_calls
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu import lower as cpu
from edgellm.build.onnxruntime_cpu.linears import StoredKernel
from edgellm.build.onnxruntime_cuda.linears import CudaKernel
from edgellm.build.onnxruntime_cuda.lower import GraphTraits, lower_for_cuda
from edgellm.build.tensorrt.lowering import lower as tensorrt
from edgellm.core import onnx_functions
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import KVCacheSpec

CAPACITY, ROWS = 48, 24
CACHE = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32")
FLOAT = ir.DataType.FLOAT


def _lower_cpu(model: ir.Model, weights: WeightFile) -> None:
    cpu.lower(model, StoredKernel(), weights, CACHE, CAPACITY)


def _lower_cuda(model: ir.Model, weights: WeightFile) -> None:
    lower_for_cuda(model, CudaKernel(FLOAT), weights, FLOAT, GraphTraits(capacity=CAPACITY))


def _lower_tensorrt(model: ir.Model, weights: WeightFile) -> None:
    tensorrt.lower(model, weights, FLOAT, CAPACITY)


LOWERINGS = {"cpu": _lower_cpu, "cuda": _lower_cuda, "tensorrt": _lower_tensorrt}


@pytest.fixture
def model(tiny_bundle: Path, tmp_path: Path) -> ir.Model:
    """The tiny model, with its weights in `tmp_path`."""
    for path in tiny_bundle.glob("model.*"):
        shutil.copyfile(path, tmp_path / path.name)
    return ir.load(tmp_path / "model.onnx")


def _lowered(model: ir.Model, folder: Path, lower) -> Path:
    weights = WeightFile(folder / "lowered.data")
    lower(model, weights)
    weights.close()
    ir.save(model, folder / "lowered.onnx")
    return folder / "lowered.onnx"


def _logits(path: Path, bundle: Path) -> np.ndarray:
    """Of a prompt, of one more row, and of a tree after it."""
    session = open_portable(bundle, CAPACITY, path)
    ids = np.random.default_rng(3).integers(9, 96, ROWS + 4)
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    found = [session.run(ids[:ROWS], 0, np.arange(ROWS)).logits.copy()]
    found.append(session.run(ids[ROWS : ROWS + 1], ROWS, np.zeros(1, np.int64)).logits.copy())
    tree = session.run(
        ids[ROWS + 1 :],
        ROWS + 1,
        np.arange(3),
        position_ids=ROWS + 1 + np.array([0, 1, 1]),
        tree_mask=mask,
    )
    return np.concatenate([*found, tree.logits])


def _change_every_other_layer(model: ir.Model) -> None:
    """Other scale, cap, window and frequencies than the layers between."""
    graph = model.graph
    (visible,) = find_calls(graph, onnx_functions.VISIBLE_SLOTS)
    (tables,) = find_calls(graph, onnx_functions.ROTARY_TABLES)
    from edgellm.export.onnx.functions.attention import visible_slots

    windowed = visible_slots(windowed=True)
    model.functions[windowed.identifier()] = windowed
    near = ir.node(
        windowed.name,
        list(visible.inputs),
        {"window": 6},
        domain=onnx_functions.FUNCTIONS,
        name="shared.near",
    )
    frequencies = tables.inputs[1].const_value.numpy()
    local = ir.Value(
        name="local",
        const_value=ir.tensor(frequencies * np.float32(0.5)),
        shape=ir.Shape(frequencies.shape),
        type=ir.TensorType(FLOAT),
    )
    graph.register_initializer(local)
    turned = ir.node(
        tables.op_type,
        [tables.inputs[0], local],
        {"scale": 1.1},
        domain=onnx_functions.FUNCTIONS,
        num_outputs=2,
        name="shared.turned",
    )
    graph.insert_after(visible, [near, turned])
    for call in find_calls(graph, onnx_functions.ATTENTION)[1::2]:
        call.attributes["scale"] = ir.AttrFloat32("scale", 0.31)
        call.attributes["softcap"] = ir.AttrFloat32("softcap", 2.0)
        for index, value in ((6, near.outputs[0]), (7, turned.outputs[0]), (8, turned.outputs[1])):
            call.replace_input_with(index, value)


def test_every_layer_keeps_its_own_attention(model, tiny_bundle, tmp_path):
    """The first layer's mask, tables, scale or cap for all layers would change the logits."""
    unchanged = _logits(tiny_bundle / "model.onnx", tiny_bundle)
    _change_every_other_layer(model)
    ir.save(model, tmp_path / "changed.onnx")
    expected = _logits(tmp_path / "changed.onnx", tiny_bundle)
    assert np.abs(expected - unchanged).max() > 0.05
    found = _logits(_lowered(model, tmp_path, _lower_cpu), tiny_bundle)
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("lower", LOWERINGS.values(), ids=LOWERINGS)
@pytest.mark.parametrize("original", [CAPACITY - 1, CAPACITY])
def test_the_capacity_resolves_rope_frequencies(model, tmp_path, lower, original):
    """Neither the choice nor the unused frequencies are left."""
    (tables,) = find_calls(model.graph, onnx_functions.ROTARY_TABLES)
    short = tables.inputs[1]
    arrays = {"long": short.const_value.numpy() / np.float32(3), "limit": np.array([original])}
    values = {}
    for name, array in arrays.items():
        tensor = ir.tensor(array)
        values[name] = ir.Value(
            name=name,
            const_value=tensor,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
        )
        model.graph.register_initializer(values[name])
    capacity = ir.node("Shape", [model.graph.inputs[-1]], {"start": 2, "end": 3})
    longer = ir.node("Greater", [capacity.outputs[0], values["limit"]])
    chosen = ir.node("Where", [longer.outputs[0], values["long"], short])
    model.graph.insert_before(tables, [capacity, longer, chosen])
    tables.replace_input_with(1, chosen.outputs[0])
    weights = WeightFile(tmp_path / "lowered.data")
    lower(model, weights)
    weights.close()
    other = short if original < CAPACITY else values["long"]
    assert not other.uses()
    assert not values["limit"].uses()


@pytest.mark.parametrize("lower", LOWERINGS.values(), ids=LOWERINGS)
@pytest.mark.parametrize(
    "function", [onnx_functions.ATTENTION, onnx_functions.LINEAR, onnx_functions.VISIBLE_SLOTS]
)
def test_unknown_attributes_stop_the_build(model, tmp_path, lower, function):
    call = find_calls(model.graph, function)[0]
    call.attributes["sinks"] = ir.AttrInt64("sinks", 1)
    with pytest.raises(UnsupportedModelError, match=f"does not compute sinks of {function}"):
        _lowered(model, tmp_path, lower)


def test_cuda_rejects_unsupported_calls(model, tmp_path):
    _change_every_other_layer(model)
    (near,) = find_calls(model.graph, onnx_functions.VISIBLE_IN_WINDOW)
    wider = ir.node(
        near.op_type,
        list(near.inputs),
        {"window": 9},
        domain=onnx_functions.FUNCTIONS,
        name="shared.wider",
    )
    model.graph.insert_after(near, wider)
    find_calls(model.graph, onnx_functions.ATTENTION)[0].replace_input_with(6, wider.outputs[0])
    with pytest.raises(
        UnsupportedModelError, match="windows of several widths are not computed on CUDA"
    ):
        _lowered(model, tmp_path, _lower_cuda)
