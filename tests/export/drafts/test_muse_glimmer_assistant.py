"""Muse-Glimmer's assistant, a DFlash draft, against transformers; lossless with its base."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from eagle_engines import EaglePair, build_drafted
from quantize_cases import write_text
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.block import open_block
from edgellm.device_runtime.networks.draft import DraftPart, DraftResult
from edgellm.device_runtime.speculate.policy import spec_budget
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, understand_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline.run import run_job

LAYERS, SIZE, VOCAB, WINDOW = 6, 5, 96, 7
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "block_size": SIZE,
    "mask_token_id": 95,
    "target_layer_ids": [0, 2, 4],
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
pytestmark = pytest.mark.usefixtures("one_thread")


def make_assistant(folder: Path, **changes: object) -> Path:
    torch.manual_seed(1)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_enc.weight")):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> EaglePair:
    folder = tmp_path_factory.mktemp("muse")
    tiny = {**models.find("muse_glimmer_text").TINY, "num_hidden_layers": LAYERS}
    base, draft = make_checkpoint(folder / "base", **tiny), make_assistant(folder / "draft")
    return build_drafted(folder, base, draft)


def expected(pair: EaglePair, taps: torch.Tensor, newest: int, sizes: list[int]) -> np.ndarray:
    """Log-probabilities of a block after a text, by the steps of transformers' generator."""
    model = MuseGlimmerAssistantModel.from_pretrained(
        pair.draft_checkpoint, attn_implementation="eager"
    )
    shared = load_file(pair.base_checkpoint / "model.safetensors")
    block = torch.tensor([newest, *[SIZES["mask_token_id"]] * (SIZE - 1)])
    cache, end = DFlashCache(config=model.config), 0
    cache.activate_past_recording()
    for size in sizes:
        cache.set_previous_accepted_tokens(size)
        if end:
            cache.crop(-SIZE)
        end += size
        with torch.no_grad():
            found = model(
                noise_embeds=shared["model.embed_tokens.weight"][block][None],
                context_hidden_states=taps[None, end - size : end],
                position_ids=torch.arange(end - size, end + SIZE)[None],
                attention_mask=torch.ones(1, end + SIZE, dtype=torch.int64),
                cache=cache,
            )
    return (found.last_hidden_state[0] @ shared["lm_head.weight"].T).log_softmax(-1).numpy()


TAPS = torch.randn(24, 3 * 96, generator=torch.Generator().manual_seed(1))


def computed(engine: Path, sizes: list[int]) -> DraftResult:
    """The block after `TAPS`, in chunks."""
    manifest = load_engine(engine / "draft", DRAFT_ENGINE)
    assert (manifest.draft.method, manifest.draft.hidden_taps) == ("dflash", (1, 3, 5))
    session = open_block(engine / "draft", manifest)
    ids, at = np.arange(20, 44), 0
    for size in sizes:
        own = slice(at, at + size)
        part = DraftPart(
            kv=session.kv,
            token_ids=ids[own],
            write_index=at,
            output_rows=np.arange(size, size + SIZE),
            top_k=VOCAB,
            taps=TAPS[own].numpy(),
        )
        (found,) = session.run_batch([part])
        at += size
    return found


@pytest.mark.parametrize("sizes", [[24], [1, 3, 20], [20, 4]], ids=str)
def test_an_engine_equals_transformers(pair, sizes):
    """In one chunk and in several; the text is longer than the window."""
    found = computed(pair.engine, sizes)
    wanted = np.take_along_axis(expected(pair, TAPS, 43, sizes), found.token_ids, 1)
    assert np.ptp(wanted) > 3
    np.testing.assert_allclose(found.log_probs, wanted, atol=2e-4)


@pytest.mark.nightly
def test_a_quantized_assistant_is_close(pair, tmp_path):
    """The result is a DFlash draft with the same window."""
    job = Job(
        model_dir=str(pair.draft_checkpoint),
        output_dir=tmp_path / "quantized",
        quantization="fp8",
        base_model_dir=str(pair.base_checkpoint),
        calib_dataset=str(write_text(tmp_path / "text.jsonl")),
        num_samples=6,
        seq_len=40,
        held_out=2,
        device="cpu",
    )
    run_job(job, lambda *_: None)
    made = build_drafted(tmp_path, pair.base_checkpoint, job.output_dir)
    specs = [load_engine(each.engine / "draft", DRAFT_ENGINE).draft for each in (made, pair)]
    assert specs[0].block == specs[1].block
    assert [each.decoder.sliding_window for each in specs] == [WINDOW + 1] * 2
    found = computed(made.engine, [24])
    wanted = expected(pair, TAPS, 43, [24])
    error = found.log_probs - np.take_along_axis(wanted, found.token_ids, 1)
    spread = wanted - wanted.mean(axis=1, keepdims=True)
    assert 1e-4 < np.linalg.norm(error) / np.linalg.norm(spread) < 0.2


def test_outputs_equal_plain_decoding(pair, monkeypatch):
    # By its times, drafting with a model as small as its draft would rarely pay.
    monkeypatch.setattr(spec_budget, "_may_pay", lambda *_: True)
    llm = LLM(pair.engine, spec=SpecOptions(tree="fixed", top_k=4, verify_size=12))
    rounds = []
    for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=7)):
        plain, found = (
            llm.generate("w20 w31", sampling=sampling, max_generate_length=40, speculative=drafts)
            for drafts in (False, True)
        )
        list(plain), list(found)
        assert found.token_ids == plain.token_ids
        rounds += found.profile.rounds
    assert max(counts.tree_size for counts in rounds) > 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0 is not positive"),
        ({"block_size": 1}, "block_size = 1 predicts no token"),
        ({"target_layer_ids": [0, 5]}, "the last layer's output"),
        ({"rope_parameters": {"rope_type": "default"}, "wisdom": 2}, "does not understand: wisdom"),
        ({"hidden_size": 80}, "draft is for a base of hidden size 80"),
    ],
)
def test_wrong_configs_are_rejected(pair, tmp_path, changes, message):
    path = tmp_path / "config.json"
    config = json.loads((pair.draft_checkpoint / "config.json").read_text())
    path.write_text(json.dumps({**config, **changes}))
    weights = pair.draft_checkpoint / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    base = open_checkpoint(str(pair.base_checkpoint), tokenizer=False)
    with pytest.raises(EdgeLLMError, match=message):
        understand_draft(open_draft(str(tmp_path)), base, DraftOptions("fp32"))


def test_a_config_may_have_few_keys(pair, tmp_path):
    """The published sizes are the defaults, as in transformers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "muse_glimmer_assistant"}))
    weights = pair.draft_checkpoint / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    found, theirs = open_draft(str(tmp_path)).config, MuseGlimmerAssistantConfig()
    for key in (*SIZES.keys() - {"sliding_window"}, "rms_norm_eps"):
        assert found[key] == getattr(theirs, key)
    assert found["rope_parameters"]["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert found["sliding_window"] == theirs.sliding_window + 1


def test_an_assistant_is_rejected_as_a_base(pair):
    draft = open_draft(str(pair.draft_checkpoint))
    with pytest.raises(EdgeLLMError, match="is a draft, not a base"):
        understand_draft(draft, draft, DraftOptions("fp32"))
