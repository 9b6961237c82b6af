"""KV caches in 4 bits with adapters, drafts, batches and stored contexts, for long prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from eagle_engines import BASE_PLAN, EAGLE3, draft_plan, export_pair
from lora_adapters import write_adapter

from edgellm.build.engine import build_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 300  # 128 have float16
PROMPT = " ".join(f"w{10 + at * at % 71}" for at in range(TOKENS))
GREEDY = {"sampling": SamplingParams(temperature=0), "max_generate_length": 12}
NAMES = None, "one", "two"
SPEC = SpecOptions(tree="fixed", top_k=2, verify_size=8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = export_pair(tmp_path_factory.mktemp("int4"), EAGLE3, max_position_embeddings=1024)
    roomy = {"max_input_len": 512, "kv_capacity": 1024, "max_batch_size": 3}
    base, draft = replace(BASE_PLAN, max_lora_rank=4, kv_cache="int4"), draft_plan()
    for product, bundle, plan in (
        ("llm", pair.bundle, base),
        ("draft", pair.draft_bundle, draft),
    ):
        sized = replace(plan, **roomy)
        build_engine(product, bundle, pair.engine, sized, "onnxruntime", lambda _: None)
    return pair


def _open(pair, tmp_path, **options):
    llm = LLM(pair.engine, context_reuse=True, **options)
    for seed, name in enumerate(NAMES[1:]):
        adapter = write_adapter(
            tmp_path / f"{name}-{id(llm)}", pair.base_checkpoint, seed=seed, rank=4
        )
        llm.load_adapter(name, adapter)
    return llm


def _answer(llm, lora=None, prompt=PROMPT, **options):
    answer = llm.generate(prompt, lora=lora, **GREEDY, **options)
    for _ in answer:
        pass
    return answer


def test_drafts_and_batches_are_lossless_with_adapters(pair, tmp_path):
    with _open(pair, tmp_path, spec=SPEC) as llm:
        plain = [_answer(llm, name, speculative=False).token_ids for name in NAMES]
        assert len({tuple(ids) for ids in plain}) > 1
        assert [_answer(llm, name).token_ids for name in NAMES] == plain
        answers = [llm.generate(PROMPT, lora=name, **GREEDY) for name in NAMES]
        for _ in llm.together(answers):
            pass
        assert [answer.token_ids for answer in answers] == plain
        assert all(answer.profile.rounds for answer in answers)


@pytest.mark.parametrize("lora", [None, "one"])
def test_stored_contexts_go_on_in_another_process(pair, tmp_path, lora):
    """As with sliding windows, a prompt must contain the stored context."""
    folder = SnapshotFolder(tmp_path / "contexts", {"base": "12", "draft": "34"})
    folder.prepare()
    with _open(pair, tmp_path, spec=SPEC) as llm:
        longer = f"{PROMPT} {_answer(llm, lora).text} w20 w21"
        assert folder.save(llm.kv_cache_manager.all_prefixes()) == 1
        expected = _answer(llm, lora, longer)
    with _open(pair, tmp_path, spec=SPEC) as again:
        for context in folder.load(again.kv_cache_manager.num_networks).contexts:
            assert context.parts[1].is_skipped  # the draft left out the start of the long prompt
            again.kv_cache_manager.pinned.add(context)
        found = _answer(again, lora, longer)
        assert found.token_ids == expected.token_ids
        assert max(counts.tree_size for counts in found.profile.rounds) > 1
        assert sum(found.profile.reused_tokens) == sum(expected.profile.reused_tokens) > TOKENS
