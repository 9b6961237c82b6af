"""`edgellm-train-draft` for vision-language models: images, M-RoPE, deepstack."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from image_checkpoints import picture
from vlm_engines import Reference, make_vlm

from edgellm.core.errors import EdgeLLMError
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.multimodal import processors
from edgellm.multimodal.images import open_image
from edgellm.tools.train_draft import base as base_module
from edgellm.tools.train_draft.base import Rows, load_base, padded
from edgellm.tools.train_draft.checkpoint_writers import draft_shape, start_from_base, write_draft
from edgellm.tools.train_draft.data.corpus import (
    Generation,
    Sample,
    answer_prompts,
    read_conversations,
    stored_answers,
)
from edgellm.tools.train_draft.data.generate import generate
from edgellm.tools.train_draft.data.hidden_states import TappedBase
from edgellm.tools.train_draft.methods.eagle_network import Draft
from edgellm.tools.train_draft.train import Recipe
from edgellm.tools.train_draft.training_run import Job, run

pytestmark = pytest.mark.usefixtures("one_thread", "in_float32")
CPU = torch.device("cpu")


@pytest.fixture
def in_float32(monkeypatch):
    """Compute in float32: equal on all processors, without near ties."""
    monkeypatch.setattr(base_module, "compute_dtype", lambda _: torch.float32)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm"])
def checkpoint(request, tmp_path_factory) -> Path:
    return make_vlm(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def deep_checkpoint(request, tmp_path_factory) -> Path:
    """A checkpoint with enough layers for the hidden taps of a draft."""
    folder = tmp_path_factory.mktemp(f"deep_{request.param}")
    return make_vlm(folder / "base", request.param, num_hidden_layers=8)


def _user(*items: str) -> dict[str, Any]:
    """Return a user message; names of .png files become images."""
    content = [
        {"type": "image", "image": item}
        if item.endswith(".png")
        else {"type": "text", "text": item}
        for item in items
    ]
    return {"role": "user", "content": content}


@pytest.fixture
def data(tmp_path) -> Path:
    """Prompts with zero, one and two images, and a conversation with an answer."""
    (tmp_path / "pictures").mkdir()
    for name, size in (("a", (33, 21)), ("b", (16, 60)), ("c", (33, 21))):
        picture(*size, seed=ord(name)).save(tmp_path / f"pictures/{name}.png")
    lines = [
        [_user("pictures/a.png", "w1 w2")],
        [_user("w3 w4")],
        [_user("w3", "pictures/b.png", "w4", "pictures/a.png", "w5")],
        [_user("pictures/c.png", "w1 w2")],  # same tokens as the first
        [_user("pictures/b.png", "w6"), {"role": "assistant", "content": "w7 w8 w9 w10 w11"}],
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return path


def test_outputs_equal_those_of_transformers(checkpoint, data):
    base = load_base(str(checkpoint), CPU)
    _, prompts = read_conversations([data], base)
    assert [len(prompt.pictures) for prompt in prompts] == [1, 0, 2, 1]
    assert prompts[0].ids == prompts[3].ids
    found = dict(
        generate(base, prompts, stop_ids=frozenset([2]), max_new_tokens=12, temperature=0.0,
                 batch=3, seed=0)
    )  # fmt: skip
    processor, reference = processors.load(checkpoint), Reference(checkpoint)
    for index, prompt in enumerate(prompts):
        shown = [
            processor.prepare(open_image(one.source, Path("/nowhere"))) for one in prompt.pictures
        ]
        expected = reference.answer(
            list(prompt.ids), [one.pixels for one in shown], [one.grid for one in shown], 12
        )
        assert found[index] == expected
    assert found[0] != found[3]


def test_hidden_states_include_final_states_and_image_embeddings(checkpoint, data):
    base = load_base(str(checkpoint), CPU)
    ((sample,), prompts) = read_conversations([data], base)
    ids, attends = padded([sample.ids, prompts[1].ids], left=False)
    features = TappedBase(base, (1, 2))(Rows(ids, attends, (sample.prompt.pictures, ())))
    assert features.shape == (2, ids.shape[1], 4, base.config.hidden_size)
    reference = Reference(checkpoint).model
    whole = _final_state(reference, checkpoint, sample)
    length = len(sample.ids)
    torch.testing.assert_close(features[0, :length, 2].float(), whole, atol=2e-2, rtol=2**-7)
    is_image = ids[0] == reference.config.image_token_id
    embedded = base.embedding[ids[0]].bfloat16()
    changed = (features[0, :, 3] != embedded).any(-1)
    assert is_image.any()
    assert torch.equal(changed, is_image)


def _final_state(model: Any, checkpoint: Path, sample: Sample) -> torch.Tensor:
    """Return the state before the head, [S, H], computed by transformers from pixels."""
    prepared = [
        processors.load(checkpoint).prepare(open_image(one.source, Path("/nowhere")))
        for one in sample.prompt.pictures
    ]
    ids = torch.tensor([sample.ids])
    pixels = torch.from_numpy(np.concatenate([one.pixels for one in prepared]))
    inputs: dict[str, Any] = {"input_ids": ids, "pixel_values": pixels}
    if model.config.model_type == "smolvlm":
        inputs["pixel_values"] = pixels[None]
    if model.config.model_type.startswith("qwen"):
        inputs["image_grid_thw"] = torch.tensor([(1, *one.grid) for one in prepared])
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        return model.model(**inputs).last_hidden_state[0]


def test_stored_answers_are_distinguished_by_their_images(deep_checkpoint, data, tmp_path):
    base = load_base(str(deep_checkpoint), CPU)
    _, prompts = read_conversations([data], base)
    store, how = (
        tmp_path / "answers.jsonl",
        Generation(max_new_tokens=6, sampled_share=0.0, temperature=1.0, batch=4, seed=0),
    )
    assert list(answer_prompts(base, prompts, store, how)) == [0, 4]
    assert {sample.prompt for sample in stored_answers(store)} == set(prompts)
    assert list(answer_prompts(base, prompts, store, how)) == [4]


def _job(checkpoint: Path, data: Path, tmp_path: Path) -> Job:
    recipe = Recipe(
        epochs=2, unrolls=2, unroll_weight=0.9, learning_rate=3e-3, warmup_steps=2,
        batch_tokens=512, max_tokens=200, max_gradient_norm=1.0, seed=0,
    )  # fmt: skip
    return Job(
        base_model_dir=str(checkpoint),
        output_dir=tmp_path / "draft",
        data=(data,),
        self_prompts=0,
        work_dir=tmp_path / "work",
        init_from=None,
        draft_vocab_size=40,
        hidden_taps=(),
        held_out=1,
        cache_features=True,
        save_every=1,
        device="cpu",
        recipe=recipe,
        generation=Generation(
            max_new_tokens=8, sampled_share=0.5, temperature=0.8, batch=4, seed=0
        ),
    )


def test_a_draft_of_a_vision_language_model_is_exported(deep_checkpoint, data, tmp_path):
    run(_job(deep_checkpoint, data, tmp_path))
    draft = open_checkpoint(str(tmp_path / "draft"), tokenizer=False)
    base = open_checkpoint(str(deep_checkpoint))
    manifest = export_draft(draft, base, tmp_path / "bundle", DraftOptions("fp32"))
    assert manifest.draft.decoder.position_axes == 3
    assert manifest.draft.decoder.images is not None
    before = (tmp_path / "draft/model.safetensors").read_bytes()
    run(_job(deep_checkpoint, data, tmp_path))  # the run is finished: the same draft is written
    assert (tmp_path / "draft/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_other_methods_train_with_images(deep_checkpoint, data, tmp_path, method):
    job = replace(_job(deep_checkpoint, data, tmp_path), method=method, num_heads=2)
    run(replace(job, draft_vocab_size=0))
    base = open_checkpoint(str(deep_checkpoint))
    draft = open_draft(str(tmp_path / "draft"))
    manifest = export_draft(draft, base, tmp_path / "bundle", DraftOptions("fp32"))
    assert manifest.draft.method == method
    assert (manifest.draft.decoder.images is not None) is (method == "eagle")


def test_the_export_applies_m_rope_as_the_network(deep_checkpoint, tmp_path):
    """Tokens have three different positions; some are image tokens."""
    from edgellm.core import graph_io

    base = load_base(str(deep_checkpoint), CPU)
    vocabulary = np.arange(3, 43)
    torch.manual_seed(0)
    draft = Draft(draft_shape(base.config, len(vocabulary), 3))
    start_from_base(draft, base, vocabulary)
    torch.nn.init.normal_(draft.fc.weight, std=0.1)
    with torch.no_grad():  # written weights are bfloat16
        for parameter in draft.parameters():
            parameter.copy_(parameter.bfloat16())
    (tmp_path / "draft").mkdir()
    write_draft(draft, tmp_path / "draft", vocabulary, (2, 4, 5), base.config, {})
    checkpoints = (
        open_checkpoint(str(tmp_path / "draft"), tokenizer=False),
        open_checkpoint(str(deep_checkpoint)),
    )
    export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    rows, size, shown = 9, base.config.hidden_size, 4
    taps, images = torch.randn(1, rows, 3 * size), torch.randn(shown, size)
    ids = torch.randint(3, 90, (rows,))
    ids[2 : 2 + shown] = base.config.vocab_size + torch.arange(shown)
    positions = torch.randint(12, (3, 1, rows))
    table = torch.cat([base.embedding, images])
    with torch.no_grad():
        (hidden,) = draft.unroll(taps, table[ids][None], positions, 1)
        best = draft.lm_head(draft.norm(hidden[0])).log_softmax(-1).topk(5)
    feed = {
        graph_io.INPUT_IDS: ids[None].numpy(),
        graph_io.POSITION_IDS: positions[:, 0].numpy(),
        graph_io.WRITE_INDEX: np.array([0]),
        graph_io.TREE_MASK: np.tri(rows, dtype=np.bool_),
        graph_io.LOGITS_INDEX: np.arange(rows),
        graph_io.TOP_K: np.array([5]),
        graph_io.IMAGE_EMBEDS: images.numpy(),
        graph_io.DRAFT_HIDDEN: _run(tmp_path, "fuse", {graph_io.HIDDEN_TAPS: taps.numpy()})[0],
    }
    kv = (1, base.config.num_key_value_heads, 16, draft.shape.head_dim)
    feed |= {graph_io.past_name(0, part): np.zeros(kv, np.float32) for part in ("key", "value")}
    found = _run(tmp_path, "model", feed)
    np.testing.assert_allclose(found[1][0], best.values, atol=2e-4)
    np.testing.assert_array_equal(found[0][0], vocabulary[best.indices])


def _run(folder: Path, name: str, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime as ort

    session = ort.InferenceSession(
        str(folder / f"bundle/{name}.onnx"), providers=["CPUExecutionProvider"]
    )
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {key: value for key, value in feed.items() if key in names})


@pytest.mark.parametrize(
    ("items", "fragment"),
    [
        (("absent.png", "w1"), "line 1: .*absent.png"),
        (("data.jsonl.png", "w1"), "line 1: .*data.jsonl.png"),
        (("<|image_pad|>",), "line 1: the prompt has 1 places for images, but 0"),
    ],
)
def test_invalid_images_are_rejected_with_the_line(deep_checkpoint, tmp_path, items, fragment):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [_user(*items)]}) + "\n")
    (tmp_path / "data.jsonl.png").write_text("no picture")
    with pytest.raises(EdgeLLMError, match=fragment):
        run(_job(deep_checkpoint, path, tmp_path))
    assert not (tmp_path / "work").exists()


def test_text_bases_reject_images_and_all_reject_videos(deep_checkpoint, data, tmp_path):
    text = make_checkpoint(tmp_path / "text", **models.find("llama").TINY)
    with pytest.raises(EdgeLLMError, match="line 1: the base takes text only"):
        read_conversations([data], load_base(str(text), CPU))
    film = {"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}
    data.write_text(json.dumps({"messages": [film]}))
    with pytest.raises(EdgeLLMError, match="video is neither text nor image"):
        read_conversations([data], load_base(str(deep_checkpoint), CPU))
