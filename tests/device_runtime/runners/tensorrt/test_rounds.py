"""GPU and host work of a token and of a round; outputs equal the CPU's."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
from fake_gpu import FakeContext, FakeDevice
from lowered_engines import Lowered

from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.runners.tensorrt.device_tensors import RowMemory
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.acceptance import Typical
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.spec_budget import SpecCredit

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "w83 w64 w53 w32 w35 w12 w15"  # its outputs are long
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, top_k=20, top_p=0.95, min_p=0.01, seed=42)
WHOLE = SamplingParams(
    temperature=1.5, top_k=0, top_p=1.0, seed=42
)  # more tokens than the device picks
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 1, 2))
SHAPES = {
    "large": SpecOptions(top_k=5, steps=4, verify_size=20, tree="fixed"),
    "a chain": SpecOptions(top_k=1, steps=4, verify_size=5, tree="fixed"),
    "one level": SpecOptions(top_k=8, steps=1, verify_size=9, tree="fixed"),
    "deep": SpecOptions(top_k=3, steps=8, verify_size=33, tree="fixed"),
    "wide": SpecOptions(top_k=15, steps=3, verify_size=60, tree="fixed"),
    "more nodes than candidates": SpecOptions(top_k=2, steps=2, verify_size=20, tree="fixed"),
    "by cost": SpecOptions(top_k=5, steps=4, verify_size=20),
    "static": SpecOptions(choices=CHOICES),
}


@pytest.fixture(scope="module")
def lowered(eagle_pair, tmp_path_factory) -> Lowered:
    return Lowered(eagle_pair, tmp_path_factory.mktemp("lowered"))


@pytest.fixture(autouse=True)
def rich(monkeypatch):
    """Drafting by cost never pauses: drafts of random weights do not pay."""
    monkeypatch.setattr(SpecCredit, "book", lambda *_: None)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def load(eagle_pair, lowered, device, monkeypatch):
    """An `LLM` whose engines run on the fake GPU."""
    lowered.replace_engines(monkeypatch, device)
    return functools.partial(LLM, eagle_pair.engine)


@pytest.fixture(scope="module")
def expected(eagle_pair):
    """Outputs of the CPU, by sampling."""
    llm = LLM(eagle_pair.engine)
    return functools.cache(lambda sampling: _answer(llm, sampling))


def _answer(llm: LLM, sampling: SamplingParams, *, speculative: bool = True) -> list[int]:
    answer = llm.generate(
        PROMPT, sampling=sampling, max_generate_length=40, speculative=speculative
    )
    for _ in answer:
        pass
    return answer.token_ids


COUNTED = (
    "waits", "bytes_up", "bytes_down", "launches", "kernels", "passes", "captures", "contexts",
    "allocations",
)  # fmt: skip


def _costs(
    llm: LLM, device: FakeDevice, sampling: SamplingParams = GREEDY, *, speculative: bool
) -> list[dict[str, int]]:
    """Costs of the steps after the prompt, of a second request."""
    _answer(llm, sampling, speculative=speculative)
    found, before = [], None
    answer = llm.generate(
        PROMPT, sampling=sampling, max_generate_length=40, speculative=speculative
    )
    for _ in answer:
        now = {name: getattr(device, name) for name in COUNTED}
        if before is not None:
            found.append({name: now[name] - before[name] for name in COUNTED})
        before = now
    return [step for step in found if step["passes"]]


def test_a_plain_step_waits_once(load, device):
    costs = _costs(load(), device, speculative=False)
    assert len(costs) > 30
    for step in costs:
        assert (step["waits"], step["launches"], step["passes"]) == (1, 1, 1)
        assert step["bytes_down"] <= 64
        assert (step["captures"], step["contexts"], step["allocations"]) == (0, 0, 0)


@pytest.mark.each_change("by cost-greedy", "one level-sampled", "a chain-greedy")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_a_round_waits_once(load, device, monkeypatch, expected, options, sampling):
    """For all tree shapes; hidden states stay on the device, and no graph is captured meanwhile."""
    monkeypatch.setattr(RowMemory, "fetch", lambda *_: pytest.fail("features came to the host"))
    llm = load(spec=options)
    made = device.captures, device.contexts
    costs = _costs(llm, device, sampling, speculative=True)
    assert (device.captures, device.contexts) == made
    assert _answer(llm, sampling) == expected(sampling)
    rounds = [step for step in costs if step["passes"] > 1]  # not while drafting pauses
    assert len(rounds) > 5
    if options.tree == "cost" and not options.choices:
        # After a pause of at least 32 tokens the draft prefills the prompt and the rest separately.
        rounds.remove(max(rounds, key=lambda step: step["waits"]))
    for step in rounds:
        assert step["waits"] == 1
        assert step["bytes_down"] <= 4096
        assert step["bytes_up"] <= 4096
        assert step["launches"] == step["passes"]
        assert step["kernels"] <= 9
        assert step["allocations"] == 0


FALLING_BACK = {
    "more tokens than are picked": WHOLE,
    "a penalty": SamplingParams(temperature=0.0, repetition_penalty=1.3),
    "an end that may not come yet": SamplingParams(temperature=0.0, min_tokens=5),
}


@pytest.mark.each_change("a penalty")
@pytest.mark.parametrize("sampling", FALLING_BACK.values(), ids=FALLING_BACK)
def test_the_host_accepts_requests_that_need_all_logits(load, device, expected, sampling):
    """The tree is still expanded on the device."""
    llm = load(spec=SHAPES["large"])
    costs = _costs(llm, device, sampling, speculative=True)
    assert _answer(llm, sampling) == expected(sampling)
    for step in costs:
        assert step["passes"] <= 6
        assert step["waits"] <= 4  # for the round, the picks and the logits
        assert step["launches"] == step["passes"]


def test_typical_acceptance_of_greedy_requests_is_exact(load, expected):
    options = SpecOptions(top_k=5, steps=4, verify_size=20, tree="fixed", typical=Typical(0.3))
    llm = load(spec=options)
    assert _answer(llm, GREEDY) == expected(GREEDY)
    sampled = _answer(llm, SAMPLED)
    assert len(sampled) == 40  # by the host, from the device's trees


def test_logprobs_are_recorded(load, expected):
    sampling = SamplingParams(temperature=0.0, num_logprobs=2)
    llm = load(spec=SHAPES["large"])
    answer = llm.generate(PROMPT, sampling=sampling, max_generate_length=12)
    steps = list(answer)
    assert answer.token_ids == expected(GREEDY)[:12]
    assert sum(len(step.logprobs) for step in steps) == 12


def test_a_gpu_without_kernels_runs_rounds_with_the_host(
    eagle_pair, lowered, monkeypatch, caplog, expected
):
    device = FakeDevice(sm=86)
    lowered.replace_engines(monkeypatch, device)
    monkeypatch.setattr(device, "launch", _refusing)
    with caplog.at_level(logging.WARNING):
        llm = LLM(eagle_pair.engine, spec=SHAPES["large"])
    assert [record.getMessage() for record in caplog.records] == [
        "no kernels were compiled for it; rounds of a tree wait for the host, which is slower"
    ]
    assert _answer(llm, GREEDY) == expected(GREEDY)


def _refusing(*_: object) -> None:
    raise EdgeLLMError("no kernels were compiled for it")


def test_trees_beyond_the_kernels(load, caplog, monkeypatch, expected):
    monkeypatch.setattr(catalog, "LEVELS", (16,))
    with caplog.at_level(logging.WARNING):
        llm = load(spec=SHAPES["large"])
    assert "trees of 25 candidates of a level exceed the 16 of edgellm's kernels" in caplog.text
    assert _answer(llm, GREEDY) == expected(GREEDY)


def test_a_draft_on_another_gpu(eagle_pair, lowered, device, monkeypatch, expected):
    lowered.replace_engines(monkeypatch, device, FakeDevice())
    llm = LLM(eagle_pair.engine, spec=SHAPES["large"])
    assert _answer(llm, GREEDY) == expected(GREEDY)


def test_nan_logits_fail_the_request(load, device, monkeypatch):
    """The device stops there; the host raises the error, as it does without a draft."""
    answer = load(spec=SHAPES["large"]).generate(PROMPT, sampling=GREEDY, max_generate_length=40)
    steps, compute = iter(answer), FakeContext._compute
    next(steps)

    def broken(self, shapes, addresses) -> None:
        compute(self, shapes, addresses)
        if graph_io.TOP_LOGITS in addresses:
            device.at(addresses[graph_io.TOP_LOGITS], 4).view(np.float32)[0] = np.nan

    monkeypatch.setattr(FakeContext, "_compute", broken)
    with pytest.raises(EdgeLLMError, match="the engine computed nan"):
        list(steps)


def test_consecutive_requests(load, expected):
    """Two requests share both caches; rounds after a change use the new request's positions."""
    llm = load(spec=SHAPES["large"])
    answers = [
        llm.generate(PROMPT, sampling=sampling, max_generate_length=40)
        for sampling in (GREEDY, SAMPLED)
    ]
    running = [iter(answer) for answer in answers]
    while running:
        running = [each for each in running if next(each, None) is not None]
    assert [answer.token_ids for answer in answers] == [expected(GREEDY), expected(SAMPLED)]


@pytest.mark.each_change("version1")
@pytest.mark.parametrize("version", [(10, 3), (10, 16)])
def test_engines_that_output_new_keys_and_values(
    eagle_pair, device, tmp_path, monkeypatch, expected, version
):
    Lowered(eagle_pair, tmp_path, version).replace_engines(monkeypatch, device)
    llm = LLM(eagle_pair.engine, spec=SHAPES["large"])
    for sampling in (GREEDY, SAMPLED):
        assert _answer(llm, sampling) == expected(sampling)
