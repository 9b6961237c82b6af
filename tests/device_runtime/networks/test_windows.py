"""Window layers cache only their window: outputs equal those of a full cache.

So do the recent positions of an int4 cache.
"""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
from eagle_engines import export_pair
from eagle_reference import Layout
from manifests import read_manifest, write_manifest

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import LimitError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.core.model_spec import INT4, INT4_RECENT, cache_bytes
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.networks.decoder import SequencePart, open_decoder

WINDOW, CAPACITY, TOGETHER, PAGE, PASS = 40, 1024, 2, 64, 256
OWN = CpuOptions("edgellm")
PLAN = Plan(
    max_input_len=900,
    kv_capacity=CAPACITY,
    threads=2,
    max_verify_tree_size=12,
    max_batch_size=TOGETHER,
    options=OWN,
)


# Draft of a base with four layers, which reads the hidden states of the first three.
DRAFT = Layout(
    {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
    taps=(1, 2, 3),
)

DRAFTED = SpecOptions(tree="fixed", steps=3, top_k=2, verify_size=8)


# Numbers of layers with and without a window, with their own KV cache; Gemma 4 shares two more.
LAYERS = {"gemma3_text": (4, 3, 1), "gemma4_text": (6, 3, 1)}


@pytest.fixture(scope="module", params=[*LAYERS, INT4])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    if model == INT4:
        sizes = {"max_position_embeddings": CAPACITY, "num_hidden_layers": 4}
        return export_pair(folder, DRAFT, "llama", **sizes)
    sizes = {"max_position_embeddings": CAPACITY, "sliding_window": WINDOW}
    return export_pair(folder, DRAFT, model, num_hidden_layers=LAYERS[model][0], **sizes)


@pytest.fixture(scope="module")
def plan(model):
    return dataclasses.replace(PLAN, kv_cache="int4") if model == INT4 else PLAN


@pytest.fixture(scope="module")
def engine(pair, plan):
    build_engine("llm", pair.bundle, pair.engine, plan, "onnxruntime", lambda _: None)
    plan = dataclasses.replace(plan, max_draft_tree_size=12)
    build_engine("draft", pair.draft_bundle, pair.engine, plan, "onnxruntime", lambda _: None)
    return pair.engine


@pytest.fixture(scope="module")
def single(pair, plan):
    """With batch size 1."""
    folder, plan = pair.engine.with_name("single"), dataclasses.replace(plan, max_batch_size=1)
    build_engine("llm", pair.bundle, folder, plan, "onnxruntime", lambda _: None)
    return folder


@pytest.fixture(scope="module")
def whole(engine):
    """The same engine with a full cache in all layers."""
    folder = shutil.copytree(engine, engine.with_name("whole"))
    manifest = read_manifest(folder)
    del manifest["spec"]["kv"]["pages"]["pass_rows"]
    write_manifest(folder, manifest)
    return folder


def open_session(folder):
    return open_decoder(folder, load_engine(folder, LLM_ENGINE))


def bounded_pool(session):
    (pool,) = (pool for pool in session._runner.kv_pool._pools if pool.is_bounded)
    return pool


IDS = np.random.default_rng(5).integers(9, 96, CAPACITY)


class Scripted:
    """Chunks, tokens and trees up to the cache's end, and the logits of every position."""

    def __init__(self, seed, kv):
        self.rng, self.kv, self.length = np.random.default_rng(seed), kv, 0
        self.seen = []

    def part(self):
        kind = self.rng.choice(["piece", "token", "tree"])
        size = {"piece": self.rng.integers(2, PASS + 1), "token": 1, "tree": 12}[kind]
        size = int(min(size, CAPACITY - self.length))
        self.mask, self.path, positions = None, np.arange(size), None
        if kind == "tree":
            self.mask = np.eye(size, dtype=np.bool_)
            for node in range(1, size):
                self.mask[node] |= self.mask[int(self.rng.integers(node))]
            self.path = np.flatnonzero(self.mask[int(self.rng.integers(size))])
            positions = self.length + self.mask.sum(1) - 1
        ids = self.rng.integers(9, 96, size)
        return SequencePart(self.kv, ids, self.length, np.arange(size), positions, self.mask)

    def take(self, result):
        self.seen.append(result.logits.tobytes())
        if self.mask is not None:
            self.kv.compact(self.length, self.path)
        self.length += len(self.path)


def run_scripts(session, maximum):
    """All logits of five sequences; some are swapped out, and all end."""
    rng = np.random.default_rng(0)
    everyone = [Scripted(seed, session.new_kv()) for seed in range(5)]
    while active := [one for one in everyone if one.length < CAPACITY]:
        some = list(rng.permutation(active))[:maximum]
        results = session.run_batch([one.part() for one in some])
        for one, result in zip(some, results, strict=True):
            one.take(result)
        some[0].kv.swap_out()
    for one in everyone:
        one.kv.free()
    return [one.seen for one in everyone]


def test_logits_equal_those_of_a_full_cache(engine, whole):
    session = open_session(engine)
    free = bounded_pool(session).num_free
    assert run_scripts(session, TOGETHER) == run_scripts(open_session(whole), 1)
    assert bounded_pool(session).num_free == free


def test_window_blocks_are_bounded(engine, model):
    session = open_session(engine)
    window = INT4_RECENT if model == INT4 else WINDOW
    pool, held = bounded_pool(session), -(-(window + 64 + PASS) // PAGE) + 1
    assert len(pool._uses) == TOGETHER * min(2 * held, CAPACITY // PAGE)
    for begin in range(0, CAPACITY, PASS):
        session.run(IDS[begin : begin + PASS], begin, np.array([0]))
        assert len(pool._uses) - len(pool._free) <= held
    spec = load_engine(engine, LLM_ENGINE).decoder
    kv = spec.kv
    if model == INT4:  # blocks of 32 numbers have 18 bytes, and 64 in float16
        blocks = 2 * kv.num_layers * kv.num_kv_heads * -(-kv.head_dim // 32)
        in_all, in_window = 18 * blocks, 64 * blocks
    else:
        _, windowed, whole = LAYERS[model]
        size = 8 * kv.num_kv_heads  # keys and values of all heads in float32
        in_window = windowed * size * kv.head_dim
        in_all = whole * size * (48 if model == "gemma4_text" else kv.head_dim)
    pages = min(2 * held, CAPACITY // PAGE), CAPACITY // PAGE
    expected = TOGETHER * PAGE * (in_window * pages[0] + in_all * pages[1])
    assert cache_bytes(kv, CAPACITY, TOGETHER) == expected
    assert load_engine(engine, LLM_ENGINE).prefill_rows <= PASS
    with pytest.raises(LimitError, match="a pass of 257 tokens"):
        session.run(IDS[: PASS + 1], 0, np.array([0]))


def read(session, begin, end):
    """Logits of the positions [begin, end)."""
    for at in range(begin, end, PASS):
        rows = IDS[at : min(at + PASS, end)]
        result = session.run(rows, at, np.array([len(rows) - 1]))
    return result.logits.tobytes()


@pytest.mark.each_change("gemma4_text*")
def test_a_fork_continues_if_its_window_is_cached(engine, whole):
    session = open_session(engine)
    read(session, 0, 700)
    kv = session.kv
    least = kv.min_length
    assert 512 - PAGE - 64 <= least <= 512  # where the last chunk began
    expected = {length: read(open_session(whole), 0, length) for length in (least + 1, 701, 740)}
    saved, session.kv = kv.read(700), kv.fork()
    kv = session.kv
    assert (kv.min_length, read(session, 700, 740)) == (least, expected[740])
    kv.write(saved[..., : least + 20, :], IDS.tolist(), least)
    assert (kv.min_length, kv.length) == (least, least + 20)
    assert read(session, least, least + 1) == expected[least + 1]
    kv.swap_out()
    assert kv.min_length == least, "a copy of rows has no more than they had"
    kv.write(saved, IDS.tolist(), least)
    assert read(session, 700, 701) == expected[701]
    with pytest.raises(ValueError, match="were freed"):
        session.run(IDS[:1], least - 1, np.array([0]))


def words(ids):
    return " ".join(f"w{token}" for token in ids)


def answer(llm, ids, **options):
    options = {"max_generate_length": 12, "sampling": SamplingParams(temperature=0)} | options
    grown = llm.generate_text(
        GenerationRequest(text=words(ids), add_special_tokens=False, stop=(), **options)
    )
    list(grown)
    return grown


@pytest.mark.each_change("gemma4_text*")
@pytest.mark.parametrize(
    "spec", [None, SpecOptions(network=None, lookups=("ngram",), tree="fixed")]
)
def test_a_second_turn_computes_only_new_tokens(engine, whole, spec):
    with LLM(engine, context_reuse=True, spec=spec) as llm, LLM(whole) as other:
        first, more = [*IDS[:400].tolist(), *IDS[300:400].tolist()], IDS[50:60].tolist()
        one = answer(llm, first)
        assert one.token_ids == answer(other, first).token_ids
        second = [*first, *one.token_ids, *more]
        two = answer(llm, second)
        assert two.token_ids == answer(other, second).token_ids
        (reused,) = two.profile.reused_tokens
        assert len(second) - reused <= 1 + len(more)
        changed = [*first[:200], 9, *second[201:]]  # diverges from it before the window
        three = answer(llm, changed)
        assert three.token_ids == answer(other, changed).token_ids
        assert three.profile.reused_tokens == [0]
        four = answer(llm, changed)  # all but its last position is cached
        assert four.token_ids == three.token_ids
        assert four.profile.reused_tokens == [len(changed) - 1]


@pytest.mark.each_change("gemma4_text*")
def test_a_draft_with_window_layers(engine, whole):
    """Far beyond the window, and in a second turn."""
    with LLM(engine, context_reuse=True, spec=DRAFTED) as llm, LLM(whole) as other:
        prompt, rounds = IDS[600:900].tolist(), []
        for known in (0, 300):
            found = answer(llm, prompt, max_generate_length=120)
            assert found.token_ids == answer(other, prompt, max_generate_length=120).token_ids
            assert known <= found.profile.reused_tokens[0]
            rounds += found.profile.rounds
            prompt = [*prompt, *found.token_ids, *IDS[40:60].tolist()]
        assert len(rounds) > 2 * WINDOW
        if load_engine(engine, LLM_ENGINE).decoder.model_type == "gemma3_text":
            assert sum(one.emitted for one in rounds) > len(rounds)


@pytest.mark.each_change("gemma3_text-single", "gemma4_text-drafts")
@pytest.mark.parametrize("kind", ["drafts", "single"])
def test_a_prompt_that_diverges_from_the_output(request, whole, kind):
    """If a template drops the reasoning of earlier turns, far after the prompt."""
    folder = request.getfixturevalue("single" if kind == "single" else "engine")
    spec = DRAFTED if kind == "drafts" else None
    with LLM(folder, context_reuse=True, spec=spec) as llm, LLM(whole) as other:
        prompt, known = IDS[:400].tolist(), 0
        for turn in range(3):
            found = answer(llm, prompt, max_generate_length=130)
            assert found.token_ids == answer(other, prompt, max_generate_length=130).token_ids
            assert found.profile.reused_tokens == [known]
            known = len(prompt) - (kind == "drafts")  # a draft's last position has another token
            prompt = [*prompt, *IDS[500 : 520 + turn].tolist()]
        other_text = IDS[100:1000].tolist()  # which needs their blocks
        assert answer(llm, other_text).token_ids == answer(other, other_text).token_ids


@pytest.mark.each_change("gemma4_text*")
def test_a_system_prompt_is_pinned_before_its_positions_are_freed(engine, whole):
    system = IDS[:150].tolist()
    with LLM(engine) as llm, LLM(whole) as other:
        for tail in (IDS[400:900].tolist(), IDS[300:330].tolist()):
            ids = [*system, *tail]
            found = answer(llm, ids, system_prompt=words(system))
            assert found.warnings == []
            assert found.token_ids == answer(other, ids).token_ids
        assert found.profile.reused_tokens == [150]


@pytest.mark.each_change("gemma4_text*")
def test_batch_outputs_equal_single_outputs(engine, whole):
    prompts = [words(IDS[at : at + 500].tolist()) for at in (0, 60, 120, 180)]
    ask = {"max_generate_length": 30, "sampling": SamplingParams(temperature=0)}
    with LLM(engine) as llm, LLM(whole) as other:
        found = llm.generate_batch(prompts, **ask)
        for prompt, one in zip(prompts, found, strict=True):
            alone = other.generate(prompt, **ask)
            list(alone)
            assert one.token_ids == alone.token_ids


def test_the_bytes_of_a_single_sequence(engine):
    """The window and one chunk are cached, whatever the capacity."""
    kv = load_engine(engine, LLM_ENGINE).decoder.kv
    assert kv.pages is not None
    in_windows = (WINDOW,) * len(kv.pages.windows)
    windows = dataclasses.replace(kv, pages=dataclasses.replace(kv.pages, windows=in_windows))
    assert cache_bytes(windows, 1 << 15) == cache_bytes(windows, 1 << 12)
