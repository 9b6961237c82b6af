"""What only a GPU can show: `pytest -m gpu` on any machine with an NVIDIA GPU.

Engines are built for this GPU, by TensorRT and by ONNX Runtime's CUDA provider, whichever is there,
and compared with ONNX Runtime on the CPU.
"""

from __future__ import annotations

import dataclasses

import cuda_on_cpu
import numpy as np
import pytest
import reason_against
from conftest import make_checkpoint
from eagle_engines import CAPACITY, EAGLE3, INPUT, TREE, build_pair
from tensorrt_bundles import Bundles
from visual_checkpoints import VisualModel, make_visual_checkpoint, random_pixels, whole_grid

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.core import graph_io
from edgellm.core.manifest import LLM_ENGINE, VISUAL_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.networks.decoder import SequencePart, open_decoder
from edgellm.device_runtime.networks.encoder import open_encoder
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Planes
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export import models, visual
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.multimodal.patch_grid import grid_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_capability() is None, reason="there is no NVIDIA GPU here"),
]
needs_tensorrt = reason_against.needs("tensorrt")
GREEDY = SamplingParams(temperature=0.0)


needs_cuda = reason_against.needs("onnxruntime_cuda")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("tensorrt", marks=needs_tensorrt),
        pytest.param("onnxruntime_cuda", marks=needs_cuda),
    ],
)
def gpu_engine(request, eagle_pair, tmp_path_factory):
    """The tiny float32 base with its draft, built here."""
    engine = tmp_path_factory.mktemp("gpu") / "engine"
    sizes = {"max_verify_tree_size": TREE, "max_draft_tree_size": TREE}
    plan = Plan(max_input_len=INPUT, kv_capacity=CAPACITY, threads=0, prefill="auto", **sizes)
    build_engine("llm", eagle_pair.bundle, engine, plan, request.param, lambda _: None)
    build_engine("draft", eagle_pair.draft_bundle, engine, plan, request.param, lambda _: None)
    return engine


def _open(engine):
    manifest = load_engine(engine, LLM_ENGINE)
    return open_decoder(engine, manifest)


def test_numbers_are_those_of_the_cpu(eagle_pair, gpu_engine):
    """A prompt, a token, a tree: at once, recorded, replayed."""
    cpu, gpu = _open(eagle_pair.engine), _open(gpu_engine)
    random, mask = np.random.default_rng(0), np.tri(9, dtype=np.bool_)
    mask[5:, 3] = False
    for one in (cpu, gpu):
        one.run(np.arange(10, 40), 0, np.zeros(1, np.int64))
    for _ in range(3):
        ids = random.integers(9, 96, 9)
        arguments = ids, 30, np.arange(9)
        expected, found = cpu.run(*arguments, tree_mask=mask), gpu.run(*arguments, tree_mask=mask)
        np.testing.assert_allclose(found.logits, expected.logits, atol=2e-2)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        for row in range(9):
            assert found.highest_of(row) == pytest.approx(expected.highest_of(row), abs=2e-2)


def test_greedy_answers_are_lossless(gpu_engine):
    options = SpecOptions(top_k=5, steps=4, verify_size=20, tree="fixed")
    llm = LLM(gpu_engine, spec=options)
    for prompt in ("w83 w64 w53 w32", "w10 w24 w79 w65 w88", "w56 w15 w35"):
        answers = []
        for speculative in (False, True):
            answer = llm.generate(
                prompt, sampling=GREEDY, max_generate_length=40, speculative=speculative
            )
            for _ in answer:
                pass
            answers.append(answer.token_ids)
        assert answers[0] == answers[1]


def test_kept_rows_are_those_of_a_fresh_prompt(gpu_engine):
    one, fresh = _open(gpu_engine), _open(gpu_engine)
    ids, path = np.arange(30, 36), np.array([0, 2, 4])
    mask = np.eye(6, dtype=np.bool_)
    mask[2, 0] = mask[4, [0, 2]] = True
    depths = np.array([0, 1, 1, 2, 2, 3])
    one.run(np.arange(10, 20), 0, np.zeros(1, np.int64))
    one.run(ids, 10, np.arange(6), position_ids=10 + depths, tree_mask=mask)
    one.kv.compact(10, path)
    fresh.run(np.concatenate([np.arange(10, 20), ids[path]]), 0, np.zeros(1, np.int64))
    np.testing.assert_allclose(one.kv.read(13), fresh.kv.read(13), atol=1e-3)


@needs_tensorrt
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text", "bamba", "qwen3_moe", "gpt_oss"])
def test_recurrent_layers_and_experts_by_edgellm_s_kernels(tmp_path, model_type):
    """Chunks, a token, a tree of which a path is accepted, and a token after it."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **models.find(model_type).TINY)
    source = open_checkpoint(str(checkpoint))
    export_llm(source, tmp_path / "bundle", ExportOptions(dtype="fp16"))
    plan = Plan(max_input_len=24, kv_capacity=CAPACITY, max_verify_tree_size=8)
    for backend in ("onnxruntime", "tensorrt"):
        build_engine("llm", tmp_path / "bundle", tmp_path / backend, plan, backend, lambda _: None)
    sessions, write = [_open(tmp_path / name) for name in ("onnxruntime", "tensorrt")], 0
    mask = np.eye(6, dtype=np.bool_)
    mask[1:, 0] = mask[4, 2] = mask[5, [2, 4]] = True
    path = np.array([0, 2, 4])
    for ids in (np.arange(10, 34), np.arange(40, 47), [50], np.arange(20, 26), [51]):
        is_tree = len(ids) == 6
        tree = {"tree_mask": mask, "position_ids": write + mask.sum(1) - 1} if is_tree else {}
        outputs = np.arange(len(ids)) if is_tree else np.array([len(ids) - 1])
        expected, found = (
            each.run(np.array(ids), write, outputs, **tree).logits.copy() for each in sessions
        )
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
        if is_tree:
            for each in sessions:
                each.kv.compact(write, path)
        write += len(path) if is_tree else len(ids)


@needs_tensorrt
@pytest.mark.parametrize(("kv_cache", "tolerance"), [("float", 0.02), ("int8", 0.1), ("fp8", 0.3)])
def test_attention_by_edgellm_s_kernels(tmp_path, kv_cache, tolerance):
    """A prompt, a token, a tree; the CPU's cache is not rounded."""
    layout = dataclasses.replace(EAGLE3, head_dim=64)
    pair = build_pair(tmp_path / "halves", layout, dtype="fp16", head_dim=64)
    plan = Plan(
        max_input_len=INPUT,
        kv_capacity=CAPACITY,
        threads=0,
        prefill="auto",
        kv_cache=kv_cache,
        max_verify_tree_size=TREE,
        options=TensorRtOptions(kernels="edgellm"),
    )
    engine = tmp_path / "engine"
    build_engine("llm", pair.bundle, engine, plan, "tensorrt", lambda _: None)
    cpu, gpu = _open(pair.engine), _open(engine)
    mask, write = np.tri(9, dtype=np.bool_), 0
    mask[5:, 3] = False
    for ids in (np.arange(10, 40), np.array([50]), np.arange(20, 29)):
        tree = {"tree_mask": mask} if len(ids) == 9 else {}
        outputs = np.arange(len(ids))[-9:] if tree else np.array([len(ids) - 1])
        expected, found = (each.run(ids, write, outputs, **tree).logits for each in (cpu, gpu))
        assert np.abs(found - expected).mean() < tolerance
        write += len(ids)


@needs_tensorrt
def test_answers_in_one_pass_are_those_alone(tmp_path):
    """A piece of a prompt, a tree and a token in one batch; halves differ in the last bits."""
    layout = dataclasses.replace(EAGLE3, head_dim=64)
    pair = build_pair(tmp_path / "halves", layout, dtype="fp16", head_dim=64)
    options = TensorRtOptions(kernels="edgellm")
    plan = Plan(
        max_input_len=INPUT,
        kv_capacity=CAPACITY,
        threads=0,
        max_verify_tree_size=TREE,
        max_batch_size=4,
        options=options,
    )
    engine = tmp_path / "engine"
    build_engine("llm", pair.bundle, engine, plan, "tensorrt", lambda _: None)
    session, mask = _open(engine), np.tri(9, dtype=np.bool_)
    mask[5:, 3] = False
    asks = (np.arange(10, 30), None), (np.arange(20, 29), mask), (np.array([50]), None)
    found = []
    for together in (True, False):
        contexts = [session.new_kv() for _ in asks]
        for first, context in enumerate(contexts, 9):
            session.run_batch(
                [SequencePart(context, np.arange(first, 40), 0, np.zeros(1, np.int64))]
            )
        parts = [
            SequencePart(context, ids, len(context.keys), np.arange(len(ids)), tree_mask=tree)
            for context, (ids, tree) in zip(contexts, asks, strict=True)
        ]
        passes = [parts] if together else [[part] for part in parts]
        found.append([each.logits.copy() for some in passes for each in session.run_batch(some)])
        for context in contexts:
            session.close(context)
    for one, other in zip(*found, strict=True):
        assert np.abs(one - other).max() < 0.02


@needs_tensorrt
@pytest.mark.parametrize("row_bytes", [32, 128, 256, 512])
def test_the_kernel_moves_rows(row_bytes):
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device

    device, count, rows = open_device(), 12, 40
    memory = device.allocate(count * rows * row_bytes)
    planes = Planes(address=memory.address, count=count, rows=rows, row_bytes=row_bytes)
    shape = (count, rows, row_bytes)
    before = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    device.load_rows(planes, before.reshape(count, -1))
    kept = np.array([0, 2, 3, 7, 8, 19], np.int32)
    host, indices = device.pinned(kept.nbytes), device.allocate(kept.nbytes)
    host[:] = kept.view(np.uint8)
    device.upload(indices.address, host)
    device.move_rows(planes, indices.address, len(kept), 10)
    device.copy_rows(planes, 30, 1, 9)
    expected = before.copy()
    expected[:, 10 : 10 + len(kept)] = before[:, 10 + kept]
    expected[:, 1:10] = expected[:, 30:39]
    found = device.save_rows(planes, rows).reshape(shape)
    np.testing.assert_array_equal(found, expected)


@needs_cuda
@pytest.mark.parametrize("precision", ["fp16", "int4_awq", "fp8", "nvfp4"])
def test_onnxruntime_computes_every_precision(precision, tmp_path):
    """A session on CUDA opens only if no node is left to the CPU; numbers are the CPU kernels'."""
    plan = Plan(max_input_len=INPUT, kv_capacity=72, threads=0, prefill="same", quantize="none")
    bundle = Bundles(tmp_path).make("eagle_base", precision)
    cuda_on_cpu.build_base(bundle, tmp_path / "engine", plan)
    arguments = np.arange(10, 40), 0, np.arange(30)
    found = _open(tmp_path / "engine").run(*arguments).logits
    expected = cuda_on_cpu.open_base(tmp_path / "engine").run(*arguments).logits
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


@needs_cuda
def test_onnxruntime_serves_several_in_a_pass(tmp_path):
    """Prompts of three lengths, then tokens and trees of all, asked for, recorded and replayed."""
    plan = Plan(
        max_input_len=INPUT,
        kv_capacity=72,
        threads=0,
        prefill="same",
        quantize="none",
        max_verify_tree_size=4,
        max_batch_size=3,
    )
    cuda_on_cpu.build_base(Bundles(tmp_path).make("base", "fp16"), tmp_path / "engine", plan)
    sessions, wanted = (_open(tmp_path / "engine"), cuda_on_cpu.open_base(tmp_path / "engine")), []
    for session in sessions:
        given = []
        contexts = [session.new_kv() for _ in range(3)]
        parts = [
            SequencePart(one, np.arange(10, end), 0, np.arange(2))
            for one, end in zip(contexts, (20, 31, 44), strict=True)
        ]
        given += [result.logits.copy() for result in session.run_batch(parts)]
        for rows in (1, 1, 4, 4, 4):
            ids, mask = np.arange(50, 50 + rows), np.tri(rows, dtype=np.bool_)
            asks = [
                SequencePart(
                    one, ids, one.num_rows, np.arange(rows), one.num_rows + np.arange(rows), mask
                )
                if rows > 1
                else SequencePart(one, ids, one.num_rows, np.arange(1))
                for one in contexts
            ]
            given += [result.logits.copy() for result in session.run_batch(asks)]
        wanted.append(np.concatenate(given))
    assert np.linalg.norm(wanted[0] - wanted[1]) < 0.03 * np.linalg.norm(wanted[1])


@needs_cuda
@pytest.mark.parametrize("encoder", visual.supported())
def test_onnxruntime_computes_every_encoder(encoder, tmp_path):
    source = make_visual_checkpoint(tmp_path / "checkpoint", visual.find(encoder).TINY)
    model = VisualModel(source, tmp_path / "bundle")
    cuda_on_cpu.build_encoder(tmp_path / "bundle", tmp_path / "engine", image_plan(1, 64, 64, 0))
    manifest = load_engine(tmp_path / "engine", VISUAL_ENGINE)
    session = open_encoder(tmp_path / "engine", manifest)
    grid = whole_grid(model.spec, (6, 8))
    pixels = random_pixels(model.spec, grid, 6)
    inputs = {graph_io.PIXEL_VALUES: pixels, **grid_inputs(*grid, manifest.vision)}
    expected, *_ = model.run(pixels, grid)
    np.testing.assert_allclose(session.encode(inputs)[0], expected, atol=2e-2)
