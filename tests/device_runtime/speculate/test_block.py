"""Block drafts: lossless over scripted sessions, equal to torch in engines; rejected drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from block_reference import LAYOUTS, WINDOWED, BlockReference
from eagle_engines import build_blocks, draft_plan, with_blocks
from scripted_blocks import StrictBlocks
from scripted_sessions import DRAFTS, StrictBase
from stepping import by_cost, generate, learned_of, speculate

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.networks.block import open_block
from edgellm.device_runtime.networks.draft import DraftPart
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.drafters.block import BlockDrafter
from edgellm.device_runtime.speculate.policy import spec_budget
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.static_tree import StaticTree
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits
from edgellm.export.pipeline.draft import DraftOptions, HeadOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=0, seed=3, min_p=0.05, repetition_penalty=1.2
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [7], list(range(20)) * 2)
CHOICES = ((0,), (0, 0), (1,), (2,), (0, 2), (0, 0, 0), (2, 0), (2, 0, 1))
LIMITS = TreeLimits(top_k=4, steps=5, verify_size=16)
ALL = {**LAYOUTS, **WINDOWED}
COSTS = Costs.of({"1": 10, "8": 14, "64": 60}, None, {"1": 1, "64": 9})


def drafting(policy="fixed", draft="oracle", capacity=128, **block):
    """Factory of drafters, and their shared session."""
    session = StrictBlocks(capacity, DRAFTS[draft], **block)
    limits = SpecOptions(choices=CHOICES).limits(60) if policy == "static" else LIMITS
    rows = DraftKVCaches(network=session, round_rows=limits.round_rows)
    made = StaticTree(CHOICES) if policy == "static" else FixedTree(limits)
    learned = by_cost(limits, COSTS) if policy == "cost" else learned_of(made, COSTS)
    count = session.block.links or limits.top_k

    def start():
        return BlockDrafter(
            caches=rows,
            block=session.block,
            learned=learned,
            limits=limits,
            costs=COSTS,
            num_candidates=count,
        )

    return start, session


def ids_of(base, drafter, prompt, params, count=30) -> list[int]:
    rounds = speculate(
        base,
        drafter,
        prompt,
        Sampler(params=params, prompt=prompt),
        count,
        Profile(),
        prefill_rows=7,
    )
    return [token for found in rounds for token in found.token_ids]


def plain(prompt, params, count=30) -> list[int]:
    sampler = Sampler(params=params, prompt=prompt)
    return list(generate(StrictBase(128), prompt, sampler, count, Profile(), prefill_rows=64))


@pytest.mark.each_change(
    "half_right-fixed-16",
    "oracle-cost-16",
    "adversary-fixed-0",
    "broken-static-0",
    "broken-fixed-0",
    "adversary-cost-16",
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("policy", "links"), [("fixed", 16), ("fixed", 0), ("static", 0), ("cost", 16)]
)
@pytest.mark.parametrize("draft", ["oracle", "adversary", "half_right", "broken"])
def test_token_ids_equal_plain_decoding(draft, policy, links):
    base = StrictBase(128)
    rules = {"links": links, "from_newest": policy == "cost", "is_causal": draft == "oracle"}
    start, session = drafting(policy, draft, **rules)
    for params in (GREEDY, SAMPLED):
        for prompt in PROMPTS:
            assert ids_of(base, start(), prompt, params) == plain(prompt, params)
    assert session.passes > 0
    assert max(base.tree_sizes) <= LIMITS.verify_size


def test_a_full_cache_ends_in_plain_decoding():
    """The whole block fits after every committed position."""
    base = StrictBase(128)
    start, session = drafting(capacity=30)
    assert ids_of(base, start(), PROMPTS[0], GREEDY, 60) == plain(PROMPTS[0], GREEDY, 60)
    assert session.committed <= 24
    assert session.passes > 1


def test_a_full_cache_begins_anew():
    """With the newest 64 positions, once 64 are waiting."""
    base = StrictBase(400)
    start, session = drafting(capacity=106)
    ids = ids_of(base, start(), PROMPTS[0], GREEDY, 300)
    sampler = Sampler(params=GREEDY, prompt=PROMPTS[0])
    expected = generate(StrictBase(400), PROMPTS[0], sampler, 300, Profile(), prefill_rows=64)
    assert ids == list(expected)
    assert session.skipped > 100
    assert session.passes < 300 / 6 + 3
    assert len(base.passes) < 300 / 6 + 2 * 64 + 20


@pytest.mark.parametrize("has_links", [False, True])
def test_right_blocks_are_always_accepted(has_links):
    """With links also along paths that no position of the block predicted."""
    base = StrictBase(128)
    start, session = drafting(links=16 * has_links)
    assert ids_of(base, start(), PROMPTS[0], GREEDY, 61) == plain(PROMPTS[0], GREEDY, 61)
    assert session.passes <= 1 + 61 // 6 + 1


# ------------------------------------------------------------------------------ real engines
@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Pairs by layout on one base, each built when it is first asked for."""
    made, base = {}, build_blocks(tmp_path_factory.mktemp("dflash"), LAYOUTS["dflash"])
    made["dflash"] = base

    def get(name):
        if name not in made:
            made[name] = with_blocks(base, tmp_path_factory.mktemp(name), ALL[name])
        return made[name]

    return get


def parts(session, ids, taps, sizes, rows, top_k):
    """Output of chunks of these sizes."""
    at = 0
    for size in sizes:
        own = slice(at, at + size)
        block = np.arange(size, size + rows)
        part = DraftPart(
            kv=session.kv,
            token_ids=ids[own],
            write_index=at,
            output_rows=block,
            top_k=top_k,
            taps=taps[own].numpy(),
        )
        (found,) = session.run_batch([part])
        at += size
    return found


@pytest.mark.each_change("dflash", "dflash2", "causal_window", "speculators_window")
@pytest.mark.parametrize("name", ALL)
def test_an_engine_equals_torch(engines, name):
    """In one chunk and in several, which overwrite the block before; windows are exceeded."""
    layout, pair = ALL[name], engines(name)
    manifest = load_engine(pair.engine / "draft", DRAFT_ENGINE)
    assert manifest.draft.decoder.sliding_window == (layout.window or None)
    assert (manifest.draft.method, manifest.draft.hidden_taps) == (layout.kind, layout.taps)
    assert (manifest.draft.block.levels, [*manifest.graphs]) == (
        5 + layout.from_newest,
        ["block", "fuse"],
    )
    session = open_block(pair.engine / "draft", manifest)
    reference = BlockReference(pair.base_checkpoint, layout)
    taps = torch.randn(9, 3 * 96, generator=torch.Generator().manual_seed(1))
    ids = np.arange(20, 29)
    rows = reference.predicted(taps, 28, 6)
    expected = reference.log_probs(rows)
    for sizes in ([9], [1, 3, 5]):
        found = parts(session, ids, taps, sizes, 6, layout.draft_vocab)
        places = np.searchsorted(reference.targets.numpy(), found.token_ids)
        own = np.take_along_axis(expected.numpy(), places, 1)
        np.testing.assert_allclose(found.log_probs, own, atol=5e-5)
        linked = min(64, layout.draft_vocab)
        assert found.links is None or found.links.shape == (6, linked, linked)
    if found.links is None:
        return
    first = 0 if layout.from_newest else 1
    for row, rank in ((first, 3), (first + 1, 2), (4, 5)):
        before = 28 if row == first else int(found.token_ids[row - 1, rank])
        scores = expected[row] + 0
        own = torch.from_numpy(places[row, :linked])
        scores[own] += reference.pair_scores(rows, row, before)[own]
        links = scores.log_softmax(-1)[own]
        np.testing.assert_allclose(found.links[row, rank], links, atol=2e-4)


def test_a_low_rank_head_retrieves_candidates(engines, tmp_path):
    """Candidates, and their links, of the head's truncated SVD."""
    layout, pair = LAYOUTS["speculators"], engines("speculators")
    opened = open_draft(str(pair.draft_checkpoint)), open_checkpoint(str(pair.base_checkpoint))
    options = DraftOptions("fp32", head=HeadOptions(rank=16, num_candidates=24))
    export_draft(*opened, tmp_path / "bundle", options)
    built = build_engine(
        "draft", tmp_path / "bundle", tmp_path / "e", draft_plan(), "onnxruntime", print
    )
    session = open_block(tmp_path / "e" / "draft", built)
    reference = BlockReference(pair.base_checkpoint, layout)
    taps = torch.randn(9, 3 * 96, generator=torch.Generator().manual_seed(1))
    found = parts(session, np.arange(20, 29), taps, [9], 6, 24)
    rows = reference.predicted(taps, 28, 6)
    left, singular, right = torch.linalg.svd(reference.head, full_matrices=False)
    retrieval = left[:, :16] * singular[:16] @ right[:16]
    kept = (rows @ retrieval.T).topk(24).indices
    best = reference.log_probs(rows).gather(1, kept).log_softmax(-1).sort(descending=True)
    np.testing.assert_allclose(found.log_probs, best.values, atol=5e-5)
    wanted = reference.targets[kept.gather(1, best.indices)]
    np.testing.assert_array_equal(found.token_ids, wanted)
    before, scores = int(found.token_ids[0, 2]), torch.from_numpy(found.log_probs[1] + 0)
    places = torch.from_numpy(np.searchsorted(reference.targets.numpy(), found.token_ids[1]))
    scores += reference.pair_scores(rows, 1, before)[places]
    np.testing.assert_allclose(found.links[1, 2], scores.log_softmax(-1), atol=2e-4)


@pytest.mark.parametrize(("name", "precision"), [("dflash2", "int8"), ("deepspec", "int4")])
def test_quantized_engines_are_close(engines, name, precision, tmp_path):
    layout, pair = LAYOUTS[name], engines(name)
    built = build_engine(
        "draft", pair.draft_bundle, tmp_path / "e", draft_plan(precision), "onnxruntime", print
    )
    assert built.main_graphs[0].precision == precision
    assert "tokens, relative error" in built.options["checks"][0]
    session = open_block(tmp_path / "e" / "draft", built)
    reference = BlockReference(pair.base_checkpoint, layout)
    taps = torch.randn(9, 3 * 96, generator=torch.Generator().manual_seed(1))
    found = parts(session, np.arange(20, 29), taps, [9], 6, 96)
    expected = reference.log_probs(reference.predicted(taps, 28, 6)).numpy()
    error = found.log_probs - np.take_along_axis(expected, found.token_ids, 1)
    spread = np.linalg.norm(expected - expected.mean(axis=1, keepdims=True))
    assert np.linalg.norm(error) < {"int8": 0.1, "int4": 0.4}[precision] * spread


@pytest.mark.parametrize("name", ["dflash2", "speculators", "speculators_window"])
def test_blocks_of_several_requests_share_a_pass(engines, name, tmp_path):
    """Neither attends to the other, and no candidate is linked to one of the other."""
    plan = replace(draft_plan(), max_batch_size=2, options=CpuOptions("edgellm"))
    bundle, layout = engines(name).draft_bundle, ALL[name]
    built = build_engine("draft", bundle, tmp_path / "e", plan, "onnxruntime", print)
    session = open_block(tmp_path / "e" / "draft", built)
    taps = np.random.default_rng(2).standard_normal((9, 3 * 96), np.float32)
    first, second = session.kv, session.new_kv()

    def part(kv, rows, newest):
        ids, block = np.full(rows, newest), np.arange(rows, rows + 6)
        return DraftPart(
            kv=kv,
            token_ids=ids,
            write_index=0,
            output_rows=block,
            top_k=layout.draft_vocab,
            taps=taps[:rows],
        )

    wanted = [part(first, 9, 20), part(second, 4, 30)]
    alone = [found.copy() for one in wanted for found in session.run_batch([one])]
    for found, expected in zip(session.run_batch(wanted), alone, strict=True):
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
        rows = slice(0 if layout.from_newest else 1, None)  # what is predicted
        np.testing.assert_allclose(found.links[rows], expected.links[rows], atol=1e-5)


SPECS = {
    "fixed": SpecOptions(tree="fixed", top_k=4, verify_size=20),
    "by cost": SpecOptions(lookups=("ngram",)),
    "short": SpecOptions(network="block", tree="fixed", steps=2, top_k=3, verify_size=9),
}


@pytest.mark.each_change(
    "dflash-by cost", "jetspec-short", "speculators-by cost", "one_window-fixed"
)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("dflash", "by cost"),
        ("jetspec", "short"),
        ("deepspec", "fixed"),
        ("speculators", "by cost"),
        ("dflash2", "fixed"),
        ("one_window", "fixed"),
    ],
)
def test_outputs_equal_plain_decoding(engines, name, way, monkeypatch):
    """Stop tokens, limits within a block, continued texts, a full cache."""
    # By its times, drafting with a model as small as its draft would rarely pay.
    monkeypatch.setattr(spec_budget, "_may_pay", lambda *_: True)
    llm = LLM(engines(name).engine, verify=True, spec=SPECS[way])
    rounds = []
    for prompt in ("w20", "w9 w10 w9 w10 w9", " ".join(f"w{i}" for i in range(10, 70))):
        for sampling in (GREEDY, SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=7)):
            plain, found = (
                llm.generate(prompt, sampling=sampling, max_generate_length=70, speculative=drafts)
                for drafts in (False, True)
            )
            list(plain), list(found)
            assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
            rounds += found.profile.rounds
    assert max(counts.tree_size for counts in rounds) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 6}, "--eagleDraftStep is 6 levels deep, the draft's blocks predict 5 tokens"),
        ({"top_k": 97}, "exceeds the draft's vocabulary of 96"),
        ({"network": "eagle"}, "is of dflash"),
    ],
)
def test_unsupported_options_are_rejected(engines, options, message):
    with pytest.raises(EdgeLLMError, match=message):
        LLM(engines("dflash").engine, spec=SpecOptions(**options))


def test_other_kernels_do_not_build_blocks(engines, tmp_path):
    plan = replace(draft_plan(), options=CpuOptions("onnxruntime"))
    with pytest.raises(EdgeLLMError, match="only edgellm's kernels"):
        build_engine("draft", engines("dflash").draft_bundle, tmp_path, plan, "onnxruntime", print)
