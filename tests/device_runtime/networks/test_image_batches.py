"""Image prompts in batches on GPUs: every token is batch-invariant."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import cuda_on_cpu
import numpy as np
import pytest
from eagle_engines import EaglePair
from fake_gpu import FakeDevice, FakeEngine
from image_checkpoints import picture
from lowered_engines import Lowered, lower_for_gpu
from scripted_sequences import VOCABULARY, Scripted, random_images, run_together
from vlm_engines import GPU_FAMILIES, MROPE, build_vlm, make_vlm

from edgellm.build.onnxruntime_cuda.options import CudaOptions
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.profiles import base_passes
from edgellm.core.graph_roles import PASS, shared_kind
from edgellm.core.manifest import LLM_BUNDLE, load_bundle, with_kv_dtype
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.runners.tensorrt.batch_runner import BatchRunner
from edgellm.device_runtime.runners.tensorrt.ragged_batch import shared_rows
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITY, MOST = 160, 4
PLAN = Plan(
    max_input_len=128, kv_capacity=CAPACITY, threads=1, max_verify_tree_size=12, max_batch_size=MOST
)


def open_cuda(folder) -> DecoderNetwork:
    """Fused attention with plain products, and recorded passes, on the CPU."""
    plan = dataclasses.replace(PLAN, options=CudaOptions("fused"))
    with cuda_on_cpu.fused_in_float32():
        cuda_on_cpu.build_base(folder / "fp32", folder / "engine", plan)
    with cuda_on_cpu.recording():
        return cuda_on_cpu.open_base(folder / "engine")


@pytest.fixture(scope="module", params=GPU_FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = open_checkpoint(str(make_vlm(folder / "checkpoint", request.param)))
    for dtype in ("fp32", "fp16"):
        export_llm(checkpoint, folder / dtype, ExportOptions(dtype=dtype, num_layers=2))
    return folder


def open_tensorrt(folder, plan=PLAN) -> DecoderNetwork:
    """Edgellm's kernels, on a fake GPU."""
    spec = with_kv_dtype(load_bundle(folder / "fp16", LLM_BUNDLE).spec, "float16")
    graph, kernels = folder / "lowered.onnx", Kernels(sm=110, codes="fp16", sequences=MOST)
    lower_for_gpu(folder / "fp16" / "model.onnx", graph, kernels=kernels, capacity=CAPACITY)
    passes, device = base_passes(plan, is_causal=spec.min_chunk == 1), FakeDevice()
    runner = BatchRunner(
        engine=FakeEngine(graph, passes, device),
        device=device,
        max_rows=passes[-1].max_rows,
        tree_rows=shared_rows(plan.max_verify_tree_size, MOST),
        spec=spec,
        capacity=CAPACITY,
        num_sequences=MOST,
    )
    runner.prepare()
    return DecoderNetwork(runner=runner, spec=spec, capacity=CAPACITY)


OPEN = {"cuda": open_cuda, "tensorrt": open_tensorrt}


@pytest.mark.each_change(
    "qwen2_5_vl-tensorrt",
    "gemma3-tensorrt",
    "qwen2_5_vl-cuda",
    "gemma3-cuda",
    "smolvlm-cuda",
)
@pytest.mark.parametrize("backend", OPEN)
def test_any_schedule_is_batch_invariant(folder, backend):
    """Chunks with image tokens, with tokens and trees of others; each has its own positions."""
    session, rng = OPEN[backend](folder), np.random.default_rng(2)
    spec = load_bundle(folder / "fp16", LLM_BUNDLE).decoder
    run_together(session, lambda at: Scripted(at, session.new_kv(), CAPACITY, spec), MOST + 1, rng)


@pytest.mark.parametrize("folder", ["internvl"], indirect=True)
def test_costs_of_an_engine_without_trees_are_measured(folder):
    """Each sequence gets one position with logits; the runner receives the costs."""
    plan = dataclasses.replace(PLAN, max_verify_tree_size=0)
    session, spec = open_tensorrt(folder, plan), load_bundle(folder / "fp16", LLM_BUNDLE).decoder
    engine = SimpleNamespace(
        cost_ms={},
        max_verify_tree_size=0,
        max_input_len=plan.max_input_len,
        decoder=spec,
        main_graphs=(SimpleNamespace(max_rows=0),),
    )
    found = session.costs_of(engine)
    assert [*found] == [PASS, *(shared_kind(PASS, count) for count in (1, 2, 4))]
    assert [*found[PASS]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert session._runner._costs is not None


def test_passes_without_images_are_recorded(folder, monkeypatch):
    """Also of models with images, which do not use the embeddings set for other prompts."""
    session, runs = open_cuda(folder), cuda_on_cpu.Runs(monkeypatch)
    kvs = [session.new_kv(), session.new_kv()]
    for seed, kv in enumerate(kvs):
        kv.images = random_images(load_bundle(folder / "fp16", LLM_BUNDLE).decoder, seed)
        session.run_batch([SequencePart(kv, VOCABULARY + np.arange(20), 0, np.array([19]))])
    assert runs.ids == ["-1", "-1"]
    token, row = np.array([40]), np.array([0])
    session.run_batch([SequencePart(kv, token, 20, row) for kv in kvs])
    session.run_batch([SequencePart(kvs[0], token, 21, row)])
    assert all(int(each) > 0 for each in runs.ids[2:])


# -------------------------------------------------------------------------- answers with a draft
SPEC = SpecOptions(lookups=("ngram",), top_k=4, steps=3, verify_size=12, tree="fixed")
ASK = {"sampling": SamplingParams(temperature=0), "max_generate_length": 8}


def questions(folder) -> list[list[dict]]:
    """Prompts with images, `b` of the size of `a`, and one without."""
    for name, size in (("a", (33, 21)), ("b", (33, 21)), ("c", (16, 60))):
        picture(*size, seed=ord(name)).save(folder / name, "png")
    asked = ["a", "w1"], ["b", "w1"], ["w3", "c", "w4", "a", "w5"], ["w6 w7"], ["a", "w8"]
    return [[{"role": "user", "content": [item(folder, one) for one in each]}] for each in asked]


def item(folder, name: str) -> dict:
    if name in "abc":
        return {"type": "image", "image": str(folder / name)}
    return {"type": "text", "text": name}


def require_the_same(llm: LLM, asked: list, alone: list[list[int]]) -> None:
    """In one batch, in any order, drafted or not: each output equals the single one."""
    together: list[int] = []
    llm.on_pass(lambda answers, _: together.append(answers))
    for speculative, order in ((True, 1), (False, -1)):
        found = llm.generate_batch(asked[::order], speculative=speculative, **ASK)
        assert [one.token_ids for one in found] == alone[::order]
        assert (max(len(one.profile.rounds) for one in found) > 0) == speculative
    assert together.count(MOST) > 4


@pytest.fixture(params=OPEN)
def engines(request, tmp_path, monkeypatch):
    """Open an LLM with images and drafts, and one of the same model on the CPU, if any."""
    dtype = {"cuda": "fp32", "tensorrt": "fp16"}[request.param]
    built = build_vlm(tmp_path, "qwen2_5_vl", MROPE, dtype)
    seeing = {"multimodal_engine_dir": built.visual_engine}
    if request.param == "cuda":
        plan = dataclasses.replace(PLAN, max_draft_tree_size=12, kv_capacity=256, max_input_len=200)
        cuda_on_cpu.build_base(tmp_path / "bundle", tmp_path / "cuda", plan)
        cuda_on_cpu.build_its_draft(tmp_path / "draft_bundle", tmp_path / "cuda", plan)
        with cuda_on_cpu.cuda_is_the_cpu(), cuda_on_cpu.recording():
            yield partial(LLM, tmp_path / "cuda", spec=SPEC, **seeing), LLM(built.engine, **seeing)
        return
    paths = (
        tmp_path / name for name in ("checkpoint", "draft", "bundle", "draft_bundle", "engine")
    )
    lowered = Lowered(EaglePair(MROPE, *paths), tmp_path, codes="fp16", answers=MOST)
    lowered.replace_engines(monkeypatch, FakeDevice())
    yield partial(LLM, built.engine, spec=SPEC, **seeing), None


def answers(llm: LLM, asked: list) -> list[list[int]]:
    """Plain outputs, one at a time."""
    found = [llm.generate_batch([one], speculative=False, **ASK) for one in asked]
    return [one.token_ids for (one,) in found]


@pytest.mark.each_change("cuda")
def test_speculative_outputs_equal_plain_ones(engines, tmp_path):
    """On the fake GPU those of the same engine, else those of the CPU."""
    (open_llm, on_cpu), asked = engines, questions(tmp_path)
    llm = open_llm()
    require_the_same(llm, asked, answers(on_cpu or llm, asked))


def require_reused(found: list[RequestOutput], expected: list[list[int]]) -> None:
    """Outputs that continue a cached image prefix of another request."""
    assert [one.token_ids for one in found] == expected
    for one in found:
        assert one.timings()["reused_tokens"] > one.profile.image_tokens[0]


@pytest.mark.each_change("cuda")
def test_image_positions_are_forked_and_saved(engines, tmp_path, monkeypatch):
    """Requests continue a running one, a finished one, and one of another process."""
    (open_llm, _), asked = engines, questions(tmp_path)
    repeated = [asked[0], asked[4], asked[0]]  # about `a`; `b` is of its size
    with open_llm() as llm:
        *alone, other = answers(llm, [*repeated, asked[1]])
    folder = SnapshotFolder(tmp_path / "contexts", {"base": "1"})
    folder.prepare()
    fork, forked = SequenceKV.fork, list[SequenceKV]()
    monkeypatch.setattr(SequenceKV, "fork", lambda self: forked.append(self) or fork(self))
    with open_llm(context_reuse=True) as llm:
        require_reused(llm.generate_batch(repeated, **ASK)[1:], alone[1:])
        assert forked
        require_reused(llm.generate_batch(repeated, speculative=False, **ASK), alone)
        (found,) = llm.generate_batch([asked[1]], **ASK)
        assert found.token_ids == other
        assert found.timings()["reused_tokens"] < found.profile.image_tokens[0]
        saved = folder.save(llm.kv_cache_manager.all_prefixes())
    for speculative in (True, False):
        with open_llm(context_reuse=True) as llm:
            loaded = folder.load(llm.kv_cache_manager.num_networks)
            assert (len(loaded.contexts), loaded.ignored) == (saved, [])
            for context in loaded.contexts:
                llm.kv_cache_manager.pinned.add(context)
            found = llm.generate_batch([asked[0], asked[1]], speculative=speculative, **ASK)
            require_reused(found, [alone[0], other])
