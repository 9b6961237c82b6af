"""Drafts of vision-language bases: lossless; EAGLE drafts attend to images at their positions."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eagle_engines import EAGLE3
from eagle_reference import BASE_HIDDEN, VOCAB
from image_checkpoints import picture
from vlm_engines import MROPE, Engines, build_vlm

from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, load_engine
from edgellm.core.model_spec import SPARE_ROWS, is_bounded
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.arrays import ImageRows
from edgellm.device_runtime.networks.draft import DraftNetwork, open_draft
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = pytest.mark.usefixtures("one_thread")
NARROW = replace(
    EAGLE3,
    hidden=64,
    own_embedding=True,
    config={**EAGLE3.config, "target_hidden_size": BASE_HIDDEN},
)
PAIRS = {
    "qwen2_5_vl": ("qwen2_5_vl", MROPE),
    "qwen2_5_vl_text_positions": ("qwen2_5_vl", EAGLE3),
    "qwen3_vl": ("qwen3_vl", EAGLE3),
    "qwen3_vl_moe": ("qwen3_vl_moe", EAGLE3),
    "qwen3_5": ("qwen3_5", EAGLE3),
    "qwen3_5_mtp": ("qwen3_5", "mtp"),
    "gemma3": ("gemma3", EAGLE3),
    "gemma4": ("gemma4", EAGLE3),
    "gemma4_31b": ("gemma4_31b", EAGLE3),
    "gemma4_assistant": ("gemma4", "assistant"),
    "gemma4_unified_assistant": ("gemma4_unified", "assistant"),
    "mistral3": ("mistral3", EAGLE3),
    "lfm2_vl": ("lfm2_vl", EAGLE3),
    "minicpmv4_6": ("minicpmv4_6", EAGLE3),
    "minicpmv4_6_mtp": ("minicpmv4_6", "mtp"),
    "minicpmv4_7": ("minicpmv4_7", EAGLE3),
    "minicpmv4_7_mtp": ("minicpmv4_7", "mtp"),
    "internvl": ("internvl", EAGLE3),
    "smolvlm_narrow_draft": ("smolvlm", NARROW),
    "qwen2_5_vl_heads": ("qwen2_5_vl", "medusa"),
}


@pytest.fixture(scope="module", params=PAIRS)
def engines(request, tmp_path_factory) -> Engines:
    return build_vlm(tmp_path_factory.mktemp(request.param), *PAIRS[request.param])


@pytest.fixture(scope="module")
def mrope_draft(tmp_path_factory) -> DraftNetwork:
    engines = build_vlm(tmp_path_factory.mktemp("mrope"), "qwen2_5_vl", MROPE)
    folder = engines.engine / DRAFT_FOLDER
    manifest = load_engine(folder, DRAFT_ENGINE)
    assert manifest.draft.decoder.position_axes == 3
    assert manifest.draft.decoder.images is not None
    return open_draft(folder, manifest)


@pytest.mark.each_change(
    "qwen2_5_vl-cost-1", "gemma3-fixed-1", "qwen3_5_mtp-fixed-0", "smolvlm_narrow_draft-fixed-0"
)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("tree", ["fixed", "cost"])
def test_speculative_outputs_equal_plain_decoding(engines, tmp_path, temperature, tree):
    for name, size in (("a", (33, 21)), ("b", (16, 60))):
        picture(*size, seed=ord(name)).save(tmp_path / f"{name}.png")
    llm = LLM(
        engines.engine,
        spec=SpecOptions(lookups=("ngram",), top_k=4, steps=3, verify_size=12, tree=tree),
        multimodal_engine_dir=engines.visual_engine,
    )

    def ask(*items: str, speculative: bool) -> tuple[list[int], int]:
        content = [
            {"type": "image", "image": str(tmp_path / item)}
            if item.endswith(".png")
            else {"type": "text", "text": item}
            for item in items
        ]
        answer = llm.generate(
            [{"role": "user", "content": content}],
            sampling=SamplingParams(temperature=temperature, top_p=1, top_k=0, seed=42),
            max_generate_length=24,
            speculative=speculative,
        )
        list(answer)
        return answer.token_ids, len(answer.profile.rounds)

    for items in (("a.png", "w1 w2"), ("w3", "b.png", "w4", "a.png", "w5"), ("w6 w7",)):
        plain, _ = ask(*items, speculative=False)
        speculated, rounds = ask(*items, speculative=True)
        assert speculated == plain
        assert rounds > 0 or len(plain) == 1


@pytest.mark.each_change("qwen2_5_vl-", "qwen2_5_vl-reuse", "gemma3-reuse", "qwen3_5_mtp-reuse")
@pytest.mark.parametrize("reuses", [False, True], ids=["", "reuse"])
def test_conversation_about_images(engines, tmp_path, reuses):
    """Each attends to its own image; `a` and `b` have the same ids and positions."""
    for name, size in (("a", (33, 21)), ("b", (33, 21))):
        picture(*size, seed=ord(name)).save(tmp_path / name, "png")
    llm = LLM(
        engines.engine,
        spec=SpecOptions(top_k=4, steps=3, verify_size=12, tree="fixed"),
        multimodal_engine_dir=engines.visual_engine,
        context_reuse=reuses,
    )

    def ask(name: str, *, speculative: bool = True):
        items = [{"type": "image", "image": tmp_path / name}] if name else []
        content = [*items, {"type": "text", "text": "w1 w2"}]
        return llm.generate(
            [{"role": "user", "content": content}],
            sampling=SamplingParams(temperature=0),
            max_generate_length=12,
            speculative=speculative,
        )

    alone = {}
    for name in ("a", "b", ""):
        answer = ask(name, speculative=False)
        list(answer)
        alone[name] = answer.token_ids
    for speculative in (True, False):
        answers = {name: ask(name, speculative=speculative or name == "b") for name in alone}
        for _ in itertools.zip_longest(*answers.values()):
            pass
        assert {name: answer.token_ids for name, answer in answers.items()} == alone


def _common(ones: list, others: list) -> int:
    pairs = zip(ones, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(others))


@pytest.mark.each_change("qwen2_5_vl", "gemma3", "qwen3_5_mtp")
def test_cached_images_are_reused_and_never_confused(engines, tmp_path):
    """Several questions, plain and speculative; `b` has the size of `a`, hence the same ids.

    Recurrent layers go on at the end of an earlier request; windows free earlier blocks.
    """
    for name, size in (("a", (33, 21)), ("b", (33, 21)), ("c", (16, 60))):
        picture(*size, seed=ord(name)).save(tmp_path / name, "png")
    options = {"multimodal_engine_dir": engines.visual_engine}
    spec = SpecOptions(top_k=4, steps=3, verify_size=12, tree="fixed")
    llm = LLM(engines.engine, spec=spec, context_reuse=True, **options)
    fresh = LLM(engines.engine, **options)
    assert llm._drafters is not None
    has_cache, pages = bool(llm._drafters.caches), llm.manifest.decoder.kv.pages  # heads: none
    frees = pages is not None and is_bounded(pages, llm.manifest.max_kv_cache_capacity)
    is_recurrent = llm.manifest.decoder.recurrent is not None
    vocabulary, base, draft = llm.manifest.decoder.vocab_size, [], []
    user = functools.partial(_question, tmp_path)

    def ask(images: str, messages: list, *, speculative: bool) -> int:
        """Number of reused positions, which must be all cached ones, by the pictures' names."""
        nonlocal base, draft
        answers = [
            model.generate(
                messages, sampling=SamplingParams(temperature=0), max_generate_length=6, **more
            )
            for model, more in ((llm, {"speculative": speculative}), (fresh, {}))
        ]
        for answer in answers:
            list(answer)
        found, expected = answers
        assert found.token_ids == expected.token_ids
        keys = _keys(images, found, vocabulary)
        held = _common(keys, base)
        if speculative and has_cache:
            held = min(held, max(_common(keys, draft) - 1, 0))
        (reused,) = found.profile.reused_tokens
        longest = min(held, len(keys) - 1)
        # A draft's last position may wait for its next token, which may then be any.
        waiting = min(longest + (speculative and has_cache), _common(keys, base), len(keys) - 1)
        is_freed = frees and not reused and len(base) - longest > SPARE_ROWS
        assert is_freed or reused in (longest, waiting) or (is_recurrent and reused < longest)
        base = [*keys, *found.token_ids[:-1]]
        draft = [*keys, *found.token_ids] if speculative else draft
        messages.append({"role": "assistant", "content": found.text})
        return sum(isinstance(key, tuple) for key in keys[:reused])

    for speculative in (True, False, True):
        ask("a", [user("a", "w1 w2")], speculative=speculative)
        talk = [user("a", "w3")]
        size = ask("a", talk, speculative=speculative)
        talk.append(user("w4", "c", "w5"))
        again = ask("ac", talk, speculative=speculative)
        assert again > 0
        assert is_recurrent or again == size
        assert ask("b", [user("b", "w3")], speculative=speculative) == 0
        assert ask("", [user("w3")], speculative=speculative) == 0
    ask("a", [user("a", "w3")], speculative=True)
    ask("b", [user("b", "w3")], speculative=False)
    reused = ask("b", [user("b", "w6")], speculative=True)
    assert (reused == 0) is has_cache, "the draft's cache holds rows of `a`"


def _keys(images: str, found: RequestOutput, vocabulary: int) -> list:
    """Token ids of a prompt; rows of images are pairs of name and row."""
    shown = [
        (name, row)
        for name, count in zip(images, found.profile.image_tokens, strict=True)
        for row in range(count)
    ]
    ids = found.prompt.token_ids
    return [shown[token - vocabulary] if token >= vocabulary else token for token in ids]


def _question(folder: Path, *items: str) -> dict:
    """A question of pictures, whose names are one letter, and words."""
    content = [
        {"type": "image", "image": str(folder / item)}
        if item in "abc"
        else {"type": "text", "text": item}
        for item in items
    ]
    return {"role": "user", "content": content}


def _candidates(draft: DraftNetwork, ids: np.ndarray, shown: ImageRows) -> np.ndarray:
    hidden = np.random.default_rng(1).standard_normal((len(ids), BASE_HIDDEN), np.float32)
    draft.kv.images = shown
    return draft.run(ids, hidden, 0, np.arange(len(ids)), top_k=8).log_probs.copy()


def test_a_draft_attends_to_image_tokens(mrope_draft):
    """Other images change the candidates from the image on, not those of the text before."""
    ids = np.array([70, 71, VOCAB, VOCAB + 1, 72])
    rows = np.random.default_rng(2).standard_normal((2, BASE_HIDDEN), np.float32)
    none = np.zeros((0, 2, BASE_HIDDEN), np.float32)
    first = _candidates(mrope_draft, ids, ImageRows(embeds=rows, deepstack=none, keys={}))
    second = _candidates(mrope_draft, ids, ImageRows(embeds=rows[::-1], deepstack=none, keys={}))
    np.testing.assert_allclose(first[:2], second[:2], atol=1e-6)
    assert np.abs(first[2:] - second[2:]).max(axis=1).min() > 1e-3


def test_draft_applies_mrope(mrope_draft):
    """Image positions change the output; text positions and a common offset do not."""
    ids = np.arange(70, 78)
    rows = np.zeros((1, BASE_HIDDEN), np.float32)
    none = np.zeros((0, 1, BASE_HIDDEN), np.float32)
    text = np.tile(np.arange(8), (3, 1))
    image = text.copy()
    image[1, 3:7] = [3, 3, 4, 4]
    found = {
        name: _candidates(
            mrope_draft, ids, ImageRows(embeds=rows, deepstack=none, positions=positions, keys={})
        )
        for name, positions in {
            "none": None,
            "text": text,
            "moved": text + 5,
            "image": image,
        }.items()
    }
    np.testing.assert_allclose(found["text"], found["none"], atol=1e-6)
    np.testing.assert_allclose(found["moved"], found["none"], atol=1e-4)
    assert np.abs(found["image"] - found["none"]).max() > 1e-3


def test_narrow_draft_takes_placeholder_tokens(tmp_path: Path):
    engines = build_vlm(tmp_path, "smolvlm", NARROW)
    manifest = load_engine(engines.engine / DRAFT_FOLDER, DRAFT_ENGINE)
    assert manifest.draft.decoder.images is None
