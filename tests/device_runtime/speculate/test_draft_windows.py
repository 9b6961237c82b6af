"""Drafts with sliding windows cache only their windows: they draft as with a full cache."""

from __future__ import annotations

import dataclasses
import shutil
from collections import defaultdict

import numpy as np
import pytest
import torch
from block_reference import WINDOWED, make_blocks
from conftest import make_checkpoint
from eagle_engines import PEAGLE, WINDOW
from eagle_reference import BASE_HIDDEN, VOCAB, Reference, make_draft
from manifests import read_manifest, write_manifest

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.manifest import DRAFT_ENGINE, load_engine
from edgellm.core.model_spec import cache_bytes
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.engine import step
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.device_runtime.networks.block import open_block
from edgellm.device_runtime.networks.draft import open_draft
from edgellm.device_runtime.speculate.draft_cache import DraftKVCaches
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline import open_checkpoint as checkpoints
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm

SIZE, CAPACITY, TOGETHER, PAGE, PASS, NODES = 40, 1024, 2, 64, 256, 90
PLAN = Plan(
    max_input_len=900,
    kv_capacity=CAPACITY,
    threads=1,
    max_verify_tree_size=12,
    max_batch_size=TOGETHER,
    quantize="none",
    options=CpuOptions("edgellm"),
    checks=False,
)
_KEYS = {"sliding_window": SIZE, "max_position_embeddings": CAPACITY}
EAGLE = dataclasses.replace(WINDOW, config={**WINDOW.config, **_KEYS}, window=SIZE)
MASKED = dataclasses.replace(
    PEAGLE,
    config={**PEAGLE.config, **_KEYS, "layer_types": ["sliding_attention"] * 2},
    window=SIZE,
    sliding=(0, 1),
)
_BLOCKS = WINDOWED["causal_window"]
BLOCKS = dataclasses.replace(
    _BLOCKS, sizes={**_BLOCKS.sizes, **_KEYS}, window=SIZE, config={**_BLOCKS.config, **_KEYS}
)
# Its trees have more nodes than the positions before a window that stay cached.
WIDE = SpecOptions(tree="fixed", steps=8, top_k=10, verify_size=12)
SPEC = {"eagle": WIDE, "peagle": SpecOptions(tree="fixed", verify_size=12)}
SPEC["blocks"] = SPEC["peagle"]
MAKE = {
    "eagle": lambda folder: make_draft(folder, EAGLE),
    "peagle": lambda folder: make_draft(folder, MASKED),
    "blocks": lambda folder: make_blocks(folder, BLOCKS),
}
_NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("peagle", "blocks")]
IDS = np.random.default_rng(5).integers(9, 95, CAPACITY)


def build(product, bundle, engine, plan):
    build_engine(product, bundle, engine, plan, "onnxruntime", lambda _: None)


@pytest.fixture(scope="module", params=["eagle", *_NIGHTLY])
def engine(request, tmp_path_factory):
    """A base with full attention and a draft with windows, for batches of two."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {
        **models.find("llama").TINY,
        "num_hidden_layers": 8,
        "max_position_embeddings": CAPACITY,
    }
    base = make_checkpoint(folder / "base", **{**sizes, "tie_word_embeddings": True})
    draft = MAKE[request.param](folder / "draft")
    source, options = checkpoints.open_checkpoint(str(base)), DraftOptions("fp32")
    export_llm(source, folder / "bundle", ExportOptions(dtype="fp32", draft_model_dir=str(draft)))
    export_draft(checkpoints.open_draft(str(draft)), source, folder / "draft_bundle", options)
    build("llm", folder / "bundle", folder / request.param, PLAN)
    plan = dataclasses.replace(PLAN, max_verify_tree_size=0, max_draft_tree_size=NODES)
    build("draft", folder / "draft_bundle", folder / request.param, plan)
    return folder / request.param


@pytest.fixture(scope="module")
def whole(engine):
    """The same engine with a full cache of its draft."""
    folder = shutil.copytree(engine, engine.parent / "whole" / engine.name)
    manifest = read_manifest(folder / "draft")
    del manifest["spec"]["decoder"]["kv"]["pages"]["pass_rows"]
    write_manifest(folder / "draft", manifest)
    return folder


@pytest.fixture
def drafted(monkeypatch):
    """All verified trees: token ids and parents, by prompt.

    A draft's trial would prefill fewer positions, by the time that it takes.
    """
    monkeypatch.setattr(SpecGate, "is_retrial", False)
    found = defaultdict(list)
    verify = step._verification_input

    def record(sequence, tree):
        trees = found[tuple(sequence.prompt.token_ids)]
        trees.append((tree.token_ids.tolist(), tree.parents.tolist()))
        return verify(sequence, tree)

    monkeypatch.setattr(step, "_verification_input", record)
    return found


def trees_of(drafted):
    found = dict(drafted)
    drafted.clear()
    return found


def words(ids):
    return " ".join(f"w{token}" for token in ids)


def answer(llm, ids, **options):
    options = {"max_generate_length": 40, "sampling": SamplingParams(temperature=0)} | options
    grown = llm.generate_text(
        GenerationRequest(text=words(ids), add_special_tokens=False, stop=(), **options)
    )
    list(grown)
    return grown


def network_of(folder):
    opened = open_block if folder.name == "blocks" else open_draft
    return opened(folder / "draft", load_engine(folder / "draft", DRAFT_ENGINE))


def test_turns_of_a_conversation(engine, whole, drafted):
    """The next turn, one that drops the output, and one that differs before the windows."""
    spec = SPEC[engine.name]
    with LLM(engine, context_reuse=True, spec=spec) as llm, LLM(whole, spec=spec) as other:
        first = IDS[:500].tolist()
        one = answer(llm, first, max_generate_length=4)
        second = [*first, *one.token_ids, *IDS[50:60].tolist()]
        third, changed = [*first, *IDS[30:50].tolist()], [*first[:100], 9, *first[101:]]
        drafted.clear()
        for prompt, reused in ((second, 503), (third, 499), (changed, 0)):
            found = answer(llm, prompt, max_generate_length=90)
            trees = trees_of(drafted)
            assert answer(other, prompt, max_generate_length=90).token_ids == found.token_ids
            assert trees_of(drafted) == trees
            assert any(len(ids) > 1 for ids, _ in trees[tuple(prompt)])
            assert found.profile.reused_tokens == [reused]
        ends = [one.kvs[1] for one in llm._kv_cache_manager._finished.all]
        assert len(ends) > 1
        assert not any(kv.has_waiting and kv._waiting[0].taps.nbytes > 1e5 for kv in ends)


def test_batches(engine, whole, drafted):
    spec = SPEC[engine.name]
    prompts = [words(IDS[at : at + 400].tolist()) for at in (0, 60, 120)]
    ask = {"max_generate_length": 60, "sampling": SamplingParams(temperature=0)}
    with LLM(engine, spec=spec) as llm, LLM(whole, spec=spec) as other:
        found = [one.token_ids for one in llm.generate_batch(prompts, **ask)]
        trees = trees_of(drafted)
        assert [one.token_ids for one in other.generate_batch(prompts, **ask)] == found
        assert trees_of(drafted) == trees
        assert any(len(ids) > 1 for each in trees.values() for ids, _ in each)


def test_pinned_prompts_and_snapshots(engine, whole, drafted, tmp_path):
    """A system prompt is pinned before the draft frees its positions; a server loads it again."""
    system, spec = IDS[:450].tolist(), SPEC[engine.name]
    saved = SnapshotFolder(tmp_path / "saved", {"base": "hash"})
    saved.prepare()
    with LLM(engine, spec=spec) as llm, LLM(whole, spec=spec) as other:
        for tail in (IDS[500:900].tolist(), IDS[300:330].tolist()):
            ids = [*system, *tail]
            found = answer(llm, ids, system_prompt=words(system))
            assert found.warnings == []
            trees = trees_of(drafted)
            assert answer(other, ids).token_ids == found.token_ids
            assert trees_of(drafted) == trees
        assert 449 <= found.profile.reused_tokens[0] <= 450
        (pinned,) = llm._kv_cache_manager.pinned.all
        saved.save([pinned])
        (loaded,) = saved.load(2).contexts
        assert [part.min_length for part in loaded.parts] == [p.min_length for p in pinned.parts]
        assert loaded.parts[1].min_length > 0
        short = loaded.parts[1].min_length - 1
        assert loaded.usable([*system[:short], 9], 2) == 0
        assert loaded.usable([*system, 9], 2) >= 449


def test_memory_is_bounded(engine):
    """Running sequences hold the window and one pass, whatever the length."""
    network = network_of(engine)
    caches = DraftKVCaches(network=network, round_rows=17)
    trailing = network.max_pass_tokens - PASS
    pools = [pool for pool in network._swapper.pool._pools if pool.is_bounded]
    held = -(-(SIZE + 64 + network.max_pass_tokens) // PAGE) + 1
    assert (len(pools), trailing) == (1, {"eagle": 0, "peagle": 4, "blocks": 6}[engine.name])
    kv = caches.new_kv()
    kv.begin([20])
    random = np.random.default_rng(1)
    for count in (700, 5, 200):
        taps = random.random((count, 3 * BASE_HIDDEN), np.float32)
        kv.observe(random.integers(9, 90, count), taps)
        for part in kv.parts(4):
            rows = len(part.token_ids)
            block = np.arange(rows, rows + 6) if engine.name == "blocks" else part.output_rows
            network.run_batch([dataclasses.replace(part, output_rows=block)])
            assert len(pools[0]._uses) - len(pools[0]._free) <= held
    first = (705 - SIZE - 64) // PAGE * PAGE  # before the last pass
    assert kv.min_length == first + SIZE
    kv.free()
    assert len(pools[0]._uses) == len(pools[0]._free)
    spec = load_engine(engine / "draft", DRAFT_ENGINE).draft.decoder.kv
    pages = dataclasses.replace(spec.pages, windows=(SIZE,) * spec.num_layers)
    bounded = dataclasses.replace(spec, pages=pages)
    assert cache_bytes(bounded, 1 << 15) == cache_bytes(bounded, 1 << 12)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("engine", ["eagle"], indirect=True)
def test_logits_equal_torch_after_positions_were_freed(engine):
    network, folder = network_of(engine), engine.parent
    reference = Reference(folder / "draft", folder / "base", EAGLE)
    caches = DraftKVCaches(network=network, round_rows=17)
    kv, random, length = caches.new_kv(), torch.Generator().manual_seed(4), 0
    kv.begin([20])
    for count in (520, 3):
        taps = torch.randn(count, 3 * BASE_HIDDEN, generator=random)
        ids = torch.randint(VOCAB - 1, (count,), generator=random)
        kv.observe(ids.numpy(), taps.numpy())
        for part in kv.parts(6):
            (found,) = network.run_batch([part])
        mask = torch.ones(count, count).tril().bool()
        positions = length + torch.arange(count)
        log_probs, _ = reference.forward(ids, reference.fuse(taps), positions, mask)
        length += count
        np.testing.assert_allclose(found.log_probs, log_probs[-1:].topk(6).values, atol=2e-4)
    assert kv.kv.min_length > SIZE
