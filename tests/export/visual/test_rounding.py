"""`edgellm-export visual --quantization`: encoders whose linear layers are rounded."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from conftest import assert_one_line_error
from safetensors.numpy import load_file, save_file
from visual_checkpoints import VisualModel, make_visual_checkpoint, random_pixels, whole_grid

from edgellm.core import graph_io
from edgellm.core.artifact import verify_files
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.manifest import Bundle
from edgellm.export import visual
from edgellm.export.checkpoints.checkpoint import Safetensors
from edgellm.export.checkpoints.quantized_weight import QuantizedLinear
from edgellm.export.checkpoints.round_weights import round_linear
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal.patch_grid import grid_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = (6, 14)
PRECISIONS = ("int8", "fp8")
FLOATS = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}


@pytest.fixture(scope="module", params=visual.supported())
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_visual_checkpoint(folder, visual.find(request.param).TINY)


@pytest.fixture(scope="module", params=PRECISIONS)
def model(request, checkpoint, tmp_path_factory) -> VisualModel:
    """The bundle in a precision; the reference is still that of floats."""
    bundle = tmp_path_factory.mktemp("bundle")
    return VisualModel(checkpoint, bundle, quantization=request.param)


def test_features_equal_those_of_rounded_weights(model):
    """Shapes of all linear layers of the encoder."""
    grid = whole_grid(model.spec, GRID)
    pixels = random_pixels(model.spec, grid, 0)
    (exact,) = model.features([pixels], [grid])
    model.round_reference(model.manifest.quantization)
    (expected,) = model.features([pixels], [grid])
    for found, wanted, unrounded in zip(model.run(pixels, grid), expected, exact, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4)
        assert np.abs(found - unrounded).max() > 20e-4


def test_a_quantized_visual_bundle_is_smaller(model, checkpoint, tmp_path):
    """The file shrinks by three of four bytes of all weights, except for scales."""
    floats = _export(checkpoint, tmp_path / "float")
    assert floats.vision == model.spec  # the same number of parameters
    before, after = (m.files["model.weights"].num_bytes for m in (floats, model.manifest))
    shapes = [module.weight.shape for module in model.linears().values()]
    wanted = before - 3 * sum(out * width for out, width in shapes) + 4 * sum(s[0] for s in shapes)
    assert abs(after - wanted) < 2 * 64 * len(shapes)  # alignment
    verify_files(model.bundle, model.manifest.files)


@pytest.mark.each_change("qwen2_5_vl-fp8", "qwen3_5-int8", "gemma3-fp8")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantized_float16_graphs_are_close_to_float32(checkpoint, tmp_path, precision):
    """Graphs for GPUs are valid, and run in ONNX Runtime."""
    manifest = _export(checkpoint, tmp_path / "bundle", "fp16", precision)
    assert (manifest.dtype, manifest.quantization) == ("float16", precision)
    onnx.checker.check_model(str(tmp_path / "bundle/model.onnx"))
    _export(checkpoint, tmp_path / "float", "fp16")
    grid = whole_grid(manifest.vision, GRID)
    pixels = random_pixels(manifest.vision, grid, 0).astype(np.float16)
    inputs = {graph_io.PIXEL_VALUES: pixels, **grid_inputs(*grid, manifest.vision)}
    found, floats = (
        ort.InferenceSession(tmp_path / name / "model.onnx").run(None, inputs)
        for name in ("bundle", "float")
    )
    for array, exact in zip(found, floats, strict=True):
        distance = np.linalg.norm(array - exact) / np.linalg.norm(exact)
        # Gates multiply the errors of two rounded layers.
        farthest = 0.2 if manifest.vision.model_type == "lfm3_vl" else 0.1
        assert 1e-3 < distance < {"int8": 0.05, "fp8": farthest}[precision]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_codes_suit_the_scales_of_the_graph(tmp_path, precision, stored, dtype):
    """The nearest code of each weight, even with tiny scales."""
    largest = {"int8": 127, "fp8": 448}[precision]
    weight = np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)
    weight *= np.geomspace(1e-3, 10, 40, dtype=np.float32)[:, None]
    weight[7], weight[8] = 0, 1e-9
    weight[9] *= 1.4 * largest * 2**-24 / np.abs(weight[9]).max()  # a scale between two halves
    weight = weight.astype(stored)
    layer = _round(tmp_path, weight, precision, dtype)
    codes, scales = (_array(tensor) for tensor in (layer.codes, layer.scales))
    assert (codes.shape, scales.shape, scales.dtype) == ((24, 40), (40,), FLOATS[dtype].numpy())
    floats, scales = weight.astype(np.float32), scales.astype(np.float32)[:, None]
    errors, step = np.abs(codes.astype(np.float32).T * scales - floats), scales / 2
    if precision == "fp8":  # three bits after the first
        step = np.maximum(np.abs(floats) / 16, step * 2**-8)
    tiny = slice(7, 10)
    assert np.all(errors[tiny] <= 0.3 * np.abs(floats[tiny]).max(1, keepdims=True) + 2**-25)
    errors[tiny] = 0
    assert np.all(errors <= 1.001 * step)


def test_one_weight_is_in_memory_at_a_time(tmp_path):
    """The estimate counts stored codes, not a float32 copy."""
    weight = np.random.default_rng(0).standard_normal((2048, 2048), np.float32).astype(np.float16)
    layer = _round(tmp_path, weight, "int8", "fp16")
    tracemalloc.start()
    for tensor in (layer.codes, layer.scales):
        assert sum(len(piece) for piece in tensor.stream()) == tensor.num_bytes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (2 + 1) * weight.size + (6 << 20)


def _round(folder: Path, weight: np.ndarray, precision: str, dtype: str) -> QuantizedLinear:
    save_file({"layer.weight": weight}, folder / "weights.safetensors")
    source = Safetensors([folder / "weights.safetensors"])
    weights = Weights(source=source, rounding=precision) / "layer"
    return round_linear(weights, weight.shape, FLOATS[dtype])


def _array(tensor) -> np.ndarray:
    data = b"".join(tensor.stream())
    return np.frombuffer(data, tensor.dtype.numpy()).reshape(tensor.shape)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    return make_visual_checkpoint(folder, visual.find("smolvlm").TINY)


_PROJECTION = "model.connector.modality_projection.proj"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_rejected(tiny, tmp_path, value):
    def change(tensors):
        tensors[f"{_PROJECTION}.weight"][3, 2] = value

    checkpoint = _changed(tiny, tmp_path, change)
    with pytest.raises(BrokenArtifactError, match=rf"tensor {_PROJECTION}\.weight holds"):
        _export(checkpoint, tmp_path / "bundle", quantization="int8")
    assert not (tmp_path / "bundle").exists()


def test_a_quantized_encoder_is_not_quantized_again(tiny, tmp_path):
    """A quantized encoder is exported unchanged, and not rounded twice."""

    def change(tensors):
        weight = tensors[f"{_PROJECTION}.weight"]
        scale = np.abs(weight).max(1) / 127
        tensors[f"{_PROJECTION}.weight"] = np.rint(weight / scale[:, None]).astype(np.int8)
        tensors[f"{_PROJECTION}.weight_scale"] = scale

    checkpoint = _changed(tiny, tmp_path, change)
    described = {"quantization": {"quant_algo": "W8A16"}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(described))
    assert _export(checkpoint, tmp_path / "bundle").quantization == "W8A16"
    with pytest.raises(UnsupportedModelError, match="proj is quantized already") as found:
        _export(checkpoint, tmp_path / "other", quantization="fp8")
    assert found.value.hint == "leave out --quantization"
    assert not (tmp_path / "other").exists()


def _changed(source: Path, folder: Path, change: Callable[[dict], None]) -> Path:
    checkpoint = Path(shutil.copytree(source, folder / "checkpoint"))
    tensors = {
        name: array.copy() for name, array in load_file(checkpoint / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


def test_export_visual_quantizes_on_request(command_here, tiny, tmp_path):
    arguments = ("--model_dir", tiny, "--output_dir", tmp_path / "bundle", "--quantization")
    result = command_here("edgellm-export", "visual", *arguments, "int3")
    assert_one_line_error(result, "--quantization int3: give none, fp8 or int8")
    assert not (tmp_path / "bundle").exists()
    result = command_here("edgellm-export", "visual", *arguments, "fp8")
    assert result.returncode == 0, result.stderr
    assert "quantization fp8" in result.stdout
    result = command_here("edgellm-export", "llm", *arguments, "fp8")
    assert result.returncode == 2
    assert "No such option: --quantization" in result.stderr


def _export(
    checkpoint: Path, bundle: Path, dtype: str = "fp32", quantization: str = "none"
) -> Bundle:
    source = open_checkpoint(str(checkpoint), tokenizer=False)
    return export_visual(source, bundle, VisualOptions(dtype, quantization=quantization))
