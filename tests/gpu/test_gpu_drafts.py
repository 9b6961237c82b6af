"""What only a GPU can show of recorded passes, drafts and clocks; see `test_gpu.py`."""

from __future__ import annotations

import argparse

import gpu
import numpy as np
import pytest
import reason_against
from eagle_engines import CAPACITY, INPUT, TREE
from harness.gpu.clock import measured_bandwidths

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.graph_roles import HEADS
from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, LLM_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.networks.draft import open_draft
from edgellm.device_runtime.networks.heads import open_heads
from edgellm.device_runtime.runners.tensorrt.cuda.driver import CudaDevice
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_capability() is None, reason="there is no NVIDIA GPU here"),
    reason_against.needs("tensorrt"),
]
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ("w83 w64 w53 w32 w35 w12 w15", "w10 w24 w79 w65 w88", "w56 w15 w35")


@pytest.fixture(scope="module", params=["eagle3", "medusa"])
def engines(request, eagle_pairs, tmp_path_factory):
    """A tiny float32 base with its draft, built for the CPU and for this GPU."""
    pair, engine = eagle_pairs(request.param), tmp_path_factory.mktemp("gpu") / "engine"
    sizes = {"max_verify_tree_size": TREE, "max_draft_tree_size": TREE}
    plan = Plan(max_input_len=INPUT, kv_capacity=CAPACITY, threads=0, prefill="auto", **sizes)
    build_engine("llm", pair.bundle, engine, plan, "tensorrt", lambda _: None)
    build_engine("draft", pair.draft_bundle, engine, plan, "tensorrt", lambda _: None)
    return pair.engine, engine


def _open(engine):
    manifest = load_engine(engine, LLM_ENGINE)
    return open_decoder(engine, manifest)


def _open_draft(engine):
    """Heads, or a draft with a cache."""
    manifest = load_engine(engine / DRAFT_FOLDER, DRAFT_ENGINE)
    open_it = open_heads if HEADS in manifest.graphs else open_draft
    return open_it(engine / DRAFT_FOLDER, manifest), manifest.draft


def test_a_pass_is_recorded_once_and_replayed(engines, monkeypatch):
    """Its fourth run gives what its first gave, which was not recorded."""
    recorded, replayed, capture = [], [], CudaDevice.capture

    def counted(device, enqueue):
        recorded.append(enqueue)
        replay = capture(device, enqueue)
        return lambda: (replayed.append(enqueue), replay())

    monkeypatch.setattr(CudaDevice, "capture", counted)
    session = _open(engines[1])
    session.run(np.arange(10, 40), 0, np.zeros(1, np.int64))
    found = [session.run(np.array([50]), 30, np.zeros(1, np.int64)).logits for _ in range(4)]
    assert (len(recorded), len(replayed)) == (1, 3)
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=1e-5)
    other = session.run(np.array([51]), 30, np.zeros(1, np.int64)).logits
    assert np.abs(other - found[0]).max() > 1e-3  # not the recorded pass's input


def test_candidates_are_those_of_the_cpu(engines):
    (cpu, spec), (device, _) = map(_open_draft, engines)
    random = np.random.default_rng(0)
    for rows in (9, 1, 1, 1):  # read at once; then at once, recorded, replayed
        taps = random.standard_normal((rows, len(spec.hidden_taps) * spec.base_hidden_size))
        taps, found = taps.astype(np.float32), []
        for one in (cpu, device):
            if spec.num_heads:
                found.append(one.candidates(taps[-1], 5))
                continue
            hidden, ids = one.fuse(taps), np.arange(20, 20 + rows)
            result = one.run(ids, hidden, 0, np.array([rows - 1]), top_k=5)
            found.append((result.token_ids.copy(), result.log_probs.copy()))
        np.testing.assert_array_equal(found[1][0], found[0][0])
        np.testing.assert_allclose(found[1][1], found[0][1], atol=2e-2)


@pytest.mark.parametrize("tree", ["fixed", "cost"])
def test_answers_are_lossless(engines, tree):
    llm = LLM(engines[1], spec=SpecOptions(top_k=5, steps=3, verify_size=20, tree=tree))
    for prompt in PROMPTS:
        answers = []
        for speculative in (False, True):
            answer = llm.generate(
                prompt, sampling=GREEDY, max_generate_length=40, speculative=speculative
            )
            for _ in answer:
                pass
            answers.append(answer.token_ids)
        assert answers[0] == answers[1]


def test_the_benchmark(engines):
    """Events of the GPU and clocks of the host agree; the oracle's answers are the plain ones."""
    rates = measured_bandwidths()
    assert 1 < rates["copy"] < 20_000
    options = argparse.Namespace(
        tokens=61, prompt=PROMPTS[0], repeats=1, bandwidth=max(rates.values()), top_k=4, steps=3,
        nodes=12,
    )  # fmt: skip
    figures = gpu.measure(engines[1], options)
    for name in ("plain", "drafted"):
        found = figures[name]
        kernels = found["kernels_ms"]
        assert 0 < kernels["base"] <= found["base_ms"]
        assert sum(kernels.values()) < found["wall_ms"]
    assert all(each["is_plain"] for each in figures["oracle"])
    assert 0 < figures["roofline"] < 1
