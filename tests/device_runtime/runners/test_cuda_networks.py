"""Sessions of engines for CUDA on the CPU: outputs, caches, and errors at load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import cuda_on_cpu
import numpy as np
import onnxruntime as ort
import pytest
from conftest import assert_one_line_error
from eagle_engines import BASE_PLAN, EAGLE3, draft_plan, export_pair

from edgellm.build.engine import build_engine
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
)
from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, LLM_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.runners import onnxruntime_graphs as graphs
from edgellm.device_runtime.runners.onnxruntime_cuda import device_kv_cache, runner
from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ("w83 w64 w53 w32", "w10 w24 w79 w65 w88", "w56 w15 w35")
LENGTH = 40  # of outputs, in tokens
TREES = SpecOptions(top_k=5, steps=4, verify_size=20, tree="fixed")


@pytest.fixture(scope="module")
def engine(eagle_pair, tmp_path_factory) -> Path:
    """The tiny float32 base with its draft, lowered for CUDA."""
    engine = tmp_path_factory.mktemp("cuda") / "engine"
    cuda_on_cpu.build_base(eagle_pair.bundle, engine, BASE_PLAN)
    cuda_on_cpu.build_its_draft(eagle_pair.draft_bundle, engine, draft_plan())
    return engine


def _answer(llm: LLM, prompt: str, *, speculative: bool, sampling=GREEDY) -> list[int]:
    answer = llm.generate(
        prompt, sampling=sampling, max_generate_length=LENGTH, speculative=speculative
    )
    for _ in answer:
        pass
    return answer.token_ids


def _llm(engine: Path, spec: SpecOptions) -> LLM:
    with cuda_on_cpu.cuda_is_the_cpu():
        return LLM(engine, spec=spec)


def test_manifests_name_the_device(engine):
    base = load_engine(engine, LLM_ENGINE)
    draft = load_engine(engine / DRAFT_FOLDER, DRAFT_ENGINE)
    for built in (base, draft):
        assert (built.backend, built.machine) == ("onnxruntime_cuda", "cuda")
        assert any("nothing was measured" in note for note in built.options["notes"])
    assert base.cost_ms == draft.cost_ms == {}


def _for_three(pair, folder: Path) -> Path:
    products = ("llm", pair.bundle, BASE_PLAN), ("draft", pair.draft_bundle, draft_plan())
    for product, bundle, plan in products:
        three = dataclasses.replace(plan, max_batch_size=3)
        build_engine(product, bundle, folder, three, cuda_on_cpu.CUDA, lambda _: None)
    return folder


def test_outputs_equal_the_cpu(eagle_pair, engine, tmp_path):
    """Plain and speculative, alone and in batches of three: a fourth request waits."""
    here, llm = LLM(eagle_pair.engine), _llm(engine, TREES)
    asks = [*((prompt, GREEDY) for prompt in PROMPTS)]
    asks += [
        (f"{PROMPTS[0]} w40", SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=5)),
        asks[0],
    ]
    expected = [_answer(here, one, speculative=False, sampling=how) for one, how in asks]
    for (prompt, sampling), wanted in zip(asks[:4], expected, strict=False):
        for speculative in (False, True):
            assert _answer(llm, prompt, speculative=speculative, sampling=sampling) == wanted
    with cuda_on_cpu.cuda_is_the_cpu():
        three = LLM(_for_three(eagle_pair, tmp_path / "e"), spec=TREES, context_reuse=True)
    prompts, samplings = zip(*asks, strict=True)
    limits = {"max_generate_length": LENGTH}
    for speculative in (True, False):
        found = three.generate_batch(prompts, sampling=samplings, speculative=speculative, **limits)
        assert [one.token_ids for one in found] == expected


def test_costs_are_measured_where_there_is_cuda(eagle_pair, tmp_path):
    with cuda_on_cpu.cuda_is_the_cpu():
        base = cuda_on_cpu.build_base(eagle_pair.bundle, tmp_path / "e", BASE_PLAN)
        draft = cuda_on_cpu.build_its_draft(
            eagle_pair.draft_bundle, tmp_path / "e", draft_plan("int8", 16)
        )
    (note,) = base.options["notes"]
    assert note in draft.options["notes"]
    assert "activations are float" in note
    measured = (base.cost_ms["pass"], draft.cost_ms["step"], draft.cost_ms["extend"])
    assert len({*map(frozenset, measured)}) == 1
    assert draft.main_graphs[0].precision == "int8"


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """A base in float16, whose attention is fused, with its draft."""
    folder = tmp_path_factory.mktemp("halves")
    pair = export_pair(folder, EAGLE3, dtype="fp16")
    cuda_on_cpu.build_base(pair.bundle, folder / "e", BASE_PLAN)
    cuda_on_cpu.build_its_draft(pair.draft_bundle, folder / "e", draft_plan())
    return folder / "e"


def test_half_precision_is_lossless_too(halves):
    """float16 caches and activations; tokens of a tree are rounded like single tokens."""
    built = load_engine(halves, LLM_ENGINE)
    assert (built.decoder.kv.dtype, built.main_graphs[0].precision) == ("float16", "fp16")
    llm = _llm(halves, TREES)
    for prompt in PROMPTS:
        plain = _answer(llm, prompt, speculative=False)
        assert _answer(llm, prompt, speculative=True) == plain


# ---------------------------------------------------------------------------- recorded passes
def test_passes_that_recur_are_padded_and_recorded(halves, monkeypatch):
    """All that plain decoding and trees need is recorded at load; prompts never are."""
    pieces = _llm(halves, TREES)
    expected = [_answer(pieces, prompt, speculative=True) for prompt in PROMPTS]
    runs = cuda_on_cpu.Runs(monkeypatch)
    with cuda_on_cpu.recording():
        session = cuda_on_cpu.open_base(halves)
        assert {*runs.ids} == {"-1", *map(str, range(1, 8))}  # of 1, 2, 4 ... 64 rows
        runs.ids.clear()
        session.run(np.arange(9, 29), 0, np.array([19]))
        session.run(np.array([50]), 20, np.array([0]))
        for rows in (3, 19):
            session.run(np.arange(rows), 21, np.arange(rows), tree_mask=np.tri(rows, dtype=bool))
        assert runs.ids == ["-1", "1", "3", "6"]
        llm = _llm(halves, TREES)
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            assert _answer(llm, prompt, speculative=True) == wanted
        assert _answer(llm, PROMPTS[0], speculative=False) == expected[0]


def test_recordings_are_bounded(halves, monkeypatch):
    """Each takes device memory: later passes launch kernel by kernel."""
    runs = cuda_on_cpu.Runs(monkeypatch)
    monkeypatch.setattr(runner, "_MAX_RECORDED", 2)
    with cuda_on_cpu.recording():
        session = cuda_on_cpu.open_base(halves)
    assert {*runs.ids} == {"-1", "1", "2"}
    assert len(session.run(np.arange(4), 0, np.arange(4)).logits) == 4


def test_a_token_uploads_only_changes(halves, monkeypatch):
    with cuda_on_cpu.recording():
        session = cuda_on_cpu.open_base(halves)
    session.run(np.arange(9, 29), 0, np.array([19]))
    session.run(np.array([50]), 20, np.array([0]))
    sent, update = [], ort.OrtValue.update_inplace
    monkeypatch.setattr(
        ort.OrtValue, "update_inplace", lambda value, array: (sent.append(0), update(value, array))
    )
    session.run(np.array([51]), 21, np.array([0]))
    assert len(sent) == 2  # the token, and where it goes


def test_failed_recording_falls_back_to_plain_passes(halves, monkeypatch, caplog):
    expected = _answer(_llm(halves, TREES), PROMPTS[0], speculative=True)
    runs = cuda_on_cpu.Runs(monkeypatch, fails=True)
    with cuda_on_cpu.recording():
        llm = _llm(halves, TREES)
        assert _answer(llm, PROMPTS[0], speculative=True) == expected
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2  # the base's and the draft's
    assert "cannot be recorded as CUDA graphs" in warnings[0]
    assert "more" not in warnings[0]
    assert runs.ids[-1] == ""


def test_a_pass_at_the_end_of_the_cache_is_not_padded(halves):
    with cuda_on_cpu.recording():
        session, other = cuda_on_cpu.open_base(halves), cuda_on_cpu.open_base(halves)
    ids = np.random.default_rng(2).integers(9, 96, session.capacity)
    mask = np.tri(5, dtype=np.bool_)
    mask[3, 2] = False
    session.run(ids[:-5], 0, np.array([0]))
    other.run(ids[:-12], 0, np.array([0]))
    for begin in range(session.capacity - 12, session.capacity - 5):
        other.run(ids[begin : begin + 1], begin, np.array([0]))
    results = [
        each.run(ids[-5:], len(ids) - 5, np.arange(5), tree_mask=mask) for each in (session, other)
    ]
    np.testing.assert_allclose(results[0].logits, results[1].logits, atol=0.02)
    assert results[0].taps.shape == results[1].taps.shape


def test_medusa_on_cuda_equals_plain_decoding_on_the_cpu(eagle_pairs, tmp_path):
    pair = eagle_pairs("medusa")
    cuda_on_cpu.build_base(pair.bundle, tmp_path / "e", BASE_PLAN)
    built = cuda_on_cpu.build_its_draft(pair.draft_bundle, tmp_path / "e", draft_plan())
    assert "extend" not in built.cost_ms
    llm, here = _llm(tmp_path / "e", SpecOptions(tree="fixed")), LLM(pair.engine)
    expected = _answer(here, PROMPTS[0], speculative=False)
    assert _answer(llm, PROMPTS[0], speculative=True) == expected


# ------------------------------------------------------------------------------------- caches
def test_reused_kv_cache_equals_a_fresh_prompt(engine):
    one, fresh = cuda_on_cpu.open_base(engine), cuda_on_cpu.open_base(engine)
    ids, path = np.arange(30, 36), np.array([0, 2, 4])
    mask = np.eye(6, dtype=np.bool_)
    mask[2, 0] = mask[4, [0, 2]] = True
    depths = np.array([0, 1, 1, 2, 2, 3])
    one.run(np.arange(10, 20), 0, np.zeros(1, np.int64))
    one.run(ids, 10, np.arange(6), position_ids=10 + depths, tree_mask=mask)
    one.kv.compact(10, path)
    fresh.run(np.concatenate([np.arange(10, 20), ids[path]]), 0, np.zeros(1, np.int64))
    saved = fresh.kv.read(13)
    np.testing.assert_allclose(one.kv.read(13), saved, atol=1e-5)
    other = cuda_on_cpu.open_base(engine)
    other.kv.write(saved)
    np.testing.assert_array_equal(other.kv.read(13), saved)
    results = [s.run(np.array([50]), 13, np.zeros(1, np.int64)).logits for s in (other, fresh)]
    np.testing.assert_array_equal(*results)


def test_compaction_with_overlapping_positions(engine):
    session = cuda_on_cpu.open_base(engine)
    session.run(np.arange(20), 0, np.zeros(1, np.int64))
    before = np.random.default_rng(0).standard_normal(session.kv.read(20).shape, np.float32)
    session.kv.write(before)
    session._swapper.swap_in(session.kv).compact(4, np.array([1, 2, 3, 5, 6, 7, 12]))
    expected = before.copy()
    expected[..., 4:11, :] = before[..., [5, 6, 7, 9, 10, 11, 16], :]
    np.testing.assert_array_equal(session.kv.read(20), expected)


def test_passes_over_a_growing_cache(eagle_pair, engine):
    """Bindings are made for steps of slots; the last step is shorter than the others."""
    here, there = cuda_on_cpu.open_base(eagle_pair.engine), cuda_on_cpu.open_base(engine)
    ids, at = np.random.default_rng(4).integers(9, 96, there.capacity), 0
    for rows in (60, 3, 1, 1, 1, 2, 59, 1):
        arguments = ids[at : at + rows], at, np.array([0, rows - 1])
        expected, found = here.run(*arguments), there.run(*arguments)
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-3)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        at += rows
    assert at == there.capacity
    with pytest.raises(LimitError, match="exceed the KV capacity of 128"):
        there.run(ids[:1], at, np.zeros(1, np.int64))


def test_outputs_must_be_read_before_the_next_pass(engine):
    session = cuda_on_cpu.open_base(engine)
    result = session.run(np.arange(9, 14), 0, np.zeros(1, np.int64))
    assert np.shares_memory(result.logits, result.logits)  # fetched once
    session.run(np.arange(9, 14), 0, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="hidden_taps of a pass is read after the next one"):
        _ = result.taps


def test_a_device_that_is_too_small(engine, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 7")

    monkeypatch.setattr(device_kv_cache.ort.OrtValue, "ortvalue_from_shape_and_type", fail)
    with pytest.raises(LimitError, match="Failed to allocate") as caught:
        cuda_on_cpu.open_base(engine)
    assert "--maxKVCacheCapacity" in caught.value.hint


# ----------------------------------------------------------------------------------- errors
_HAS_CUDA = "CUDAExecutionProvider" in ort.get_available_providers()
without_cuda = pytest.mark.skipif(_HAS_CUDA, reason="onnxruntime-gpu is installed")


@without_cuda
def test_engines_for_cuda_do_not_run_on_a_cpu(command_here, engine, tmp_path):
    requests = tmp_path / "requests.json"
    requests.write_text('{"requests": [{"messages": [{"role": "user", "content": "w9"}]}]}')
    files = ("--inputFile", requests, "--outputFile", tmp_path / "out.json")
    result = command_here("llm_inference", "--engineDir", engine, *files)
    assert_one_line_error(result, "is installed without CUDA", "pip install 'edgellm[gpu]'")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("version", "capability", "message", "hint"),
    [
        ("1.22.0", 89, "1.22.0 is too old for CUDA engines", "--upgrade onnxruntime-gpu"),
        (ort.__version__, None, "no NVIDIA GPU or no driver", "--device cpu"),
        (ort.__version__, 89, r"libraries do not load: .*libonnxruntime_providers", "cuDNN 9"),
    ],
    ids=["version", "driver", "libraries"],
)
@without_cuda
def test_missing_cuda_requirements_are_reported_with_a_hint(
    monkeypatch, version, capability, message, hint
):
    monkeypatch.setattr(ort, "__version__", version)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda.PROVIDER])
    monkeypatch.setattr(cuda, "compute_capability", lambda: capability)
    with pytest.raises(EdgeLLMError, match=message) as caught:
        cuda.require_cuda()
    assert hint in caught.value.hint


@without_cuda
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_library_that_loads_may_have_no_kernel_for_the_gpu(monkeypatch):
    """As that for aarch64 on an Orin: the check is whether a kernel runs."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda.PROVIDER])
    monkeypatch.setattr(cuda, "compute_capability", lambda: 87)
    monkeypatch.setattr(cuda, "_missing_library", lambda: "")
    with pytest.raises(EdgeLLMError, match="kernels do not run on this GPU") as caught:
        cuda.require_cuda()
    assert "for Orin and Thor" in caught.value.hint
    monkeypatch.setattr(cuda, "PROVIDER", "CPUExecutionProvider")
    monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda.PROVIDER])
    monkeypatch.setattr(ort.SessionOptions, "add_session_config_entry", lambda *_: None)
    assert cuda.require_cuda() == graphs.CUDA
    monkeypatch.setattr(ort.InferenceSession, "run", lambda *_: [np.zeros(4, np.float32)])
    with pytest.raises(EdgeLLMError, match="a sum is wrong"):
        cuda.require_cuda()


@without_cuda
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_graphs_are_never_put_on_the_cpu_instead(engine):
    """ONNX Runtime itself would only warn."""
    with pytest.raises(BrokenArtifactError, match="cannot load"):
        graphs.load_graph(
            engine / "llm.onnx", graphs.GraphOptions(optimize=False, device=graphs.CUDA)
        )


def test_providers_that_differ_from_what_was_asked_for(engine, monkeypatch):
    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda _: ["OtherProvider"])
    with pytest.raises(BrokenArtifactError, match=r"put .* on OtherProvider"):
        graphs.load_graph(engine / "llm.onnx", graphs.GraphOptions(optimize=False))


def test_engines_of_another_version_open(engine):
    """Nothing in them depends on it, unlike the CPU's."""
    manifest = dataclasses.replace(load_engine(engine, LLM_ENGINE), backend_version="1.99")
    with cuda_on_cpu.cuda_is_the_cpu():
        session = open_decoder(engine, manifest)
        assert len(session.run(np.array([5]), 0, np.zeros(1, np.int64)).logits) == 1


def test_a_draft_may_stay_on_the_cpu(eagle_pair, engine, tmp_path):
    """Each engine has its own device."""
    import shutil

    folder = Path(shutil.copytree(engine, tmp_path / "engine"))
    build_engine(
        "draft", eagle_pair.draft_bundle, folder, draft_plan(), "onnxruntime", lambda _: None
    )
    found = json.loads((folder / DRAFT_FOLDER / "manifest.json").read_text())
    assert found["machine"] != "cuda"
    llm = _llm(folder, TREES)
    assert _answer(llm, PROMPTS[0], speculative=True) == _answer(llm, PROMPTS[0], speculative=False)
