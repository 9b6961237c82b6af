"""Medusa heads: lossless over scripted sessions, equal to torch in engines; rejected heads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_one_line_error
from eagle_reference import VOCAB as REAL_VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_heads import log_probs, make_tensors
from scripted_heads import StrictHeads
from scripted_sessions import DRAFTS, VOCAB, StrictBase
from stepping import by_cost, generate, learned_of, speculate

from edgellm.core.errors import LimitError
from edgellm.core.manifest import DRAFT_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.networks.heads import HeadsNetwork, HeadsPart, open_heads
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.drafters.medusa import MedusaDrafter
from edgellm.device_runtime.speculate.drafters.ngram import NgramLookup
from edgellm.device_runtime.speculate.policy import spec_budget
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.static_tree import StaticTree
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits

GREEDY = SamplingParams(temperature=0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.0, top_p=0.9, top_k=0, seed=11),
    SamplingParams(
        temperature=0.8,
        top_p=1.0,
        top_k=0,
        seed=3,
        min_p=0.05,
        repetition_penalty=1.2,
        logit_bias={3: 1.5},
    ),
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [7], list(range(20)) * 2)
CHOICES = ((0,), (0, 0), (1,), (2,), (0, 2), (0, 0, 0), (2, 0), (2, 0, 1))
# Two children for every node, so that levels have more parents than a node has children.
FULL = tuple(tuple(map(int, f"{at:b}"[1:])) for at in range(2, 16))
COSTS = {
    "fair": Costs.of({"1": 10, "8": 14, "64": 60}, None, {"1": 1}),
    "dear": Costs.of({"1": 10, "2": 30, "64": 900}, None, {"1": 8}),
}


class Setup:
    """Parameters of a run."""

    def __init__(
        self, limits: TreeLimits, policy: str = "fixed", draft: str = "oracle", *,
        capacity: int = 128, lookups: bool = False, choices=CHOICES,
    ) -> None:  # fmt: skip
        self.base = StrictBase(capacity)
        self.heads = StrictHeads(self.base, DRAFTS[draft], limits.steps)
        costs = COSTS.get(policy, COSTS["fair"])
        starts = [NgramLookup] if lookups else []
        if policy in ("fixed", "static"):
            made = FixedTree(limits) if policy == "fixed" else StaticTree(choices)
            learned = learned_of(made, costs, starts)
        else:
            learned = by_cost(limits, costs, lookups=starts)
        self.start = lambda: MedusaDrafter(
            network=self.heads, learned=learned, limits=limits, costs=costs
        )

    def rounds(self, prompt, params, count, prefill_rows=64):
        return list(
            speculate(
                self.base,
                self.start(),
                prompt,
                Sampler(params=params, prompt=prompt),
                count,
                Profile(),
                prefill_rows=prefill_rows,
            )
        )

    def ids(self, *arguments) -> list[int]:
        return [token for found in self.rounds(*arguments) for token in found.token_ids]


def plain(prompt, params, count, capacity=128) -> list[int]:
    sampler = Sampler(params=params, prompt=prompt)
    base = StrictBase(capacity)
    return list(generate(base, prompt, sampler, count, Profile(), prefill_rows=64))


@pytest.mark.each_change(
    "half_right-*",
    "adversary-fixed-True",
    "oracle-static-False",
    "broken-fair-True",
    "guesser-dear-False",
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("policy", "lookups"),
    [("fixed", False), ("fixed", True), ("static", False), ("fair", True), ("dear", False)],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_token_ids_equal_plain_decoding(draft, policy, lookups):
    limits = (
        SpecOptions(choices=CHOICES).limits(60)
        if policy == "static"
        else TreeLimits(top_k=4, steps=3, verify_size=16)
    )
    setup = Setup(limits, policy, draft, lookups=lookups)
    for params in SAMPLINGS:
        for prompt in PROMPTS:
            assert setup.ids(prompt, params, 30) == plain(prompt, params, 30)
    assert setup.heads.passes > 0
    assert max(setup.base.tree_sizes) <= limits.verify_size


@settings(max_examples=40)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    limits=st.builds(
        TreeLimits,
        top_k=st.integers(1, VOCAB - 1),
        steps=st.integers(1, 5),
        verify_size=st.integers(1, 60),
    ),
    policy=st.sampled_from(["fixed", *COSTS]),
    draft=st.sampled_from(sorted(DRAFTS)),
    lookups=st.booleans(),
    room=st.integers(1, 40),
    prefill_rows=st.integers(1, 40),
    params=st.sampled_from(SAMPLINGS),
)
def test_token_ids_equal_plain_decoding_for_any_settings(
    prompt, limits, policy, draft, lookups, room, prefill_rows, params
):
    capacity = len(prompt) + room
    setup = Setup(limits, policy, draft, capacity=capacity, lookups=lookups)
    expected = plain(prompt, params, room, capacity)
    assert setup.ids(prompt, params, room, prefill_rows) == expected


def test_a_tree_has_every_head_on_every_path():
    """All nodes of a level have the same children; probabilities are products of the heads'."""
    setup = Setup(TreeLimits(top_k=2, steps=3, verify_size=11), draft="guesser")
    found = setup.rounds(PROMPTS[0], GREEDY, 8)[1]
    depths, mask = found.tree.layout()
    assert np.bincount(depths).tolist() == [1, 2, 4, 4]  # two nodes of a level have children
    for depth in (1, 2, 3):
        rows = found.tree.token_ids[depths == depth].reshape(-1, 2)
        assert (rows == rows[0]).all()
    logs = np.log(found.confidences)
    np.testing.assert_allclose(np.log(found.tree.probabilities), mask @ logs, atol=1e-5)


def test_right_heads_are_always_accepted():
    rounds = Setup(TreeLimits(top_k=1, steps=4, verify_size=5)).rounds(PROMPTS[0], GREEDY, 51)
    assert [len(found.token_ids) for found in rounds] == [1, *[5] * 10]


@pytest.mark.parametrize("draft", ["oracle", "guesser"])
def test_static_levels_with_more_parents_than_ranks(draft):
    setup = Setup(SpecOptions(choices=FULL).limits(60), "static", draft, choices=FULL)
    for params in SAMPLINGS:
        assert setup.ids(PROMPTS[0], params, 40) == plain(PROMPTS[0], params, 40)
    assert max(setup.base.tree_sizes) == 15


def test_losing_heads_pause():
    setup = Setup(TreeLimits(top_k=4, steps=3, verify_size=16), "dear", "adversary", capacity=400)
    assert setup.ids([5], GREEDY, 300) == plain([5], GREEDY, 300, 400)
    assert setup.heads.passes < 100


# ------------------------------------------------------------------------------ real engines
@pytest.mark.parametrize("precision", ["none", "int8", "int4"])
def test_an_engine_equals_torch(eagle_pairs, tmp_path, precision):
    from eagle_engines import draft_plan

    from edgellm.build.engine import build_engine

    pair = eagle_pairs("medusa")
    built = build_engine(
        "draft",
        pair.draft_bundle,
        tmp_path / "engine",
        draft_plan(precision),
        "onnxruntime",
        lambda _: None,
    )
    assert built.draft.num_heads == 3
    assert {kind: list(costs) for kind, costs in built.cost_ms.items()} == {"heads": ["1"]}
    assert (built.max_kv_cache_capacity, built.max_draft_tree_size, [*built.graphs]) == (
        0,
        0,
        ["heads"],
    )
    assert built.main_graphs[0].precision == {"none": "fp32"}.get(precision, precision)
    heads = open_heads(tmp_path / "engine" / "draft", built)
    feature = torch.randn(96, generator=torch.Generator().manual_seed(2))
    expected = log_probs(make_tensors(), feature, 3, 1)
    ids, found = heads.candidates(feature.numpy(), REAL_VOCAB)
    assert sorted(ids[1].tolist()) == list(range(REAL_VOCAB))
    error = found - np.take_along_axis(expected.numpy(), ids, 1)
    assert np.abs(error).mean() < {"none": 1e-5, "int8": 0.06, "int4": 0.3}[precision]


def test_requests_share_passes_of_the_heads(eagle_pairs, tmp_path):
    """Candidates equal those of a single request, tokens those of plain decoding."""
    from eagle_engines import BASE_PLAN, draft_plan

    from edgellm.build.engine import build_engine

    pair, engine = eagle_pairs("medusa"), tmp_path / "engine"
    for product, bundle, plan in (
        ("llm", pair.bundle, BASE_PLAN),
        ("draft", pair.draft_bundle, draft_plan("int8")),
    ):
        plan = dataclasses.replace(plan, max_batch_size=3)
        built = build_engine(product, bundle, engine, plan, "onnxruntime", lambda _: None)
    assert {kind: list(costs) for kind, costs in built.cost_ms.items()} == {"heads": ["1", "3"]}
    heads = open_heads(engine / "draft", built)
    features = np.random.default_rng(3).standard_normal((3, 96), np.float32)
    alone = [[each.copy() for each in heads.candidates(one, 5)] for one in features]
    together = heads.run_batch([HeadsPart(one, 5) for one in features])
    for found, expected in zip(together, alone, strict=True):
        assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    words = ["w20 w21 w22 w23", "w20 w21 w40", "w50 w51"]
    with LLM(engine, spec=SpecOptions(tree="fixed")) as llm:
        ask = {"sampling": GREEDY, "max_generate_length": 12}
        plain = [llm.generate(text, **ask, speculative=False) for text in words]
        found = [llm.generate(text, **ask) for text in words]
        sizes, run_batch = [], HeadsNetwork.run_batch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spec_budget, "_may_pay", lambda *_: True)
            patch.setattr(
                HeadsNetwork, "run_batch",
                lambda self, parts: (sizes.append(len(parts)), run_batch(self, parts))[1],
            )  # fmt: skip
            for answers in (plain, found):
                for _ in llm.together(answers):
                    pass
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert max(sizes) == 3


def test_the_method_is_the_manifests(eagle_pairs, command_here, tmp_path):
    pair = eagle_pairs("medusa")
    source, output = tmp_path / "in.json", tmp_path / "out.json"
    request = {"messages": [{"role": "user", "content": "w20 w21"}], "temperature": 0}
    source.write_text(json.dumps({"max_generate_length": 12, "requests": [request]}))

    def infer(engine: Path, *flags: object):
        output.unlink(missing_ok=True)
        folders = ("--engineDir", engine, "--inputFile", source, "--outputFile", output)
        return command_here("llm_inference", *folders, *flags)

    texts = []
    for flags in ((), ("--eagle",), ("--spec", "medusa", "--medusaChoices", "[[0],[1],[0,0]]")):
        result = infer(pair.engine, *flags)
        assert result.returncode == 0, result.stderr
        answer = json.loads(output.read_text())["responses"][0]
        assert ("spec_verify_count" in answer["timings"]) is bool(flags)
        texts.append(answer["output_text"])
    assert len(set(texts)) == 1
    result = infer(pair.engine, "--spec", "eagle")
    assert_one_line_error(result, "is of medusa", "give --spec medusa, or --eagle")
    result = infer(eagle_pairs("eagle3").engine, "--spec", "medusa")
    assert_one_line_error(result, "is of eagle3", "give --spec eagle, or --eagle")
    result = command_here("edgellm-inspect", pair.engine)
    assert (result.returncode, "3" in result.stdout) == (0, True), result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 4}, "--eagleDraftStep is 4 levels deep, the draft has 3 heads"),
        ({"choices": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))}, "the choices are 4 levels deep"),
        ({"top_k": 97}, "exceeds the draft's vocabulary of 96"),
    ],
)
def test_trees_that_the_heads_cannot_fill(eagle_pairs, options, message):
    with pytest.raises(LimitError, match=message):
        LLM(eagle_pairs("medusa").engine, spec=SpecOptions(network="medusa", **options))


def test_manifest_records_the_heads(eagle_pairs):
    manifest = load_engine(eagle_pairs("medusa").engine / "draft", DRAFT_ENGINE)
    assert (manifest.draft.method, manifest.draft.num_heads) == ("medusa", 3)
    assert manifest.draft.hidden_taps == (8,)
