"""Images on the fake GPU: encoders, and prompts with image tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from fake_gpu import FakeDevice, FakeEngine
from visual_checkpoints import random_pixels
from vlm_engines import build_vlm

from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Plan, image_plan
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.profiles import base_passes, image_pass
from edgellm.core import graph_io
from edgellm.core.graph_roles import DECODER, ENCODER
from edgellm.core.manifest import LLM_ENGINE, VISUAL_ENGINE, GraphSpec, load_engine
from edgellm.device_runtime.arrays import ImageRows
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.device_runtime.networks.encoder import EncoderNetwork, open_encoder
from edgellm.device_runtime.runners import tensorrt
from edgellm.multimodal.patch_grid import grid_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITY, ROWS = 576, 6


@pytest.fixture(scope="module", params=["qwen3_vl", "idefics3"])
def engines(request, tmp_path_factory):
    return build_vlm(tmp_path_factory.mktemp(request.param), request.param)


def test_features_are_those_of_onnxruntime(engines, tmp_path):
    manifest = load_engine(engines.visual_engine, VISUAL_ENGINE)
    spec = manifest.vision
    model = ir.load(engines.engine.parent / "visual_bundle" / "model.onnx")
    weights = WeightFile(tmp_path / "visual.data")
    lower(model, weights, ir.DataType.FLOAT)
    weights.close()
    ir.save(model, tmp_path / "visual.onnx")
    device, cpu = FakeDevice(), open_encoder(engines.visual_engine, manifest)
    passes = [image_pass(image_plan(1, 400, 200, 1), spec)]
    loaded = FakeEngine(tmp_path / "visual.onnx", passes, device)
    session = EncoderNetwork(tensorrt.runner_of(ENCODER, manifest, loaded, device))
    for grid in ((2, 3), (1, 1)) if spec.image_size else ((4, 8), (6, 4)):
        inputs = {graph_io.PIXEL_VALUES: random_pixels(spec, grid, 0)}
        if not spec.image_size:
            inputs |= grid_inputs(*grid, spec)
        for found, expected in zip(session.encode(inputs), cpu.encode(inputs), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_image_rows_are_read_by_the_passes_that_have_some(engines, tmp_path):
    manifest = load_engine(engines.engine, LLM_ENGINE)
    spec = manifest.decoder
    plan = Plan(
        max_input_len=512, kv_capacity=CAPACITY, threads=1, prefill="auto", max_verify_tree_size=24
    )
    model = ir.load(engines.engine.parent / "bundle" / "model.onnx")
    weights = WeightFile(tmp_path / "llm.data")
    lower(model, weights, ir.DataType.FLOAT, CAPACITY)
    weights.close()
    ir.save(model, tmp_path / "llm.onnx")
    graphs = tuple(GraphSpec("llm.engine", each.max_rows, "fp32") for each in base_passes(plan))
    built = dataclasses.replace(manifest, graphs={DECODER: graphs}, max_verify_tree_size=24)
    device, cpu = FakeDevice(), open_decoder(engines.engine, manifest)
    loaded = FakeEngine(tmp_path / "llm.onnx", base_passes(plan), device)
    gpu = DecoderNetwork(
        runner=tensorrt.runner_of(DECODER, built, loaded, device), spec=spec, capacity=CAPACITY
    )
    random = np.random.default_rng(0)
    assert spec.images is not None
    levels = spec.images.num_deepstack
    images = ImageRows(
        embeds=random.standard_normal((ROWS, spec.hidden_size), np.float32),
        deepstack=random.standard_normal((levels, ROWS, spec.hidden_size), np.float32),
        keys={},
    )
    rows = spec.vocab_size + np.arange(ROWS)
    prompt = np.concatenate([[30, 31], rows, [32, 33, 34]])
    for one in (cpu, gpu):
        one.kv.images = images
    write = 0
    for ids in (prompt, np.array([40]), np.array([41]), np.array([42])):
        arguments = ids, write, np.array([len(ids) - 1])
        found, expected = gpu.run(*arguments), cpu.run(*arguments)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
        write += len(ids)
    answers = []
    for shown in (images, dataclasses.replace(images, embeds=-images.embeds)):
        gpu.kv.images = shown
        gpu.run(prompt, 0, np.array([0]))
        answers.append(gpu.run(np.array([40]), len(prompt), np.array([0])).logits)
    assert np.abs(answers[0] - answers[1]).max() > 0.01
