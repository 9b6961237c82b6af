"""Engines with edgellm's kernels for attention, on the fake GPU: the cache is known by address."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from eagle_engines import CAPACITY, EAGLE3, WINDOW, EaglePair, build_pair, with_eagle
from eagle_reference import tree_mask
from fake_gpu import FakeDevice
from lowered_engines import Lowered
from manifests import read_manifest, write_manifest

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.graph_roles import DECODER, DRAFT
from edgellm.core.manifest import DRAFT_ENGINE, LLM_ENGINE, load_engine, with_kv_dtype
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.step import step
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.networks.draft import RequestedResult, open_draft
from edgellm.device_runtime.runners.device_speculation import Growth
from edgellm.device_runtime.runners.tensorrt.device_speculation.round import TensorRtRounds
from edgellm.device_runtime.runners.tensorrt.kernel_cache import KV_DTYPES
from edgellm.device_runtime.runners.tensorrt.runner import TensorRtRunner
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.scheduler import running_batch
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.speculate.device_rounds import DeviceRounds, Size
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.spec_budget import SpecCredit

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "w83 w64 w53 w32 w35 w12 w15"
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, top_k=20, top_p=1.0, seed=42)
CODES = tuple(KV_DTYPES)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> EaglePair:
    """In float16, with heads that there are kernels for."""
    layout = dataclasses.replace(EAGLE3, head_dim=64)
    return build_pair(tmp_path_factory.mktemp("halves"), layout, dtype="fp16", head_dim=64)


@pytest.fixture(scope="module")
def lowered(pair, tmp_path_factory) -> dict[str, Lowered]:
    return {codes: Lowered(pair, tmp_path_factory.mktemp(codes), codes=codes) for codes in CODES}


ANSWERS = 4


@pytest.fixture(scope="module")
def of_several(pair, tmp_path_factory) -> Lowered:
    return Lowered(pair, tmp_path_factory.mktemp("several"), codes="int8", answers=ANSWERS)


@pytest.fixture
def together(of_several, monkeypatch) -> FakeDevice:
    """Replace the pair's engines by engines with a larger batch size on this GPU."""
    device = FakeDevice()
    of_several.replace_engines(monkeypatch, device)
    return device


def answer(llm: LLM, sampling: SamplingParams, *, speculative: bool) -> list[int]:
    found = llm.generate(PROMPT, sampling=sampling, max_generate_length=30, speculative=speculative)
    for _ in found:
        pass
    return found.token_ids


@pytest.mark.each_change("fp8")
@pytest.mark.parametrize("codes", ["fp16", "fp8"])
def test_speculative_outputs_equal_plain_decoding(pair, lowered, monkeypatch, codes):
    device = FakeDevice()
    lowered[codes].replace_engines(monkeypatch, device)
    llm = LLM(pair.engine, spec=SpecOptions(top_k=5, steps=3, verify_size=20, tree="fixed"))
    for sampling in (GREEDY, SAMPLED):
        plain = answer(llm, sampling, speculative=False)
        assert len(plain) > 20
        assert answer(llm, sampling, speculative=True) == plain
    assert device.launches > 40 > device.captures > 4


# Of the mean error of logits, up to 6.5, of eight random layers; the CPU's cache is not rounded.
@pytest.mark.parametrize(("codes", "tolerance"), [("fp16", 0.01), ("int8", 0.1), ("fp8", 0.3)])
def test_logits_equal_the_cpu(pair, lowered, codes, tolerance):
    reference = open_decoder(pair.engine, load_engine(pair.engine, LLM_ENGINE))
    session = lowered[codes].open(FakeDevice())
    write = 0
    for rows in (np.arange(20, 31), np.array([40]), np.array([42, 43, 44])):
        outputs = np.arange(len(rows))
        expected, found = (each.run(rows, write, outputs) for each in (reference, session))
        assert np.abs(found.logits - expected.logits).mean() < tolerance
        write += len(rows)


@pytest.mark.nightly
def test_a_windowed_draft_equals_the_cpu(pair, tmp_path):
    """A text beyond the window, and two levels of a tree after it."""
    layout = dataclasses.replace(WINDOW, head_dim=64)
    windowed = with_eagle(pair, tmp_path / "windowed", layout, "fp16")
    lowered, folder = Lowered(windowed, tmp_path, codes="fp16"), windowed.engine / "draft"
    cpu = open_draft(folder, load_engine(folder, DRAFT_ENGINE))
    gpu = lowered.open_draft(FakeDevice())
    taps = np.random.default_rng(1).standard_normal((23, 3 * 96), np.float32)
    hidden, mask = cpu.fuse(taps).copy(), tree_mask([-1, -1, 0, 0, 1])
    np.testing.assert_allclose(gpu.fuse(taps), hidden, atol=0.05)
    for rows, depth in ((slice(0, 15), 0), (slice(15, 17), 15), (slice(17, 20), 16)):
        ids, own = np.arange(20, 43)[rows], {}
        if depth:
            nodes = slice(rows.start - 15, rows.stop - 15)
            own["position_ids"] = np.full(len(ids), depth)
            own["tree_mask"] = mask[nodes, : nodes.stop]
        expected, found = (
            each.run(ids, hidden[rows], rows.start, np.arange(len(ids)), top_k=40, **own)
            for each in (cpu, gpu)
        )
        own_order, order = (each.token_ids.argsort(1) for each in (expected, found))
        np.testing.assert_allclose(
            np.take_along_axis(found.log_probs, order, 1),
            np.take_along_axis(expected.log_probs, own_order, 1),
            atol=0.05,
        )


@pytest.mark.parametrize("codes", ["fp16", "int8"])
def test_reused_kv_cache_equals_a_fresh_prompt(lowered, codes):
    device = FakeDevice()
    session, fresh = lowered[codes].open(device), lowered[codes].open(device)
    prompt, ids = np.arange(10, 20), np.array([30, 31, 32, 33, 34, 35])
    mask, depths = np.eye(6, dtype=np.bool_), np.zeros(6, np.int64)
    for at, parent in enumerate((0, 0, 1, 1, 3), 1):
        mask[at] |= mask[parent]
        depths[at] = depths[parent] + 1
    session.run(prompt, 0, np.zeros(1, np.int64))
    session.run(ids, 10, np.arange(6), position_ids=10 + depths, tree_mask=mask)
    path = np.array([0, 1, 4])
    session.kv.compact(10, path)
    fresh.run(np.concatenate([prompt, ids[path]]), 0, np.zeros(1, np.int64))
    rows, expected = session.kv.read(13), fresh.kv.read(13)
    assert rows.shape[-1] == (64 if codes == "fp16" else 66)
    if codes == "fp16":
        np.testing.assert_allclose(rows, expected, atol=1e-2)
    fresh.run(np.arange(50, 60), 0, np.zeros(1, np.int64))
    fresh.kv.write(rows)
    np.testing.assert_array_equal(fresh.kv.read(13), rows)
    next_one = np.array([70]), 13, np.zeros(1, np.int64)
    np.testing.assert_array_equal(fresh.run(*next_one).logits, session.run(*next_one).logits)


def test_capacity_is_independent_of_the_engine(lowered):
    """A shorter cache than the engine was built for, and less memory."""
    one = lowered["fp16"]
    devices = FakeDevice(), FakeDevice()
    whole = one.open(devices[0])
    one = dataclasses.replace(one.manifest, max_kv_cache_capacity=CAPACITY // 2)
    runners = lowered["fp16"].runners(one, devices[1])
    assert runners["decoder"].kv_pool.block_size == CAPACITY // 2
    kv = one.decoder.kv.bytes_per_token * CAPACITY // 2
    assert devices[1].free_bytes() - devices[0].free_bytes() == kv
    assert whole.capacity == CAPACITY


def test_an_engine_of_another_cache_is_rejected(lowered):
    manifest = lowered["fp16"].manifest
    for kv in (
        dataclasses.replace(manifest.decoder.kv, num_layers=3),
        with_kv_dtype(manifest.decoder, "float32").kv,
    ):
        spec = dataclasses.replace(manifest.decoder, kv=kv)
        other = dataclasses.replace(manifest, spec=spec)
        with pytest.raises(BrokenArtifactError, match="table of caches has 34 entries") as caught:
            lowered["fp16"].runners(other, FakeDevice())
        assert "build the engine again" in caught.value.hint


@pytest.mark.parametrize("codes", CODES)
def test_bytes_of_a_token(lowered, codes):
    kv = lowered[codes].manifest.decoder.kv
    row = 64 * 2 if codes == "fp16" else 64 + 2
    assert kv.bytes_per_token == 2 * kv.num_layers * kv.num_kv_heads * row


# ---------------------------------------------------------------- batches
ASKS = [f"w{20 + at} w21 w22 w23 w{40 - at} w21 w22" for at in range(ANSWERS + 1)]


def test_batched_tokens_are_one_pass_and_one_wait(pair, together, monkeypatch):
    """CUDA graphs are captured when the engine is loaded, not during a request."""
    llm = LLM(pair.engine)
    ask = {"sampling": GREEDY, "max_generate_length": 9}
    llm.generate_batch(ASKS[:ANSWERS], **ask)
    costs, run = [], llm.base.run_batch
    names = ("waits", "launches", "passes", "captures", "contexts", "allocations", "kernels")

    def counted(parts):
        before = {name: getattr(together, name) for name in (*names, "bytes_down", "bytes_up")}
        found = run(parts)
        costs.append((len(parts), {key: getattr(together, key) - before[key] for key in before}))
        return found

    monkeypatch.setattr(llm.base, "run_batch", counted)
    llm.generate_batch(ASKS[:ANSWERS], **ask)
    whole = [cost for answers, cost in costs if answers == ANSWERS and cost["launches"]]
    assert len(whole) > 6
    for cost in whole:
        assert [cost[name] for name in names] == [1, 1, 1, 0, 0, 0, 0]
        assert cost["bytes_down"] <= 16 * ANSWERS
        assert cost["bytes_up"] <= 4096


@pytest.fixture
def steps(together, monkeypatch) -> list[tuple[int, Counter[str]]]:
    """Count the drafting requests of each step, and its cost."""
    found, names = [], ("waits", "launches", "passes", "captures", "contexts", "allocations")

    def counted(slot, sequences):
        sequences = list(sequences)
        drafting = sum(not one.is_prefilling and one.left > 1 for one in sequences)
        before = {name: getattr(together, name) for name in names}
        result = step(slot, sequences)
        costs = Counter({name: getattr(together, name) - before[name] for name in names})
        found.append((drafting if drafting == len(sequences) else 0, costs))
        return result

    monkeypatch.setattr(running_batch, "step", counted)
    for gives_up in ("book", "rest"):  # drafts of random weights do not pay
        monkeypatch.setattr(SpecCredit, gives_up, lambda *_: None)
    return found


@pytest.mark.each_change("by cost")
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        (SpecOptions(top_k=3, steps=3, verify_size=20), 1),
        (SpecOptions(top_k=3, steps=2, verify_size=60, tree="fixed"), 2),  # 128 tokens share a pass
    ],
    ids=["by cost", "too large"],
)
def test_batched_round_waits_once(pair, steps, options, waits):
    llm = LLM(pair.engine, spec=options)
    each = {"max_generate_length": 9}
    asked = [(ASKS[at], (GREEDY, SAMPLED)[at % 2]) for at in range(ANSWERS)]
    alone = [llm.generate(prompt, sampling=how, speculative=False, **each) for prompt, how in asked]
    for one in alone:
        list(one)
    prompts, sampling = zip(*asked, strict=True)
    found = llm.generate_batch(prompts, sampling=sampling, **each)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    # The first step prefills prompts.
    _, *whole = [costs for drafting, costs in steps if drafting == ANSWERS]
    assert len(whole) > 3
    for costs in whole:
        assert costs["waits"] == waits
        assert costs["launches"] == costs["passes"] <= 2 + waits * (options.steps or 0)
        assert costs["captures"] == costs["contexts"] == costs["allocations"] == 0


@pytest.mark.each_change("take_round")
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("name", ["ask", "finish", "take_round"])
def test_a_request_that_fails_in_a_device_round_fails_alone(pair, monkeypatch, name):
    """A failed round is repeated for each request alone."""
    llm = LLM(pair.engine, spec=SpecOptions(top_k=3, steps=3, verify_size=20, tree="fixed"))
    each = {"max_generate_length": 5}
    asked = [(ASKS[at], (GREEDY, SAMPLED)[at % 2]) for at in range(ANSWERS)]
    prompts, sampling = zip(*asked, strict=True)
    alone = llm.generate_batch(prompts, sampling=sampling, **each)
    answers = [llm.generate(prompt, sampling=how, **each) for prompt, how in asked]
    victim, hits = answers[1]._entry.sequence, []

    def fails(*_, **__):
        hits.append(name)
        raise ValueError("boom")

    if name in ("ask", "finish"):
        run = getattr(DeviceRounds, name)

        def watched(self, *given):
            parts = given[0] if given else self._asked
            if any(part.kvs[0] is victim.kv for part in parts):
                fails()
            return run(self, *given)

        monkeypatch.setattr(DeviceRounds, name, watched)
    else:
        setattr(victim.drafter, name, fails)
    for _ in llm.together(answers):
        pass
    assert hits
    assert str(answers[1].failure) == "ValueError: boom"
    others = [at for at in range(ANSWERS) if at != 1]
    assert [answers[at].token_ids for at in others] == [alone[at].token_ids for at in others]


@pytest.mark.nightly
@pytest.mark.usefixtures("steps")
def test_requests_with_different_sampling_share_rounds(pair, of_several, monkeypatch, tmp_path):
    """Some of them need the host in every round, some at its end; others come and go meanwhile."""
    engine = shutil.copytree(pair.engine, tmp_path / "engine")
    for path in engine.rglob("manifest.json"):
        write_manifest(path.parent, {**read_manifest(path.parent), "max_kv_cache_capacity": 40})
    for name, rows in (("manifest", {"prefill_rows": 20}), ("draft_manifest", {})):
        short = dataclasses.replace(getattr(of_several, name), max_kv_cache_capacity=40, **rows)
        monkeypatch.setattr(of_several, name, short)
    asked = [  # sampling, tokens, and how often the prompt is repeated
        (GREEDY, 30, 1),  # to the end of the cache
        (dataclasses.replace(SAMPLED, seed=5), 14, 1),
        (dataclasses.replace(GREEDY, repetition_penalty=1.3), 9, 2),
        (
            SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=42),
            8,
            1,
        ),  # more than the device picks
        (dataclasses.replace(SAMPLED, num_logprobs=2), 3, 3),
        (GREEDY, 2, 1),
        (dataclasses.replace(SAMPLED, temperature=0.7, seed=9), 11, 4),
    ]
    llm = LLM(engine, spec=SpecOptions(top_k=3, steps=3, verify_size=12))

    def answers(*, speculative: bool) -> list[RequestOutput]:
        found = []
        for at, (how, length, times) in enumerate(asked):
            prompt = " ".join([ASKS[at % len(ASKS)]] * times)
            options = {"max_generate_length": length, "speculative": speculative}
            found.append(llm.generate(prompt, sampling=how, **options))
        return found

    alone, found = answers(speculative=False), answers(speculative=True)
    rounds, kept, keep = [], [], RequestedResult.keep
    for one in alone:
        list(one)
    ask = TensorRtRounds.ask
    monkeypatch.setattr(
        TensorRtRounds, "ask", lambda self, orders: rounds.append(orders) or ask(self, orders)
    )
    monkeypatch.setattr(RequestedResult, "keep", lambda self: kept.append(self) or keep(self))
    for _ in llm.together(found):
        pass
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    together = [{order.accepts for order in orders} for orders in rounds]
    assert {"greedy", "sampled", "host"} in together
    assert {len(orders) for orders in rounds} >= {2, 3, 4}
    shapes = [{(order.levels, order.nodes) for order in orders} for orders in rounds]
    assert max(map(len, shapes)) > 1
    assert kept  # candidates of a finished draft pass, while another draft prefills a long prompt


def test_rounds_take_as_many_as_share_the_passes_of_the_largest_tree():
    rounds = DeviceRounds(
        base=mock.Mock(),
        draft=mock.Mock(),
        growth=mock.Mock(),
        rounds=mock.Mock(maximum=lambda nodes: 128 // nodes),
    )
    sizes = [mock.Mock(size=Size(2, nodes)) for nodes in (8, 16, 32, 60, 8)]
    assert [rounds.maximum(sizes[at:]) for at in range(5)] == [3, 2, 2, 2, 1]


def test_base_with_batch_size_one_and_batched_draft(lowered, of_several):
    device = FakeDevice()
    base = lowered["int8"].runners(lowered["int8"].manifest, device)[DECODER]
    draft = of_several.runners(of_several.draft_manifest, device)[DRAFT]
    assert isinstance(base, TensorRtRunner)
    assert base.open_rounds(draft, Growth(top_k=1, widths=(), nodes=(2,), scored="draft")) is None
