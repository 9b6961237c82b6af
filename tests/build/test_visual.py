"""Visual engines: the CPU graph against the portable one, and what `visual_build` refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error
from visual_checkpoints import VisualModel, make_visual_checkpoint, random_pixels

from edgellm import contract
from edgellm.build.visual import build_visual
from edgellm.contract import VisualEngineManifest, load_manifest
from edgellm.device_runtime import backends
from edgellm.device_runtime.backends import VisualPlan
from edgellm.export import visual
from edgellm.multimodal.grids import grid_inputs

PLAN = VisualPlan(1, 64, 64, 1)


@pytest.fixture(scope="module", params=visual.supported())
def model(request, tmp_path_factory) -> VisualModel:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_visual_checkpoint(folder / "checkpoint", visual.find(request.param).TINY)
    return VisualModel(source, folder / "bundle")


@pytest.fixture(scope="module")
def engine(model) -> Path:
    folder = model.bundle.parent / "engine"
    build_visual(model.bundle, folder, PLAN, "onnxruntime", lambda _: None)
    return folder


def _encode(engine: Path, pixels: np.ndarray, grid: tuple[int, int]) -> list[np.ndarray]:
    manifest = load_manifest(engine, VisualEngineManifest)
    session = backends.find(manifest.backend).open_visual_session(engine, manifest)
    inputs = {contract.PIXEL_VALUES: pixels, **grid_inputs(*grid, manifest.vision)}
    embeds, deepstack = session.encode(inputs)
    assert len(deepstack) == manifest.vision.num_deepstack
    return [embeds, deepstack] if len(deepstack) else [embeds]


@pytest.mark.parametrize("grid", [(2, 2), (6, 14), (10, 4)])
def test_features_equal_transformers(model, engine, grid):
    pixels = random_pixels(model.spec, grid, 5)
    (expected,) = model.features([pixels], [grid])
    found = _encode(engine, pixels, grid)
    assert max(np.abs(array).max() for array in expected) > 0.5
    for array, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, reference, atol=2e-4)


def test_int8(model, tmp_path):
    """Rounded weights change the features a little, and only then."""
    plan = VisualPlan(1, 64, 64, 1, "int8")
    build_visual(model.bundle, tmp_path / "engine", plan, "onnxruntime", lambda _: None)
    grid = (6, 8)
    pixels = random_pixels(model.spec, grid, 6)
    exact, *_ = model.run(pixels, grid)
    rounded, *_ = _encode(tmp_path / "engine", pixels, grid)
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.05


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--maxImageTokensPerImage", 2000], ["2000 does not lie between", "1024"]),
        (["--minImageTokens", 600], ["--minImageTokens 600"]),
        (["--quantize", "int3"], ["give none or int8"]),
    ],
)
def test_flags_that_will_not_do(command, model, tmp_path, flags, words):
    result = command(
        "visual_build", "--onnxDir", model.bundle, "--engineDir", tmp_path / "engine", *flags
    )
    assert_one_line_error(result, *words)
    assert list(tmp_path.iterdir()) == []


def test_another_bundle(command, tiny_bundle, tmp_path):
    result = command("visual_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine")
    assert_one_line_error(result, "is a llm_bundle, not a visual_bundle")
