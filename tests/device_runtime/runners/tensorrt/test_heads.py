"""Medusa heads on the fake GPU: candidates and outputs equal the CPU's."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from fake_gpu import FakeDevice
from lowered_engines import CANDIDATES, Lowered
from manifests import read_manifest, write_manifest

from edgellm.core.errors import LimitError
from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, load_engine, load_manifest
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.heads import open_heads
from edgellm.device_runtime.speculate.policy.spec_budget import SpecCredit

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ("w83 w64 w53 w32 w35 w12 w15", "w10 w24 w79", "w20 w21")
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=3)
OPTIONS = (
    {"top_k": 5, "verify_size": 20, "tree": "fixed"},
    {"choices": ((0,), (0, 0), (1,), (0, 2), (0, 0, 0))},
    {"network": "medusa"},  # sized by costs
)


@pytest.fixture(scope="module")
def pair(eagle_pairs):
    return eagle_pairs("medusa")


@pytest.fixture(scope="module")
def lowered(pair, tmp_path_factory) -> Lowered:
    return Lowered(pair, tmp_path_factory.mktemp("lowered"))


@pytest.fixture(autouse=True)
def rich(monkeypatch):
    """Drafting by cost never pauses: drafts of random weights do not pay."""
    monkeypatch.setattr(SpecCredit, "book", lambda *_: None)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def _answers(llm: LLM, *, speculative: bool = True) -> tuple[list[list[int]], int]:
    """Tokens of all outputs, and nodes of the largest tree."""
    found, nodes = [], 0
    for prompt in PROMPTS:
        for sampling in (GREEDY, SAMPLED):
            answer = llm.generate(
                prompt, sampling=sampling, max_generate_length=30, speculative=speculative
            )
            for step in answer:
                if step.round is not None and step.round.tree is not None:
                    nodes = max(nodes, len(step.round.tree))
            found.append(answer.token_ids)
    return found, nodes


@pytest.mark.each_change("costs")
@pytest.mark.parametrize("options", OPTIONS, ids=["fixed", "choices", "costs"])
def test_outputs_equal_plain_decoding(pair, lowered, device, monkeypatch, options):
    expected, _ = _answers(LLM(pair.engine))
    assert sum(map(len, expected)) > 60
    lowered.replace_engines(monkeypatch, device)
    llm = LLM(pair.engine, spec=SpecOptions(**options))
    found, nodes = _answers(llm)
    assert found == expected
    assert nodes > 1 or "network" in options  # by costs, none may pay
    assert _answers(llm, speculative=False) == (expected, 0)


def test_candidates_are_those_of_onnxruntime(pair, lowered, device):
    manifest = load_engine(pair.engine / DRAFT_FOLDER, DRAFT_ENGINE)
    reference = open_heads(pair.engine / DRAFT_FOLDER, manifest)
    heads, random = lowered.open_heads(device), np.random.default_rng(4)
    for top_k in (1, 7, CANDIDATES, 3):
        feature = random.standard_normal(manifest.draft.base_hidden_size, np.float32)
        for found, expected in zip(
            heads.candidates(feature, top_k), reference.candidates(feature, top_k), strict=True
        ):
            assert found.shape == (3, top_k)
            np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (device.captures, device.launches) == (1, 3)  # recorded in its second run
    with pytest.raises(LimitError, match=r"TopK 41 exceeds the draft engine's 40 candidates"):
        heads.candidates(feature, CANDIDATES + 1)


def test_an_engine_with_too_few_candidates_is_refused_when_it_is_loaded(
    pair, lowered, device, monkeypatch, tmp_path
):
    engine = tmp_path / "engine"
    shutil.copytree(pair.engine, engine)
    content = read_manifest(engine / DRAFT_FOLDER)
    write_manifest(engine / DRAFT_FOLDER, {**content, "cost_ms": {}})  # as of TensorRT's engines
    lowered.replace_engines(monkeypatch, device)
    monkeypatch.setattr(
        "edgellm.core.manifest.load_manifest", load_manifest
    )  # it is found by measuring
    with pytest.raises(LimitError, match="exceeds the draft engine's 40 candidates") as caught:
        LLM(engine, spec=SpecOptions(top_k=41))
    assert "--maxDraftTreeSize" in caught.value.hint
