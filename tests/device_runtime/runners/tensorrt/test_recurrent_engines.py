"""Recurrent layers on the fake GPU.

Edgellm's kernels know states by address; for TensorRT-RTX's operators they are tensors.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from eagle_engines import build_mtp
from fake_gpu import FakeDevice
from lowered_engines import Lowered, LoweredModel, open_with

from edgellm.build.plan import Plan
from edgellm.build.tensorrt.profiles import in_chunks, passes_of
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.graph_io import STATE, STATE_ROWS, STATE_TABLE
from edgellm.core.graph_roles import DECODER
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks import sequence_kv
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.device_runtime.runners.tensorrt import state_memory
from edgellm.export import models

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0)
LOOKUPS = SpecOptions(network=None, lookups=("suffix", "ngram"), tree="fixed", verify_size=8)
CAPACITY = 96
PLAN = Plan(max_input_len=48, kv_capacity=CAPACITY, threads=1, max_verify_tree_size=12)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def ask(model: LLM, prompt: str, length: int = 12):
    answer = model.generate(prompt, max_generate_length=length, sampling=GREEDY)
    list(answer)
    return answer


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5_text",
        "qwen3_5_text by operators",
        *(
            pytest.param(f"{name}{how}", marks=pytest.mark.nightly)
            for name in ("lfm2", "lfm3", "bamba", "falcon_h1")
            for how in ("", " by operators")
        ),
    ],
)
def hybrid(request, tmp_path_factory) -> LoweredModel:
    name, _, how = request.param.partition(" by ")
    folder = tmp_path_factory.mktemp(f"{name}-{how}")
    checkpoint = make_checkpoint(folder / "checkpoint", **models.find(name).TINY)
    return LoweredModel(checkpoint, folder, PLAN, codes="" if how else "fp16")


@pytest.fixture
def on_gpu(hybrid, monkeypatch) -> FakeDevice:
    """The hybrid's engine runs on this GPU, in short chunks."""
    device = FakeDevice()
    open_with(monkeypatch, lambda *_: hybrid.runners(device))
    monkeypatch.setattr(sequence_kv, "CHECKPOINT_ROWS", 16)
    return device


TREE = np.array([-1, 0, 0, 1, 1, 3, 2])


def tree_inputs(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mask and depths."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask, mask.sum(1) - 1


def test_states_are_a_table_or_tensors(hybrid):
    graph, spec = ir.load(hybrid.graph).graph, hybrid.manifest.decoder.recurrent
    names = {str(value.name) for values in (graph.inputs, graph.outputs) for value in values}
    states = {name for name in names if name.startswith((STATE, STATE_ROWS))}
    assert states == (set() if STATE_TABLE in names else {*spec.states, *spec.rows})
    assert (STATE_TABLE in names) == hybrid.has_kernels


def compare(sessions: tuple[DecoderNetwork, ...], ids: np.ndarray, write: int, **tree) -> None:
    """Run a pass on each of two, and compare logits."""
    rows = len(ids)
    outputs = np.arange(rows) if rows <= 12 else np.array([rows - 1])
    found, expected = (each.run(ids, write, outputs, **tree).logits.copy() for each in sessions)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_passes_equal_the_cpu_engine(hybrid):
    """Chunks, one token, a tree, and a token after each of its paths."""
    random, cpu = np.random.default_rng(0), open_decoder(hybrid.engine, hybrid.manifest_of_cpu)
    ids = random.integers(9, 90, 60)
    for path in ([0], [0, 2, 6], [0, 1, 3, 5]):
        sessions, write = (hybrid.open(FakeDevice()), cpu), 0

        for rows in (19, 7, 1):
            compare(sessions, ids[write : write + rows], write)
            write += rows
        mask, depths = tree_inputs(TREE)
        nodes = ids[write : write + len(TREE)]
        compare(sessions, nodes, write, position_ids=write + depths, tree_mask=mask)
        for each in sessions:
            each.kv.compact(write, np.array(path))
        write += len(path)
        for rows in (1, 3):
            compare(sessions, ids[40 : 40 + rows], write)
            write += rows


def test_outputs_equal_the_cpu_engine(hybrid, on_gpu, monkeypatch):
    prompts = [words(20, 21, 22, 20, 21, 22, 20), words(*range(30, 70)), words(40)]
    model = LLM(hybrid.engine)
    found = [ask(model, prompt).token_ids for prompt in prompts]
    assert on_gpu.captures
    monkeypatch.undo()
    cpu = LLM(hybrid.engine)
    assert found == [ask(cpu, prompt).token_ids for prompt in prompts]


@pytest.mark.usefixtures("on_gpu")
def test_speculative_outputs_equal_plain_ones(hybrid):
    plain, model = LLM(hybrid.engine), LLM(hybrid.engine, spec=LOOKUPS)
    rounds = []
    for prompt in (words(20, 21, 22, 20, 21, 22, 20), words(*range(30, 50)), words(40, 40, 40)):
        for length in (5, 30):
            answer = ask(model, prompt, length)
            assert answer.token_ids == ask(plain, prompt, length).token_ids
            rounds += answer.profile.rounds
    assert any(one.tree_size > 1 for one in rounds)


@pytest.mark.usefixtures("on_gpu")
def test_prompts_continue_from_their_states(hybrid):
    """A second turn, checkpoints of a long prompt, and conversations that alternate."""
    model, plain = LLM(hybrid.engine, spec=LOOKUPS, context_reuse=True), LLM(hybrid.engine)
    text, known = words(20, 21, 22), 0
    for turn in range(3):
        answer = ask(model, text, 6)
        assert answer.token_ids == ask(plain, text, 6).token_ids
        assert answer.timings()["reused_tokens"] == known
        known = answer.prompt_token_count + len(answer.token_ids) - 1
        text = f"{text} {answer.text} {words(60 + turn, 61)}"
    prompt = [*range(20, 60)]
    ask(model, words(*prompt))
    for changed, reused in (([*prompt[:37], 70], 32), ([*prompt[:20], 70, 71], 16)):
        answer = ask(model, words(*changed))
        assert answer.timings()["reused_tokens"] == reused
        assert answer.token_ids == ask(plain, words(*changed)).token_ids
    prompts = words(20, 21, 20, 21), words(50, 51)
    answers = [model.generate(each, max_generate_length=8, sampling=GREEDY) for each in prompts]
    for _ in model.together(answers, 2):
        pass
    for one, expected in zip(answers, prompts, strict=True):
        assert one.token_ids == ask(plain, expected, 8).token_ids


def test_states_are_read_and_written(hybrid):
    """As for pinned prefixes, in float32 and in the shapes of the spec."""
    device = FakeDevice()
    one, other = hybrid.open(device), hybrid.open(device)
    ids, last = np.arange(20, 40), np.array([0])
    one.run(ids, 0, last)
    pinned = one.kv.pin([*ids.tolist(), 0])
    spec = hybrid.manifest.decoder.recurrent
    assert [each.shape for each in pinned.states] == [*map(tuple, spec.states.values())]
    assert all(each.dtype == np.float32 and each.any() for each in pinned.states)
    other.kv.restore(pinned, 20, ids.tolist())
    other.kv.begin(22, 20)
    following = np.array([50, 51]), 20, np.arange(2)
    np.testing.assert_array_equal(other.run(*following).logits, one.run(*following).logits)


def test_a_token_costs_two_launches_and_no_wait(hybrid, on_gpu, monkeypatch):
    """A commit is a launch for each kind of state; nothing is uploaded for it."""
    model, costs = LLM(hybrid.engine), []
    run = model.base.run_batch

    def counted(parts):
        before = on_gpu.waits, on_gpu.kernels, on_gpu.launches, on_gpu.allocations
        found = run(parts)
        after = on_gpu.waits, on_gpu.kernels, on_gpu.launches, on_gpu.allocations
        costs.append(tuple(b - a for a, b in zip(before, after, strict=True)))
        return found

    monkeypatch.setattr(model.base, "run_batch", counted)
    ask(model, words(20, 21, 22), 8)
    kinds = len({name.split(".")[2] for name in hybrid.manifest.decoder.recurrent.states})
    assert costs[2:] == [(1, kinds, 1, 0)] * len(costs[2:])
    assert len(costs) > 3


@pytest.mark.nightly
def test_an_mtp_draft_gives_the_tokens_of_plain_decoding(tmp_path, monkeypatch):
    """The host commits, so it runs the rounds; hidden states stay on the device."""
    pair, device = build_mtp(tmp_path, dtype="fp16"), FakeDevice()
    Lowered(pair, tmp_path, codes="fp16").replace_engines(monkeypatch, device)
    options = SpecOptions(top_k=3, steps=3, verify_size=12, tree="fixed")
    model, plain = LLM(pair.engine, spec=options), LLM(pair.engine)
    assert model.base.open_rounds(model.base._runner, None) is None  # type: ignore[arg-type]
    answer = ask(model, words(20, 21, 22, 20, 21), 20)
    assert answer.token_ids == ask(plain, words(20, 21, 22, 20, 21), 20).token_ids
    assert any(one.tree_size > 1 for one in answer.profile.rounds)


def test_an_engine_of_other_states_is_rejected(hybrid):
    recurrent = hybrid.manifest.decoder.recurrent
    fewer = dataclasses.replace(recurrent, states=dict([*recurrent.states.items()][1:]))
    spec = dataclasses.replace(hybrid.manifest.decoder, recurrent=fewer)
    message = (
        r"table of states has \d+ entries" if hybrid.has_kernels else "engine has other states"
    )
    with pytest.raises(BrokenArtifactError, match=message) as caught:
        hybrid.runners(FakeDevice(), dataclasses.replace(hybrid.manifest, spec=spec))
    assert "build the engine again" in caught.value.hint


def test_prompts_of_linear_attention_have_chunks(hybrid):
    bundle = load_bundle(hybrid.bundle, LLM_BUNDLE)
    long = dataclasses.replace(PLAN, max_input_len=3000)
    has_matrices = any("matrix" in name for name in bundle.decoder.recurrent.states)
    rows = 256 if has_matrices else 3000
    assert in_chunks(bundle, long).max_input_len == rows
    assert passes_of(DECODER, bundle, long)[-1].max_rows == rows
    small, large = (
        state_memory.StateLayout.of(bundle.decoder.recurrent, each).num_bytes for each in (12, 256)
    )
    assert large > small
