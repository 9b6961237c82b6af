"""Batches of sequences in an engine are batch-invariant."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import cuda_on_cpu
import numpy as np
import pytest
from conftest import make_checkpoint
from fake_gpu import FakeDevice, FakeEngine
from lowered_engines import lower_for_gpu, open_with
from scripted_sequences import Scripted, run_together

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.onnxruntime_cuda.options import CudaOptions
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.profiles import base_passes
from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import DECODER
from edgellm.core.manifest import LLM_ENGINE, GraphSpec, load_engine, with_kv_dtype
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.decoder import SequencePart, open_decoder
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.onnxruntime_cuda import padded_batch
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

CAPACITY, MOST = 160, 4
LOWERED = "lowered.onnx"
PLAN = Plan(
    max_input_len=128,
    kv_capacity=CAPACITY,
    threads=2,
    max_verify_tree_size=12,
    max_batch_size=MOST,
    options=CpuOptions("edgellm"),
)
KINDS = {
    "fp32": ("llama", "none"),
    "int8": ("qwen3", "int8"),
    "window": ("mistral", "int4"),
    "cuda": ("mistral", "none"),
    "tensorrt": ("mistral", "none"),
}


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tmp_path_factory):
    kind, quantize = KINDS[request.param]
    folder = tmp_path_factory.mktemp("batch")
    sizes = {**models.find(kind).TINY, "max_position_embeddings": 256}
    is_half = request.param == "tensorrt"
    sizes |= {"head_dim": 64, "num_hidden_layers": 2} if is_half else {}
    checkpoint = make_checkpoint(folder / "checkpoint", **sizes)
    dtype = "fp16" if is_half else "fp32"
    export_llm(open_checkpoint(str(checkpoint)), folder / "bundle", ExportOptions(dtype=dtype))
    plan = dataclasses.replace(PLAN, quantize=quantize)
    if request.param == "cuda":
        with cuda_on_cpu.fused_in_float32():
            plan = dataclasses.replace(plan, options=CudaOptions("fused"))
            cuda_on_cpu.build_base(folder / "bundle", folder / "engine", plan)
    else:
        engine = folder / "engine"
        build_engine("llm", folder / "bundle", engine, plan, "onnxruntime", lambda _: None)
    if is_half:
        lower_for_gpu(
            folder / "bundle" / "model.onnx",
            folder / "engine" / LOWERED,
            kernels=Kernels(sm=110, codes="fp16", sequences=MOST),
            capacity=CAPACITY,
        )
    return folder / "engine"


def open_on_gpu(folder, engine):
    """The runner of a lowered graph on a fake GPU."""
    passes, device = base_passes(PLAN), FakeDevice()
    graphs = tuple(GraphSpec("", each.max_rows, "fp16") for each in passes)
    engine = dataclasses.replace(engine, graphs={DECODER: graphs})
    engine = dataclasses.replace(engine, spec=with_kv_dtype(engine.spec, "float16"))
    loaded = FakeEngine(folder / LOWERED, passes, device)
    return {DECODER: tensorrt.runner_of(DECODER, engine, loaded, device)}


def opened(engine, open_it):
    """Functions that open engines, GPU engines included; CUDA passes are numbered for capture."""
    with ExitStack() as stack:
        if (engine / LOWERED).exists():
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            open_with(patch, open_on_gpu)
        if load_engine(engine, LLM_ENGINE).machine == "cuda":
            stack.enter_context(cuda_on_cpu.cuda_is_the_cpu())
            stack.enter_context(cuda_on_cpu.recording())
        return open_it()


def open_session(engine):
    return opened(engine, lambda: open_decoder(engine, load_engine(engine, LLM_ENGINE)))


def whole_pages(session, rows):
    return -(-rows // session.block_size) * session.block_size


@pytest.mark.each_change("cuda", "window", "fp32")
def test_any_schedule_is_batch_invariant(engine):
    session, rng = open_session(engine), np.random.default_rng(2)
    for trial in range(1 if (engine / LOWERED).exists() else 3):  # which is slow on the fake GPU
        count = int(rng.integers(2, 7))
        seeds = range(100 * trial, 100 * trial + count)

        def make(at, seeds=seeds):
            return Scripted(seeds[at], session.new_kv(), CAPACITY)

        run_together(session, make, count, rng)
    assert session.num_free == MOST * whole_pages(session, CAPACITY)


def test_forks_share_rows_until_one_of_them_writes(engine):
    session = open_session(engine)
    ids = np.arange(100) % 80 + 10
    session.run(ids, 0, np.array([99]))
    free, first = session.num_free, session.kv
    second = first.fork()
    assert session.num_free == free
    expected = [
        session.run(np.array([token]), 100, np.array([0])).logits.copy() for token in (7, 8)
    ]
    session.kv = second
    assert second.num_cached(ids.tolist()) == 100
    found = session.run(np.array([8]), 100, np.array([0])).logits.copy()
    assert session.num_free == free - session.block_size  # another block may be shared
    assert found.tobytes() == expected[1].tobytes()
    session.kv = first
    again = session.run(np.array([7]), 100, np.array([0])).logits
    assert again.tobytes() == expected[0].tobytes()
    second.free()
    assert session.num_free == free
    first.swap_out()
    assert session.num_free == free + whole_pages(session, 100)
    session.kv = first
    again = session.run(np.array([7]), 100, np.array([0])).logits
    assert again.tobytes() == expected[0].tobytes()


def test_rows_beyond_the_capacity_compute_nothing(engine):
    session = open_session(engine)
    one, other = session.new_kv(), session.new_kv()
    session.run_batch([SequencePart(one, np.arange(5), 0, np.array([4]))])
    beyond = SequencePart(other, np.arange(120), 100, np.array([4]))
    with pytest.raises(LimitError, match="exceed the KV capacity"):
        session.run_batch([SequencePart(one, np.arange(5), 5, np.array([4])), beyond])
    assert (one.keys, other.keys) == ([0, 1, 2, 3, 4], [])


SPECS = {"plain": None, "text": SpecOptions(network=None, lookups=("ngram",), tree="fixed")}


@pytest.mark.each_change("tensorrt-*", "fp32-*")
@pytest.mark.parametrize("spec", SPECS)
def test_batched_requests(engine, spec):
    llm = opened(engine, lambda: LLM(engine, spec=SPECS[spec]))
    prompts = [f"w{20 + at} w21 w22 w23 w{40 - at} w21 w22" for at in range(6)]
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=7),
    ]
    asks = [(prompt, kinds[at % 2]) for at, prompt in enumerate(prompts)]
    ask = {"max_generate_length": 24, "speculative": False}
    expected = [llm.generate(prompt, sampling=kind, **ask) for prompt, kind in asks]
    for answer in expected:
        list(answer)
    passes, run = [], llm.base.run_batch
    llm.base.run_batch = lambda parts: passes.append(len(parts)) or run(parts)
    found = llm.generate_batch(
        [prompt for prompt, _ in asks], sampling=[kind for _, kind in asks], max_generate_length=24
    )
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert max(passes) == MOST


def _asks(rows: dict[int, int]) -> dict[int, dict[str, np.ndarray]]:
    """Parts of a pass, by slots and their tokens."""
    return {
        slot: {
            graph_io.INPUT_IDS: np.zeros((1, count), np.int64),
            graph_io.WRITE_INDEX: np.array([slot]),
            graph_io.LOGITS_INDEX: np.arange(count),
        }
        for slot, count in rows.items()
    }


@pytest.mark.parametrize(
    ("rows", "passes"),
    [
        (dict.fromkeys(range(8), 1), [(0, 8)]),
        ({0: 1, 2: 1}, [(0, 4)]),
        ({5: 1}, [(5, 1)]),
        ({0: 1, 200: 1}, [(0, 1), (200, 1)]),  # fewer rows than 256 slots have
        ({0: 12, 1: 5, 2: 9}, [(0, 4)]),
        ({0: 64, 1: 1, 2: 1, 3: 1}, [(0, 1), (0, 4)]),  # 64 rows for each would take longer
        ({0: 300, 1: 1, 2: 1}, [(0, 1), (0, 4)]),
    ],
)
def test_passes_are_few_and_small(rows, passes):
    ends = list(range(256))
    found = padded_batch.arrange(_asks(rows), ends, 256)
    assert [(grid.first, len(grid.parts)) for grid in found] == passes
    asked = [
        grid.first + place
        for grid in found
        for place, part in enumerate(grid.parts)
        if part is not None
    ]
    assert sorted(asked) == sorted(rows)
    assert all(grid.ends == tuple(ends[grid.first :][: len(grid.ends)]) for grid in found)
