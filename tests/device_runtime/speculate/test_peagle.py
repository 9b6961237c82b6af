"""P-EAGLE: mask tokens against torch, in one pass with a round's committed tokens; limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from eagle_reference import BASE_HIDDEN, VOCAB, Reference

from edgellm.core.errors import LimitError
from edgellm.core.manifest import DRAFT_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.draft import open_draft
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches, MaskRows
from edgellm.device_runtime.speculate.drafters.peagle import mask_rows
from edgellm.device_runtime.speculate.policy.tree_policy import TreeLimits

MASKS = MaskRows(95, 4)
ROUND_ROWS = 6


def open_caches(pair) -> DraftKVCaches:
    folder = pair.engine / "draft"
    return DraftKVCaches(
        network=open_draft(folder, load_engine(folder, DRAFT_ENGINE)), round_rows=ROUND_ROWS
    )


@pytest.fixture
def caches(eagle_pairs) -> DraftKVCaches:
    return open_caches(eagle_pairs("peagle"))


@pytest.mark.parametrize("name", ["peagle", "peagle_window"])
def test_predictions_equal_torch(eagle_pairs, name):
    """A prompt, whose last token is a separate pass, and rounds that overwrite the masks."""
    pair, random = eagle_pairs(name), torch.Generator().manual_seed(4)
    caches = open_caches(pair)
    reference = Reference(pair.draft_checkpoint, pair.base_checkpoint, pair.layout)
    own, length, sizes = caches.new_kv(), 0, []
    own.begin([20])
    for count in (9, 1, 3, 6):
        taps = torch.randn(count, 3 * BASE_HIDDEN, generator=random) * 2
        ids = torch.randint(VOCAB - 1, (count,), generator=random)
        own.observe(ids.numpy(), taps.numpy())
        for part in own.parts(6, MASKS):
            sizes.append(len(part.token_ids))
            (found,) = caches.network.run_batch([part])
        ids = torch.cat([ids, torch.full((4,), 95)])
        hidden = reference.fuse(torch.cat([taps, torch.zeros(4, taps.shape[1])]))
        positions = length + torch.arange(count + 4)
        mask = torch.ones(count + 4, count + 4).tril().bool()
        log_probs, _ = reference.forward(ids, hidden, positions, mask)
        length += count
        reference.drop_to(length)
        best = log_probs[-5:].topk(6)
        np.testing.assert_allclose(found.log_probs, best.values, atol=2e-4)
        np.testing.assert_array_equal(found.token_ids, reference.targets[best.indices])
        assert (own.length, own.kv.length) == (length, length)
    assert sizes == [8, 5, 5, 7, 10]


def test_fewer_tokens_are_predicted_at_the_end_of_the_cache(caches):
    capacity, own = caches.network.capacity, caches.new_kv()
    own.begin([20])
    for count, masks in ((capacity - 3, None), (1, 2), (1, 1), (1, 0)):
        own.observe(np.arange(count) % VOCAB, np.ones((count, 3 * BASE_HIDDEN), np.float32))
        for part in own.parts(6, MASKS):
            (found,) = caches.network.run_batch([part])
        assert masks is None or len(found.token_ids) == 1 + masks
    own.observe(np.zeros(1, np.int64), np.ones((1, 3 * BASE_HIDDEN), np.float32))
    assert list(own.parts(6, MASKS)) == []
    assert own.has_waiting


def test_trees_deeper_than_the_draft_predicts(eagle_pairs):
    engine = eagle_pairs("peagle").engine
    for options, message in (
        ({"steps": 6}, "--eagleDraftStep is 6 levels deep, the draft predicts 5"),
        (
            {"choices": tuple((0,) * n for n in range(1, 7))},
            "the choices are 6 levels deep, the draft predicts 5",
        ),
        ({"top_k": 41}, "exceeds the draft's vocabulary of 40"),
    ):
        with pytest.raises(LimitError, match=message):
            LLM(engine, spec=SpecOptions(network="peagle", **options))
    manifest = load_engine(engine / "draft", DRAFT_ENGINE)
    small = dataclasses.replace(manifest, max_draft_tree_size=4)
    with pytest.raises(LimitError, match="--eagleDraftStep 5 exceeds the draft engine's 4 tokens"):
        mask_rows(TreeLimits(steps=5), small)


def test_the_method_is_the_manifests(eagle_pairs):
    for name, wrong, right in (("peagle", "eagle", "peagle"), ("mtp", "peagle", "mtp")):
        with pytest.raises(Exception, match=f"is of {right}") as caught:
            LLM(eagle_pairs(name).engine, spec=SpecOptions(network=wrong))
        assert f"give --spec {right}, or --eagle" in caught.value.hint


def test_requests_share_the_draft_pass(eagle_pairs, tmp_path):
    from eagle_engines import for_several

    pair, greedy = eagle_pairs("peagle"), SamplingParams(temperature=0)
    engine = for_several(pair, tmp_path / "engine", 3)
    model, plain = LLM(engine, spec=SpecOptions(tree="fixed", verify_size=12)), LLM(pair.engine)
    prompts = ["w20 w21 w20 w21 w20", "w20 w21 w33", " ".join(f"w{i}" for i in range(10, 70))]
    answers = [model.generate(p, max_generate_length=20, sampling=greedy) for p in prompts]
    for _ in model.together(answers, 3):
        pass
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = plain.generate(prompt, max_generate_length=20, sampling=greedy)
        list(expected)
        assert answer.token_ids == expected.token_ids
