"""What a token, and a round of a tree, asks of a GPU and of its host; answers are the CPU's."""

from __future__ import annotations

import functools

import pytest
from fake_gpu import FakeDevice
from lowered_engines import Lowered

from edgellm.device_runtime.engine.llm import LLM
from edgellm.device_runtime.runners.tensorrt.device_rows import RowMemory
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "w83 w64 w53 w32 w35 w12 w15"  # its answers are long
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, top_k=20, top_p=0.95, min_p=0.01)
WHOLE = SamplingParams(temperature=1.5, top_k=0, top_p=1.0)  # more tokens than the device picks
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
    """Answers of the CPU, by sampling."""
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
    """What each step behind the prompt costs, of a second answer."""
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


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_a_round_waits_once(load, device, monkeypatch, expected, options, sampling):
    """Whatever the tree's shape; no feature comes to the host, nothing is made in an answer."""
    monkeypatch.setattr(RowMemory, "fetch", lambda *_: pytest.fail("features came to the host"))
    llm = load(spec=options)
    made = device.captures, device.contexts
    costs = _costs(llm, device, sampling, speculative=True)
    assert (device.captures, device.contexts) == made
    assert _answer(llm, sampling) == expected(sampling)
    rounds = [step for step in costs if step["passes"] > 1]  # not while drafting pauses
    assert len(rounds) > 5
    if options.tree == "cost" and not options.choices:
        # Behind a pause, of 32 tokens and more, the draft reads the prompt and the rest apart.
        rounds.remove(max(rounds, key=lambda step: step["waits"]))
    for step in rounds:
        assert step["waits"] == 1
        assert step["bytes_down"] <= 4096
        assert step["bytes_up"] <= 4096
        assert step["launches"] == step["passes"]
        assert step["kernels"] <= 9
        assert step["allocations"] == 0
