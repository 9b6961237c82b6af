"""Recurrent layers in an engine: trees, further turns and batches equal plain decoding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import make_checkpoint

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.device_runtime.networks import recurrent_state, sequence_kv
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart, open_decoder
from edgellm.device_runtime.networks.recurrent_state_pool import HostStates
from edgellm.device_runtime.request_files.lossless_check import prove
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

HYBRIDS = {
    name: models.find(name).TINY for name in ("lfm3", "qwen3_5_text", "falcon_h1", "kimi_linear")
}
GREEDY = SamplingParams(temperature=0)
LOOKUPS = SpecOptions(network=None, lookups=("suffix", "ngram"), tree="fixed", verify_size=8)
PLAN = Plan(max_input_len=96, kv_capacity=128, threads=1, max_verify_tree_size=12)


@pytest.fixture(scope="module", params=HYBRIDS)
def bundle(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(folder / "checkpoint", **HYBRIDS[request.param])
    export_llm(open_checkpoint(str(checkpoint)), folder / "bundle", ExportOptions(dtype="fp32"))
    return folder / "bundle"


@pytest.fixture(scope="module")
def engine(bundle) -> Path:
    build_engine("llm", bundle, bundle.parent / "engine", PLAN, "onnxruntime", lambda _: None)
    return bundle.parent / "engine"


@pytest.fixture(scope="module")
def plain(engine) -> LLM:
    return LLM(engine)


@pytest.fixture
def reusing(engine, monkeypatch) -> LLM:
    monkeypatch.setattr(sequence_kv, "CHECKPOINT_ROWS", 16)
    return LLM(engine, context_reuse=True)


def ask(model: LLM, prompt: str, length: int = 8, **options):
    answer = model.generate(prompt, max_generate_length=length, sampling=GREEDY, **options)
    list(answer)
    return answer


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def test_unsupported_backends_reject_it(bundle, tmp_path):
    message = "ONNX Runtime on cuda does not compute recurrent layers yet"
    with pytest.raises(EdgeLLMError, match=message):
        build_engine("llm", bundle, tmp_path / "engine", PLAN, "onnxruntime_cuda", lambda _: None)
    assert not (tmp_path / "engine").exists()


# ---------------------------------------------------------------------------------- trees
def _logits_after(session: DecoderNetwork, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Logits [V] after a prompt and tokens, each computed alone."""
    result = session.run(prompt, 0, np.array([len(prompt) - 1]))
    for at, token in enumerate(tokens):
        result = session.run(np.array([token]), len(prompt) + at, np.zeros(1, np.int64))
    return result.logits[0].copy()


@pytest.mark.parametrize("seed", range(4))
def test_tree_logits_equal_single_token_logits(engine, seed):
    """Also after a path of the tree was committed."""
    random = np.random.default_rng(seed)
    prompt, nodes = random.integers(9, 96, 3 + 5 * seed), 3 + 3 * seed
    tokens, parents = random.integers(9, 96, nodes), [-1]
    parents += [int(random.integers(0, node)) for node in range(1, nodes)]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else []), node])
    mask = np.array([[column in path for column in range(nodes)] for path in paths])
    session = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    session.run(prompt, 0, np.array([0]))
    depths = np.array([len(path) - 1 for path in paths])
    for _ in range(2):  # a pass leaves the states as they were
        found = session.run(
            tokens,
            len(prompt),
            np.arange(nodes),
            position_ids=len(prompt) + depths,
            tree_mask=mask,
        ).logits.copy()
    deepest = max(paths, key=len)
    session.kv.compact(len(prompt), np.array(deepest))
    following = len(prompt) + len(deepest)
    after = session.run(np.array([50]), following, np.zeros(1, np.int64)).logits[0].copy()
    other = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    for node, path in enumerate(paths):
        np.testing.assert_array_equal(
            found[node], _logits_after(other, prompt, tokens[path].tolist()), f"node {node}"
        )
    expected = _logits_after(other, prompt, [*tokens[deepest].tolist(), 50])
    np.testing.assert_array_equal(after, expected)


def test_speculative_outputs_equal_plain_ones(engine, plain):
    model = LLM(engine, spec=LOOKUPS)
    prompts = [words(20, 21, 22, 20, 21, 22, 20), words(*range(30, 60)), words(40, 40, 40)]
    rounds = []
    for prompt in prompts:
        for length in (1, 5, 40):
            answer = ask(model, prompt, length)
            assert answer.token_ids == ask(plain, prompt, length).token_ids
            rounds += answer.profile.rounds
    assert any(one.tree_size > 1 for one in rounds)
    requests = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    for comparison in prove(model, Options(max_generate_length=40), requests):
        assert comparison.has_equal_bits, comparison.line()


# ---------------------------------------------------------------------------------- batches
@pytest.fixture(scope="module")
def several(bundle) -> Path:
    """For a batch of three."""
    engine, plan = bundle.parent / "several", dataclasses.replace(PLAN, max_batch_size=3)
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    return engine


def test_passes_are_batch_invariant(engine, several):
    """Chunks, trees and paths of five sequences, in batches of three, in any order."""
    random = np.random.default_rng(3)
    together = open_decoder(several, load_engine(several, LLM_ENGINE))
    alone = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    kvs = [(together.new_kv(), alone.new_kv()) for _ in range(5)]
    lengths = [0] * 5
    for _ in range(12):
        chosen = random.permutation(5)[: random.integers(1, 4)]
        parts, expected = [], []
        for at in chosen:
            rows, mask, positions = int(random.integers(1, 7)), None, None
            if lengths[at] and random.integers(2):
                mask = np.eye(rows, dtype=np.bool_)
                for node in range(1, rows):
                    mask[node] |= mask[int(random.integers(node))]
                positions = lengths[at] + mask.sum(1) - 1
            ids, wanted = random.integers(9, 96, rows), np.arange(rows)
            part = SequencePart(kvs[at][0], ids, lengths[at], wanted, positions, mask)
            parts.append(part)
            own = part._replace(kv=kvs[at][1])
            expected.append(alone.run_batch([own])[0].logits.copy())
            if mask is not None:
                own.kv.compact(lengths[at], np.flatnonzero(mask[-1]))
        found = [result.logits.copy() for result in together.run_batch(parts)]
        for at, part, ours, theirs in zip(chosen, parts, found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            path = np.arange(len(part.token_ids))
            if part.tree_mask is not None:
                path = np.flatnonzero(part.tree_mask[-1])
                part.kv.compact(lengths[at], path)
            lengths[at] += len(path)


@pytest.mark.parametrize("spec", [None, LOOKUPS], ids=["plain", "lookups"])
def test_batch_outputs_equal_single_outputs(several, plain, spec):
    """Also in a second turn, with cached prefixes."""
    prompts = [
        words(20, 21, 20, 21, 20),
        words(20, 21, 20, 33),
        words(50, 51),
        words(*range(30, 60)),
    ]
    with LLM(several, spec=spec, context_reuse=True) as model:
        for turn in range(2):
            answers = model.generate_batch(prompts, max_generate_length=12, sampling=GREEDY)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == ask(plain, prompt, 12).token_ids
                assert not turn or answer.timings()["reused_tokens"] > 0
            texts = [f"{prompt} {one.text}" for prompt, one in zip(prompts, answers, strict=True)]
            prompts = [f"{text} {words(60 + at)}" for at, text in enumerate(texts)]


# ---------------------------------------------------------------------------------- turns
@pytest.mark.parametrize("spec", [None, LOOKUPS], ids=["plain", "lookups"])
def test_a_second_turn_computes_only_new_tokens(engine, plain, spec):
    model = LLM(engine, spec=spec, context_reuse=True)
    text, known = words(20, 21, 22), 0
    for turn in range(3):
        answer = ask(model, text, 9)
        assert answer.token_ids == ask(plain, text, 9).token_ids
        assert answer.timings()["reused_tokens"] == known
        known = answer.prompt_token_count + len(answer.token_ids) - 1
        text = f"{text} {answer.text} {words(60 + turn, 61)}"


def test_prompts_continue_from_the_last_shared_checkpoint(reusing, plain):
    prompt = [*range(20, 60)]
    for changed, expected in (
        (prompt, 0),
        (prompt, 39),  # asked again: all but the last row
        ([*prompt[:39], 70, 71], 39),
        ([*prompt[:37], 70], 32),
        ([*prompt[:20], 70, 71, 72], 16),
        ([*prompt[:9], 70], 0),
    ):
        answer = ask(reusing, words(*changed))
        assert answer.token_ids == ask(plain, words(*changed)).token_ids
        assert answer.timings()["reused_tokens"] == expected


def test_checkpoints_stay_within_their_memory(engine, reusing, plain, monkeypatch):
    spec = load_engine(engine, LLM_ENGINE).decoder.recurrent
    memory = recurrent_state.States(HostStates(None, spec))
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_BYTES", 2 * memory.num_bytes)
    prompt = [*range(20, 90)]
    ask(reusing, words(*prompt))
    (kvs,) = reusing.kv_cache_manager._begun.values()
    assert len(kvs[0].states.checkpoints) == 2
    answer = ask(reusing, words(*prompt, 5))
    assert answer.timings()["reused_tokens"] == 69
    assert answer.token_ids == ask(plain, words(*prompt, 5)).token_ids


def test_alternating_conversations_keep_their_states(engine, plain):
    for spec in (None, LOOKUPS):
        model = LLM(engine, spec=spec, context_reuse=True)
        prompts = [words(20, 21, 20, 21, 20), words(20, 21, 20, 33), words(50, 51)]
        answers = [
            model.generate(each, max_generate_length=12, sampling=GREEDY) for each in prompts
        ]
        for _ in model.together(answers, 3):
            pass
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == ask(plain, prompt, 12).token_ids


def test_pinned_prefixes_have_states(engine, plain, tmp_path):
    """Of system prompts, and in snapshot files."""
    model = LLM(engine)
    beginning, folder = words(20, 21, 22, 23), SnapshotFolder(tmp_path, {"base": "hash"})
    options = {"add_special_tokens": False, "sampling": GREEDY, "stop": ()}

    def turn(llm: LLM, text: str):
        answer = llm.generate_text(
            GenerationRequest(text=text, max_generate_length=6, system_prompt=beginning, **options)
        )
        list(answer)
        return answer.timings()["reused_tokens"], answer.token_ids

    first = f"{beginning} w30 w31"
    assert turn(model, first) == (0, turn(plain, first)[1])
    turn(model, words(70, 71))
    folder.prepare()
    folder.save(model.kv_cache_manager.all_prefixes())
    restarted = LLM(engine)
    for kept in folder.load(1).contexts:
        restarted.kv_cache_manager.pinned.add(kept)
    for llm in (model, restarted):
        for text in (f"{beginning} w40", f"{beginning} w41 w42", first):
            reused, found = turn(llm, text)
            assert reused >= 4
            assert found == turn(LLM(engine), text)[1]
