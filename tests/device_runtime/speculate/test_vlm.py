"""EAGLE drafts of vision-language bases: lossless, and they see images and their positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eagle_engines import EAGLE3
from eagle_reference import BASE_HIDDEN, VOCAB
from image_checkpoints import picture
from vlm_engines import Engines, build_vlm

from edgellm.contract import DRAFT_FOLDER, DraftEngineManifest, load_manifest
from edgellm.device_runtime import backends
from edgellm.device_runtime.llm import LLM
from edgellm.device_runtime.sampling import SamplingParams
from edgellm.device_runtime.session import DraftSession, ImageRows
from edgellm.device_runtime.speculate.options import SpecOptions

pytestmark = pytest.mark.usefixtures("one_thread")
# The layout of public drafts of Qwen2.5-VL: M-RoPE in the draft's config, too.
MROPE = replace(
    EAGLE3,
    config={
        **EAGLE3.config,
        "target_model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    },
)
NARROW = replace(EAGLE3, hidden=64, own_embedding=True, config={
    **EAGLE3.config, "target_hidden_size": BASE_HIDDEN,
})  # fmt: skip
PAIRS = {
    "qwen2_5_vl": ("qwen2_5_vl", MROPE),
    "qwen2_5_vl_text_positions": ("qwen2_5_vl", EAGLE3),
    "qwen3_vl": ("qwen3_vl", EAGLE3),
    "internvl": ("internvl", EAGLE3),
    "smolvlm_narrow_draft": ("smolvlm", NARROW),
}


@pytest.fixture(scope="module", params=PAIRS)
def engines(request, tmp_path_factory) -> Engines:
    return build_vlm(tmp_path_factory.mktemp(request.param), *PAIRS[request.param])


@pytest.fixture(scope="module")
def mrope_draft(tmp_path_factory) -> DraftSession:
    engines = build_vlm(tmp_path_factory.mktemp("mrope"), "qwen2_5_vl", MROPE)
    folder = engines.engine / DRAFT_FOLDER
    manifest = load_manifest(folder, DraftEngineManifest)
    assert manifest.draft.decoder.position_axes == 3
    assert manifest.draft.decoder.images is not None
    return backends.find("onnxruntime").open_draft_session(folder, manifest)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("tree", ["fixed", "cost"])
def test_speculated_answers_are_the_plain_ones(engines, tmp_path, temperature, tree):
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
            sampling=SamplingParams(temperature=temperature, top_p=1, top_k=0),
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


def _candidates(draft: DraftSession, ids: np.ndarray, shown: ImageRows) -> np.ndarray:
    hidden = np.random.default_rng(1).standard_normal((len(ids), BASE_HIDDEN), np.float32)
    draft.show(shown)
    return draft.run(ids, hidden, 0, np.arange(len(ids)), top_k=8).log_probs.copy()


def test_a_draft_reads_rows_of_images(mrope_draft):
    """Other rows, other candidates, from the image on; the text before does not see them."""
    ids = np.array([70, 71, VOCAB, VOCAB + 1, 72])
    rows = np.random.default_rng(2).standard_normal((2, BASE_HIDDEN), np.float32)
    none = np.zeros((0, 2, BASE_HIDDEN), np.float32)
    first = _candidates(mrope_draft, ids, ImageRows(rows, none))
    second = _candidates(mrope_draft, ids, ImageRows(rows[::-1], none))
    np.testing.assert_allclose(first[:2], second[:2], atol=1e-6)
    assert np.abs(first[2:] - second[2:]).max(axis=1).min() > 1e-3


def test_a_draft_turns_by_three_positions(mrope_draft):
    """Positions as in text change nothing, those of an image do; all moved alike do not."""
    ids = np.arange(70, 78)
    rows = np.zeros((1, BASE_HIDDEN), np.float32)
    none = np.zeros((0, 1, BASE_HIDDEN), np.float32)
    text = np.tile(np.arange(8), (3, 1))
    image = text.copy()
    image[1, 3:7] = [3, 3, 4, 4]
    found = {
        name: _candidates(mrope_draft, ids, ImageRows(rows, none, positions))
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


def test_a_narrow_draft_reads_placeholders(tmp_path: Path):
    engines = build_vlm(tmp_path, "smolvlm", NARROW)
    manifest = load_manifest(engines.engine / DRAFT_FOLDER, DraftEngineManifest)
    assert manifest.draft.decoder.images is None
