"""The runtime's own logic on a fake GPU (`fake_gpu.py`).

Outputs equal those of ONNX Runtime's sessions over the same bundles, in float32.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from eagle_engines import CAPACITY, INPUT
from fake_gpu import FakeDevice, FakeEngine, GpuMisuseError
from lowered_engines import CANDIDATES, PLAN, Lowered

from edgellm.build.tensorrt.profiles import base_passes
from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import DECODER, DRAFT, FUSE
from edgellm.core.manifest import LLM_ENGINE, FileRecord, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.bound_pass import bucket_of, bucket_sizes, fill_mask
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "w83 w64 w53 w32 w35 w12 w15"  # its outputs are long
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=42)


@pytest.fixture(scope="module")
def lowered(eagle_pair, tmp_path_factory) -> Lowered:
    return Lowered(eagle_pair, tmp_path_factory.mktemp("lowered"))


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def session(lowered, device) -> DecoderNetwork:
    return lowered.open(device)


@pytest.fixture(scope="module")
def reference(eagle_pair):
    """ONNX Runtime's session of the same base."""
    return open_decoder(eagle_pair.engine, load_engine(eagle_pair.engine, LLM_ENGINE))


def _answer(llm: LLM, sampling: SamplingParams, *, speculative: bool = True) -> list[int]:
    answer = llm.generate(
        PROMPT, sampling=sampling, max_generate_length=40, speculative=speculative
    )
    for _ in answer:
        pass
    return answer.token_ids


@pytest.fixture
def fake_llm(eagle_pair, lowered, device, monkeypatch):
    """An `LLM` whose engines run on the fake GPU; the tree has the given size, or one by costs."""
    lowered.replace_engines(monkeypatch, device)

    def load(tree: str = "fixed", top_k: int = 5, steps: int = 4, verify_size: int = 20) -> LLM:
        options = SpecOptions(top_k=top_k, steps=steps, verify_size=verify_size, tree=tree)
        return LLM(eagle_pair.engine, spec=options)

    return load


# -------------------------------------------------------------------------------- outputs
@pytest.fixture(scope="module")
def cpu_answers(eagle_pair) -> dict[SamplingParams, list[int]]:
    llm = LLM(eagle_pair.engine)
    return {sampling: _answer(llm, sampling, speculative=False) for sampling in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_outputs_equal_the_cpu(cpu_answers, fake_llm, device, sampling):
    llm = fake_llm()
    assert _answer(llm, sampling, speculative=False) == cpu_answers[sampling]
    assert _answer(llm, sampling) == cpu_answers[sampling]
    assert len(cpu_answers[sampling]) == 40
    assert device.launches > 40 > device.captures > 4


@pytest.mark.each_change("version1")
@pytest.mark.parametrize("version", [(10, 3), (10, 16)])
def test_outputs_of_engines_for_older_versions(
    cpu_answers, eagle_pair, device, tmp_path, monkeypatch, version
):
    """10.3 returns new keys and values, which are appended; 10.16 updates caches in place."""
    older = Lowered(eagle_pair, tmp_path, version)
    older.replace_engines(monkeypatch, device)
    appended, append = [], device.append_rows
    monkeypatch.setattr(device, "append_rows", lambda *a: (appended.append(a), append(*a)))
    llm = LLM(eagle_pair.engine, spec=SpecOptions(top_k=5, steps=4, verify_size=20, tree="fixed"))
    for sampling, expected in cpu_answers.items():
        assert _answer(llm, sampling, speculative=False) == expected
        assert _answer(llm, sampling) == expected
    assert bool(appended) == (version < (10, 15))
    assert device.launches > 40 > device.captures > 4


def test_greedy_ids_are_those_of_onnxruntime(reference, session):
    ids, write = np.arange(20, 31), 0
    for rows in (ids, np.array([40]), np.array([41]), np.array([42, 43, 44])):
        outputs = np.arange(len(rows))
        expected = reference.run(rows, write, outputs)
        found = session.run(rows, write, outputs)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        for row in outputs:
            assert found.highest_of(row) == pytest.approx(expected.highest_of(row), abs=1e-4)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
        np.testing.assert_allclose(found.taps, expected.taps, atol=1e-4)
        write += len(rows)


@pytest.mark.parametrize("nodes", [2, 3, 7, 9, 17, 23, 33, 60])
def test_trees_of_all_sizes(reference, session, nodes):
    """Padded to their bucket; padding changes nothing, before and after a graph is recorded."""
    random = np.random.default_rng(nodes)
    prompt = np.arange(10, 24)
    parents = np.array([random.integers(0, at) for at in range(1, nodes)])
    mask, depths = np.eye(nodes, dtype=np.bool_), np.zeros(nodes, np.int64)
    for at, parent in enumerate(parents, 1):
        mask[at] |= mask[parent]
        depths[at] = depths[parent] + 1
    for one in (reference, session):
        one.run(prompt, 0, np.zeros(1, np.int64))
    for _ in range(3):  # at once, recorded, replayed
        ids = random.integers(9, 96, nodes)
        arguments = ids, 14, np.arange(nodes)
        options = {"position_ids": 14 + depths, "tree_mask": mask}
        expected, found = reference.run(*arguments, **options), session.run(*arguments, **options)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


def test_reused_kv_cache_equals_a_fresh_prompt(session, lowered, device):
    """A path of a tree is compacted; the cache then is that of a prompt without the tree."""
    prompt, ids = np.arange(10, 20), np.array([30, 31, 32, 33, 34, 35])
    parents = (0, 0, 1, 1, 3)
    mask, depths = np.eye(6, dtype=np.bool_), np.zeros(6, np.int64)
    for at, parent in enumerate(parents, 1):
        mask[at] |= mask[parent]
        depths[at] = depths[parent] + 1
    session.run(prompt, 0, np.zeros(1, np.int64))
    session.run(ids, 10, np.arange(6), position_ids=10 + depths, tree_mask=mask)
    path = np.array([0, 1, 4])
    session.kv.compact(10, path)
    fresh = lowered.open(device)
    fresh.run(np.concatenate([prompt, ids[path]]), 0, np.zeros(1, np.int64))
    np.testing.assert_allclose(session.kv.read(13), fresh.kv.read(13), atol=1e-5)
    fresh.run(np.arange(50, 60), 0, np.zeros(1, np.int64))
    fresh.kv.write(session.kv.read(13))
    next_one = (np.array([70]), 13, np.zeros(1, np.int64))
    np.testing.assert_allclose(
        fresh.run(*next_one).logits, session.run(*next_one).logits, atol=1e-5
    )


def test_missing_costs_are_measured(fake_llm):
    """Engines that were compiled ahead of time have no times; a tree is sized by them."""
    llm = fake_llm("cost")
    assert _answer(llm, GREEDY) == _answer(llm, GREEDY, speculative=False)


# ---------------------------------------------------------------------------- work of the GPU
def test_each_bucket_is_recorded_once_and_replayed(session, device):
    session.run(np.arange(10, 40), 0, np.zeros(1, np.int64))
    before = device.captures, device.launches
    for at in range(12):
        session.run(np.array([20 + at]), 30 + at, np.zeros(1, np.int64))
    for nodes in (9, 12, 16, 10):  # all 16 rows
        session.run(np.arange(10, 10 + nodes), 60, np.arange(nodes))
    assert (device.captures - before[0], device.launches - before[1]) == (1, 12 + 3)


def test_a_greedy_pass_fetches_nothing_but_its_pick(session, device):
    session.run(np.arange(10, 20), 0, np.zeros(1, np.int64))
    waits, passes = device.waits, device.passes
    for at in range(8):
        result = session.run(np.array([20]), 10 + at, np.zeros(1, np.int64))
        assert np.isfinite(result.highest_of(0))
    assert device.passes - passes == device.waits - waits == 8
    assert result.logits.shape == (1, 96)
    assert device.waits - waits == 9


def test_results_of_an_earlier_pass_are_not_those_of_the_last(session):
    first = session.run(np.arange(10, 20), 0, np.zeros(1, np.int64))
    session.run(np.array([20]), 10, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="logits of a pass is read after the next one"):
        _ = first.logits


def test_prompts_and_the_cache_s_end(session, reference):
    """Where a bucket would reach beyond the cache, a pass has its own size."""
    with pytest.raises(LimitError, match="exceed the KV capacity"):
        session.run(np.arange(10), CAPACITY - 9, np.zeros(1, np.int64))
    with pytest.raises(LimitError, match="supports no pass of"):
        session.run(np.arange(INPUT + 1) % 96, 0, np.zeros(1, np.int64))
    for one in (session, reference):
        for begin in (0, 64):
            one.run(np.arange(9, 69), begin, np.zeros(1, np.int64))
    rows = np.array([50, 51, 52])
    found, expected = (one.run(rows, CAPACITY - 3, np.arange(3)) for one in (session, reference))
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)


def test_too_little_memory(lowered):
    with pytest.raises(LimitError, match="the GPU is full"):
        lowered.open(FakeDevice(memory_bytes=100_000))
    record = FileRecord(num_bytes=3_000_000_000, sha256="")
    rows = 500_000_000 // lowered.manifest.decoder.kv.bytes_per_token
    manifest = dataclasses.replace(
        lowered.manifest, files={"llm.engine": record}, max_kv_cache_capacity=rows
    )
    with pytest.raises(LimitError, match=r"needs 3.50 GB on the GPU, 3.40 GB are free") as caught:
        tensorrt.require_memory(3_400_000_000, manifest)
    assert "--maxKVCacheCapacity (it takes 0.50 GB)" in caught.value.hint


def test_more_candidates_than_an_engine_gives(lowered, device):
    """A static tree wider than the rows of a round would get other nodes than it defines."""
    draft = lowered.open_draft(device)
    hidden = np.zeros((1, lowered.draft_manifest.draft.decoder.hidden_size), np.float32)
    row = np.zeros(1, np.int64)
    assert draft.run(row, hidden, 0, row, top_k=CANDIDATES).token_ids.shape == (1, CANDIDATES)
    with pytest.raises(LimitError, match="TopK 41 exceeds the draft engine's 40 candidates"):
        draft.run(row, hidden, 0, row, top_k=CANDIDATES + 1)


def test_no_size_of_a_pass_is_computed_on_the_device(lowered):
    """A CUDA graph cannot be recorded where the host must read a shape back."""
    for path in map(lowered.path, (DECODER, DRAFT, FUSE)):
        graph = ir.load(path).graph
        assert not {node.op_type for node in graph} & {"NonZero", "Loop", "If", "Unique"}
        assert graph_io.TOP_K not in {value.name for value in graph.inputs}


# ------------------------------------------------------------------------- parts, and controls
def test_a_pass_is_padded_to_the_next_bucket_size():
    assert bucket_sizes(60) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60]
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert [bucket_of(size, bucket_sizes(60)) for size in (1, 3, 9, 57, 61)] == [1, 4, 16, 60, 61]


def test_masks_are_padded_with_visible_columns():
    out, mask = np.zeros((4, 7), np.bool_), np.array([[1, 0, 1, 0], [0, 1, 0, 1]], np.bool_)
    fill_mask(out, mask, 2)
    assert out.astype(int).tolist() == [
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    fill_mask(out, None, 2)
    np.testing.assert_array_equal(out, np.tri(4, 7, 3, dtype=np.bool_))


def test_the_fake_gpu_finds_misuse(lowered, device):
    engine = FakeEngine(lowered.path(DECODER), base_passes(PLAN), device)
    scratch = device.allocate(10_000)
    context = engine.new_context(0, scratch)
    with pytest.raises(GpuMisuseError, match="no address was set"):
        context.enqueue()
    with pytest.raises(GpuMisuseError, match="not in the profile"):
        context.set_shape(graph_io.INPUT_IDS, (1, 2))
    with pytest.raises(GpuMisuseError, match="no multiple of"):
        context.bind(graph_io.INPUT_IDS, scratch.address + 8)
    buffers = {name: device.allocate(1 << 20) for name in engine.tensors}
    for name, buffer in buffers.items():
        context.bind(name, buffer.address)
    with pytest.raises(GpuMisuseError, match="no shape was set"):
        context.enqueue()
    for name in (graph_io.INPUT_IDS, graph_io.POSITION_IDS, graph_io.TREE_MASK):
        context.set_shape(name, (1, 1))
    context.set_shape(graph_io.LOGITS_INDEX, (1,))
    with pytest.raises(GpuMisuseError, match="recorded before it ran"):
        device.capture(context.enqueue)
    context.enqueue()
    device.synchronize()
    with pytest.raises(GpuMisuseError, match="TensorRT-RTX would replace"):
        device.capture(context.enqueue)
    context.may_be_recorded = True
    device.capture(context.enqueue)
    with pytest.raises(GpuMisuseError, match="holds on to the shapes"):
        context.set_shape(graph_io.LOGITS_INDEX, (1,))
    with pytest.raises(GpuMisuseError, match="wait while a graph"):
        device.capture(device.synchronize)
    with pytest.raises(GpuMisuseError, match="needs pinned memory"):
        device.upload(scratch.address, np.zeros(4, np.uint8))
    context.enqueue()
    del buffers, buffer
    with pytest.raises(GpuMisuseError, match="not allocated"):
        device.synchronize()
