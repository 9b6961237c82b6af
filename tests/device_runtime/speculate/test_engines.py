"""Tiny EAGLE engines: trees against sequences, drafts against torch, ids against plain ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from eagle_engines import for_several
from eagle_reference import Reference, tree_mask
from stepping import speculate

from edgellm.core.errors import LimitError
from edgellm.core.manifest import DRAFT_ENGINE, LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.networks import draft
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.request_files.lossless_check import prove
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.shared_passes import Passes
from edgellm.device_runtime.speculate.tree import Tree

TOLERANCE = 2e-4
NAMES = ("eagle3", "int4", "eagle1", "hybrid")
PREFIX = np.random.default_rng(5).integers(9, 96, 23)
TREE = Tree(
    np.array([40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]),
    np.array([-1, 0, 0, 0, 1, 1, 3, 4, 6, 8, 8, 7]),
    np.ones(12),
)


def open_base(engine):
    manifest = load_engine(engine, LLM_ENGINE)
    return open_decoder(engine, manifest)


def open_draft(engine):
    manifest = load_engine(engine / "draft", DRAFT_ENGINE)
    return draft.open_draft(engine / "draft", manifest)


def path_of(node: int, tree: Tree = TREE) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(int(tree.parents[path[-1]]))
    return path[::-1]


def verified(session):
    """The pass over the prefix, then the one over the tree."""
    session.run(PREFIX, 0, np.zeros(1, np.int64))
    depths, mask = TREE.layout()
    positions = len(PREFIX) + depths
    return session.run(
        TREE.token_ids, len(PREFIX), np.arange(len(TREE)), position_ids=positions, tree_mask=mask
    )


def close(pair, found, expected, *, rounding: float = 0.05) -> None:
    """INT4 kernels round activations to int8; the portable graph does not.

    The hidden states of the hybrid are forty times as large as those of the others.
    """
    if is_int4(pair):
        assert np.linalg.norm(found - expected) < rounding * np.linalg.norm(expected)
    else:
        largest = np.abs(expected).max() if "hybrid" in pair.engine.parent.name else 1
        np.testing.assert_allclose(found, expected, atol=max(TOLERANCE, 5e-5 * largest))


def is_int4(pair) -> bool:
    return pair.base_checkpoint.name == "rounded"


def cache_rows(session, length: int) -> np.ndarray:
    return session.kv.read(length)


@pytest.fixture(scope="module", params=NAMES)
def pair(request, eagle_pairs):
    return eagle_pairs(request.param)


def test_every_node_equals_its_sequence(pair):
    session, plain = open_base(pair.engine), open_base(pair.engine)
    result = verified(session)
    for node in range(len(TREE)):
        path = TREE.token_ids[path_of(node)]
        plain.run(PREFIX, 0, np.zeros(1, np.int64))
        for at, token in enumerate(path):
            step = plain.run(np.array([token]), len(PREFIX) + at, np.zeros(1, np.int64))
        close(pair, result.logits[node], step.logits[0])
        close(pair, result.taps[node], step.taps[0])
        assert is_int4(pair) or result.token_ids[node] == step.token_ids[0]


@pytest.mark.parametrize("end", [0, 2, 9, 10, 11])
def test_a_compacted_cache_equals_a_fresh_one(pair, end):
    session, fresh = open_base(pair.engine), open_base(pair.engine)
    path = np.array(path_of(end))
    verified(session)
    session.kv.compact(len(PREFIX), path)
    ids = np.concatenate([PREFIX, TREE.token_ids[path]])
    fresh.run(ids, 0, np.zeros(1, np.int64))
    rows = (cache_rows(one, len(ids)) for one in (session, fresh))
    close(pair, *rows)
    for at in range(3):
        steps = [
            one.run(np.array([60 + at]), len(ids) + at, np.zeros(1, np.int64)).logits
            for one in (session, fresh)
        ]
        close(pair, *steps)


def test_auxiliary_hidden_states_equal_the_portable_graph_and_transformers(pair):
    from transformers import AutoModelForCausalLM

    from edgellm.export.pipeline.verify import run_outputs

    manifest = load_bundle(pair.bundle, LLM_BUNDLE)
    assert manifest.hidden_taps == pair.layout.taps
    expected = run_outputs(pair.bundle, manifest, PREFIX, len(PREFIX))
    found = open_base(pair.engine).run(PREFIX, 0, np.arange(len(PREFIX)))
    close(pair, found.taps, expected.taps, rounding=0.1)
    close(pair, found.logits, expected.logits, rounding=0.1)
    if not is_int4(pair):
        model = AutoModelForCausalLM.from_pretrained(pair.base_checkpoint)
        with torch.no_grad():
            states = model(torch.from_numpy(PREFIX)[None], output_hidden_states=True).hidden_states
        taps = torch.cat([states[tap][0] for tap in manifest.hidden_taps], -1)
        close(pair, found.taps, taps.numpy())


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "hybrid", "window", "low_rank"])
def test_the_draft_equals_torch(eagle_pairs, name):
    """An extension in two passes, then two levels, the second of them attends to its ancestors."""
    pair = eagle_pairs(name)
    reference = Reference(pair.draft_checkpoint, pair.base_checkpoint, pair.layout)
    session, ids = open_draft(pair.engine), torch.from_numpy(PREFIX)
    taps = open_base(pair.engine).run(PREFIX, 0, np.zeros(1, np.int64)).taps.copy()
    hidden = torch.from_numpy(taps)
    hidden = hidden if pair.layout.eagle1 else reference.fuse(hidden)
    found = session.fuse(taps)
    np.testing.assert_allclose(found, hidden, atol=TOLERANCE, rtol=TOLERANCE)
    for place in (slice(0, 9), slice(9, 15)):
        rows = place.stop - place.start
        result = session.run(
            PREFIX[place], found[place], place.start, np.array([rows - 1]), top_k=6
        )
        positions, causal = torch.arange(place.start, place.stop), torch.ones(rows, rows).tril()
        log_probs, recycled = reference.forward(ids[place], hidden[place], positions, causal.bool())
        _equal(result, reference, log_probs[-1:], recycled[-1:])
    parents, new = [-1, -1, 0, 0, 1], torch.tensor([50, 51, 52, 53, 54])
    mask, depths = tree_mask(parents), np.array([0, 0, 1, 1, 1])
    above = recycled[[-1, -1]]
    level = session.run(
        new[:2].numpy(), above.numpy(), 15, np.arange(2), top_k=6,
        position_ids=np.array([15, 15]), tree_mask=mask[:2, :2],
    )  # fmt: skip
    log_probs, recycled = reference.forward(
        new[:2], above, torch.tensor([15, 15]), torch.eye(2).bool()
    )
    _equal(level, reference, log_probs, recycled)
    below = recycled[[0, 0, 1]]
    level = session.run(
        new[2:].numpy(), below.numpy(), 17, np.arange(3), top_k=6,
        position_ids=15 + depths[2:], tree_mask=mask[2:],
    )  # fmt: skip
    reference.drop_to(15)
    log_probs, recycled = reference.forward(
        new, torch.cat([above, below]), torch.from_numpy(15 + depths), torch.from_numpy(mask)
    )
    _equal(level, reference, log_probs[2:], recycled[2:])


def _equal(result, reference, log_probs, recycled) -> None:
    best = log_probs.topk(6)
    np.testing.assert_allclose(result.log_probs, best.values, atol=TOLERANCE)
    np.testing.assert_array_equal(result.token_ids, reference.targets[best.indices])
    np.testing.assert_allclose(result.hidden, recycled, atol=TOLERANCE, rtol=TOLERANCE)


PROMPTS = ["w20", "w30 w40 w50", "w9 w10 w9 w10 w9", " ".join(f"w{i}" for i in range(10, 70))]
WAYS = {
    "fixed": SpecOptions(tree="fixed"),
    "static": SpecOptions(choices=((0,), (0, 0), (1,), (2,), (0, 2), (0, 0, 0), (2, 0))),
    "cost": SpecOptions(),
    "lookups": SpecOptions(lookups=("ngram", "suffix"), tree="fixed"),
    "cost_ngram": SpecOptions(lookups=("ngram",)),
    "cost_text": SpecOptions(network=None, lookups=("ngram", "suffix")),
}
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=7),
    SamplingParams(temperature=0.5, seed=42),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={11: -100, 12: 2}
    ),
    SamplingParams(temperature=0.9, top_p=1.0, top_k=0, seed=3, min_p=0.02, presence_penalty=0.8),
]


def answer_of(llm, prompt, sampling, **options):
    answer = llm.generate(prompt, sampling=sampling, max_generate_length=60, **options)
    list(answer)
    return answer


# Others have their own
BASE_OF = {"int8_draft": "eagle3", "window": "eagle3", "low_rank": "eagle3"}
WAYS_OF = {
    "eagle3": [*WAYS],
    "window": ["fixed"],
    "low_rank": ["fixed", "cost"],
    "int8_draft": ["fixed", "cost"],
    "eagle1": ["fixed"],
    "medusa": ["static", "lookups", "cost"],
    "peagle": ["static", "lookups", "cost"],
    "mtp": ["static", "lookups", "cost"],
    "hybrid": ["lookups"],
    "assistant": ["fixed", "lookups", "cost"],
}


@pytest.fixture(scope="module")
def plain_answer():
    """Plain outputs of a base, each computed once."""
    known = {}

    def ask(name, llm, sampling, prompt):
        key = BASE_OF.get(name, name), repr(sampling), prompt
        if key not in known:
            known[key] = answer_of(llm, prompt, sampling, speculative=False)
        return known[key]

    return ask


@pytest.mark.each_change(
    "eagle3-cost",
    "eagle3-static",
    "assistant-cost",
    "low_rank-fixed",
    "mtp-cost",
    "peagle-cost",
    "medusa-cost",
    "int8_draft-cost",
    "eagle3-cost_ngram",
)
@pytest.mark.parametrize(("name", "way"), [(n, way) for n, ways in WAYS_OF.items() for way in ways])
def test_token_ids_equal_plain_decoding(eagle_pairs, plain_answer, name, way):
    llm = LLM(eagle_pairs(name).engine, verify=True, spec=WAYS[way])
    rounds = []
    for sampling in SAMPLINGS:
        for prompt in PROMPTS:
            plain = plain_answer(name, llm, sampling, prompt)
            found = answer_of(llm, prompt, sampling)
            assert found.token_ids == plain.token_ids
            assert (found.text, found.finish_reason) == (plain.text, plain.finish_reason)
            assert not plain.profile.rounds
            rounds += found.profile.rounds
    assert rounds
    if "cost" not in way:
        assert max(counts.tree_size for counts in rounds) == WAYS[way].limits(60).verify_size


def test_trees_beyond_a_window_equal_torch(eagle_pairs):
    """The first tree after a prompt that is longer than the draft's window."""
    pair = eagle_pairs("window")
    spec = SpecOptions(tree="fixed", steps=3, top_k=2, verify_size=11)  # all candidates
    llm = LLM(pair.engine, spec=spec)
    answer = llm.generate(PROMPTS[3], sampling=SAMPLINGS[0], max_generate_length=8)
    first, second, *_ = [step for step in answer if step.round is not None]
    ids = np.append(llm.tokenizer.encode(PROMPTS[3], add_special_tokens=True), first.token_ids)
    taps = open_base(pair.engine).run(ids[:-1], 0, np.zeros(1, np.int64)).taps
    reference = Reference(pair.draft_checkpoint, pair.base_checkpoint, pair.layout)
    assert len(taps) > 7 * pair.layout.window
    fused = reference.fuse(torch.from_numpy(taps.copy()))
    tree, count, depths = second.round.tree, len(taps), []
    assert (int(tree.token_ids[0]), len(tree)) == (ids[-1], 11)
    for node in sorted({*tree.parents.tolist()} - {-1}):
        drafted = torch.from_numpy(tree.token_ids[path_of(node, tree)[1:]])
        depths.append(len(drafted))
        reference.drop_to(0)
        causal = torch.ones(count, count).tril().bool()
        positions, rows = torch.arange(count), torch.from_numpy(ids[1:])
        log_probs, hidden = reference.forward(rows, fused, positions, causal)
        for depth, token in enumerate(drafted):
            own = torch.tensor([count + depth])
            log_probs, hidden = reference.forward(
                token[None], hidden[-1:], own, torch.ones(1, 1).bool()
            )
        expected = reference.targets[log_probs[-1].topk(2).indices]
        found = tree.token_ids[np.flatnonzero(tree.parents == node)]
        assert sorted(found.tolist()) == sorted(expected.tolist())
    assert sorted(depths) == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["window", "low_rank"])
def test_batches_equal_plain_decoding(eagle_pairs, plain_answer, tmp_path, name):
    engine = for_several(eagle_pairs(name), tmp_path / "engine", 3)
    llm, alone = LLM(engine, spec=WAYS["fixed"]), LLM(eagle_pairs("eagle3").engine)
    sampling, sizes = SAMPLINGS[0], []
    llm.on_pass(lambda answers, _: sizes.append(answers))
    answers = llm.generate_batch(PROMPTS, sampling=sampling, max_generate_length=60)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == plain_answer("eagle3", alone, sampling, prompt).token_ids
    assert max(sizes) == 3
    assert max(counts.tree_size for one in answers for counts in one.profile.rounds) > 30


def test_a_low_rank_head_limits_the_candidates(eagle_pairs):
    engine = eagle_pairs("low_rank").engine
    with pytest.raises(LimitError, match="--eagleDraftTopK 15 exceeds the draft's 14 candidates"):
        LLM(engine, spec=SpecOptions(top_k=15, steps=2))


class Knowing:
    """A drafter that hides the right continuation in a bushy tree."""

    is_paused = False

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.at = answer, -1  # the prompt is recorded first
        self.random = np.random.default_rng(2)

    def begin(self, *_) -> None: ...
    def set_adapter(self, *_) -> None: ...
    def catch_up(self) -> Iterator[None]:
        yield from ()

    def learn(self, *_) -> None: ...
    def observe(self, *_) -> None: ...

    def plan_round(self, *_, **__) -> None: ...

    def remember(self, token_ids) -> None:
        self.at = self.at + len(token_ids) if self.at >= 0 else 0

    def confidences(self, tree) -> list[float]:
        return [1.0] * len(tree)

    def end(self) -> None: ...

    def propose(self, root: int, room: int, levels: int) -> Passes[Tree]:
        yield from ()
        assert root == self.answer[self.at - 1]
        right = self.answer[self.at : self.at + min(levels, self.random.integers(0, 7))]
        ids, parents, above = [root], [-1], 0
        for token in right:
            wrong = [t for t in self.random.integers(9, 96, 4).tolist() if t != token]
            siblings = self.random.permutation([*set(wrong), token]).tolist()
            parent = above
            for sibling in siblings:
                if sibling == token:
                    above = len(ids)
                ids.append(sibling)
                parents.append(parent)
        size = min(len(ids), room + 1)
        return Tree(np.array(ids[:size]), np.array(parents[:size]), np.ones(size))


def test_long_accepted_paths_leave_a_sound_cache(pair):
    if is_int4(pair):
        pytest.skip("its ids depend on the number of rows")
    llm = LLM(pair.engine)
    for prompt in PROMPTS[:3]:
        plain = answer_of(llm, prompt, SAMPLINGS[1]).token_ids
        ids = llm.tokenizer.encode(prompt, add_special_tokens=True)
        knowing = Knowing(plain)
        rounds = list(
            speculate(
                llm.base, knowing, ids, Sampler(params=SAMPLINGS[1]), len(plain), Profile(),
                prefill_rows=llm.manifest.prefill_rows,
            )
        )  # fmt: skip
        assert [t for found in rounds for t in found.token_ids] == plain
        assert len(plain) < 8 or max(len(found.path) for found in rounds) > 3


@pytest.mark.parametrize("way", ["fixed", "lookups"])
def test_where_an_int4_engine_diverges_the_margin_is_small(eagle_pairs, way):
    llm = LLM(eagle_pairs("int4").engine, spec=WAYS[way])
    requests = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS[:3]]
    found = list(prove(llm, Options(max_generate_length=50), requests))
    assert len(found) == 3
    for comparison in found:
        if comparison.divergence is not None:
            assert comparison.margin is not None
            assert comparison.spread is not None
            assert abs(comparison.margin) < 0.1 * comparison.spread
