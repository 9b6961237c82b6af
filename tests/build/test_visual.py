"""Visual engines: the CPU graph against the portable one, and errors of `visual_build`."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import cuda_on_cpu
import numpy as np
import onnx
import pytest
from conftest import assert_one_line_error
from quantized_layouts import LAYOUTS
from safetensors.numpy import load_file, save_file
from visual_checkpoints import VisualModel, make_visual_checkpoint, random_pixels, whole_grid

from edgellm.build.engine import build_engine
from edgellm.build.plan import image_plan
from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import VISUAL_ENGINE, Engine, load_engine
from edgellm.device_runtime.networks.encoder import open_encoder
from edgellm.export import visual
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal.patch_grid import grid_inputs

PLAN = image_plan(1, 64, 64, 1)


@pytest.fixture(scope="module", params=visual.supported())
def model(request, tmp_path_factory) -> VisualModel:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_visual_checkpoint(folder / "checkpoint", visual.find(request.param).TINY)
    return VisualModel(source, folder / "bundle")


@pytest.fixture(scope="module")
def engine(model) -> Path:
    folder = model.bundle.parent / "engine"
    _build(model.bundle, folder)
    return folder


def _build(bundle: Path, engine: Path, quantize: str = "none") -> Engine:
    plan = dataclasses.replace(PLAN, quantize=quantize)
    return build_engine("visual", bundle, engine, plan, "onnxruntime", lambda _: None)


def _encode(engine: Path, pixels: np.ndarray, grid: tuple[int, int]) -> list[np.ndarray]:
    manifest = load_engine(engine, VISUAL_ENGINE)
    session = open_encoder(engine, manifest)
    inputs = {graph_io.PIXEL_VALUES: pixels, **grid_inputs(*grid, manifest.vision)}
    embeds, deepstack = session.encode(inputs)
    assert len(deepstack) == manifest.vision.num_deepstack
    return [embeds, deepstack] if len(deepstack) else [embeds]


@pytest.fixture(scope="module")
def cuda_engine(model) -> Path:
    folder = model.bundle.parent / "cuda"
    built = cuda_on_cpu.build_encoder(model.bundle, folder, PLAN)
    assert (built.machine, built.main_graphs[0].precision) == ("cuda", "fp32")
    return folder


@pytest.mark.parametrize("grid", [(2, 2), (6, 14), (10, 4)])
def test_a_graph_for_cuda_equals_transformers(model, cuda_engine, grid):
    grid = whole_grid(model.spec, grid)
    pixels = random_pixels(model.spec, grid, 5)
    (expected,) = model.features([pixels], [grid])
    with cuda_on_cpu.cuda_is_the_cpu():
        found = _encode(cuda_engine, pixels, grid)
    for array, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, reference, atol=2e-4)


@pytest.mark.parametrize(("precision", "distance"), [("none", 0.01), ("int8", 0.03), ("fp8", 0.08)])
def test_a_float16_graph_for_cuda_equals_transformers(model, tmp_path, precision, distance):
    """Activations in float16, quantized weights in 8-bit blocks."""
    source = open_checkpoint(str(model.bundle.parent / "checkpoint"), tokenizer=False)
    options = VisualOptions("fp16", quantization=precision)
    export_visual(source, tmp_path / "bundle", options)
    built = cuda_on_cpu.build_encoder(tmp_path / "bundle", tmp_path / "engine", PLAN)
    assert built.main_graphs[0].precision == ("fp16" if precision == "none" else precision)
    assert bool(_operators(tmp_path / "engine")["MatMulNBits"]) == (precision != "none")
    grid = whole_grid(model.spec, (6, 8))
    pixels = random_pixels(model.spec, grid, 6)
    with cuda_on_cpu.cuda_is_the_cpu():
        found, *_ = _encode(tmp_path / "engine", pixels, grid)
    exact, *_ = model.run(pixels, grid)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < distance


@pytest.mark.parametrize("grid", [(2, 2), (6, 14), (10, 4)])
def test_features_equal_transformers(model, engine, grid):
    grid = whole_grid(model.spec, grid)
    pixels = random_pixels(model.spec, grid, 5)
    (expected,) = model.features([pixels], [grid])
    found = _encode(engine, pixels, grid)
    assert max(np.abs(array).max() for array in expected) > 0.5
    for array, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, reference, atol=2e-4)


def test_int8_encoders_round_weights_and_inputs(model, tmp_path):
    """Embeddings change a little with rounded weights, and only then."""
    _build(model.bundle, tmp_path / "engine", "int8")
    grid = whole_grid(model.spec, (6, 8))
    pixels = random_pixels(model.spec, grid, 6)
    exact, *_ = model.run(pixels, grid)
    rounded, *_ = _encode(tmp_path / "engine", pixels, grid)
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.05


def _operators(engine: Path) -> Counter[str]:
    graph = onnx.load(engine / "encoder.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


@pytest.mark.each_change("qwen2_5_vl-int8-*", "gemma3-fp8-*", "qwen3_5-fp8-*")
@pytest.mark.parametrize(
    ("precision", "operator", "least", "maximum"),
    [("int8", "MatMulIntegerToFloat", 0, 1e-3), ("fp8", "MatMulNBits", 1e-4, 0.02)],
)
def test_engines_of_quantized_bundles_equal_the_bundle(
    model, tmp_path, precision, operator, least, maximum
):
    """Int8 keeps its codes, and two terms of inputs are exact; FP8 becomes int8 in blocks."""
    checkpoint, bundle = model.bundle.parent / "checkpoint", tmp_path / "bundle"
    portable = VisualModel(checkpoint, bundle, quantization=precision)
    built = _build(bundle, tmp_path / "engine")
    assert (built.main_graphs[0].precision, built.quantization) == (precision, precision)
    operators = _operators(tmp_path / "engine")
    assert operators[operator]
    # The patch embedding; pooling of Gemma 3, and its projection, which is no linear layer;
    # averages of MiniCPM-V. Some patch embeddings are linear layers.
    floats = 0 if model.spec.image_size else 1
    others = {"gemma3": 2, "minicpmv4_6": 2, "minicpmv4_7": 2, "lfm3_vl": 0, "gemma4_unified": 0}
    others["muse_glimmer"] = 0
    assert operators["MatMul"] == others.get(model.spec.model_type, floats)
    grid = whole_grid(model.spec, (6, 8))
    pixels = random_pixels(model.spec, grid, 6)
    expected, found = portable.run(pixels, grid), _encode(tmp_path / "engine", pixels, grid)
    if model.spec.model_type == "lfm3_vl":  # gates multiply the errors of two rounded layers
        maximum *= 2
    for array, reference in zip(found, expected, strict=True):
        distance = np.linalg.norm(array - reference) / np.linalg.norm(reference)
        assert least <= distance < maximum
    if precision == "int8" and model.spec.image_size:  # what the device would have rounded to
        _build(model.bundle, tmp_path / "other", "int8")
        np.testing.assert_array_equal(_encode(tmp_path / "other", pixels, (6, 8)), found)
    with pytest.raises(EdgeLLMError, match=f"float weights; this one is {precision}") as caught:
        _build(bundle, tmp_path / "twice", "int8")
    assert caught.value.hint.startswith("leave out --quantize")
    assert not (tmp_path / "twice").exists()


def test_int8_in_blocks_keeps_its_codes(tmp_path):
    """A scale for each column would round a checkpoint's blocks of 16 a second time."""
    source = make_visual_checkpoint(tmp_path / "c", visual.find("smolvlm").TINY)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "vision_model" in name and "_proj.weight" in name]:
        parts, _ = LAYOUTS["ct-int8"].writer(tensors.pop(name), np.random.default_rng(0))
        tensors |= {name.removesuffix("weight") + last: part for last, part in parts.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    export_visual(
        open_checkpoint(str(source), tokenizer=False), tmp_path / "bundle", VisualOptions("fp32")
    )
    assert _build(tmp_path / "bundle", tmp_path / "engine").main_graphs[0].precision == "int8"
    assert _operators(tmp_path / "engine")["MatMulNBits"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--maxImageTokensPerImage", 2000], ["2000 does not lie between", "1024"]),
        (["--minImageTokens", 600], ["--minImageTokens 600"]),
        (["--quantize", "int3"], ["give none or int8"]),
    ],
)
def test_invalid_visual_flags_are_rejected(command_here, model, tmp_path, flags, words):
    result = command_here(
        "visual_build", "--onnxDir", model.bundle, "--engineDir", tmp_path / "engine", *flags
    )
    assert_one_line_error(result, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["smolvlm"], indirect=True)
@pytest.mark.parametrize("flags", [(), ("--noCheck",)])
def test_visual_build_ends_with_a_verdict(command_here, model, tmp_path, flags):
    result = command_here(
        "visual_build", "--onnxDir", model.bundle, "--engineDir", tmp_path / "engine", *flags
    )
    assert result.returncode == 0, result.stderr
    proved = "were not compared with" if flags else "equal"
    assert re.fullmatch(
        rf"verdict: [\d.]+ MB in [\d.]+ s; outputs {proved} those of the bundle"
        + ("" if flags else " up to the engine's rounding"),
        result.stdout.splitlines()[-1],
    )


def test_other_bundles_are_rejected_by_visual_build(command_here, tiny_bundle, tmp_path):
    result = command_here(
        "visual_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine"
    )
    assert_one_line_error(result, "is of kind llm_bundle, not visual_bundle")
