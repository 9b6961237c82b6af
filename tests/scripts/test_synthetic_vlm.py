"""The synthetic vision-language model: scenes, resumed training, the shipped checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgellm.core.errors import EdgeLLMError
from edgellm.export.config.hidden_taps import default_taps
from edgellm.multimodal import processors
from edgellm.scripts.synthetic_vlm import checkpoint
from edgellm.scripts.synthetic_vlm.cli import app
from edgellm.scripts.synthetic_vlm.conversations import KINDS, Encoder, converse
from edgellm.scripts.synthetic_vlm.evaluate import answers, fresh, measure
from edgellm.scripts.synthetic_vlm.scenes import CELL, CELLS, COLOURS, ROWS, SHAPES, draw, score
from edgellm.scripts.synthetic_vlm.train import Recipe, Trainer
from edgellm.scripts.synthetic_vlm.training_run import Job, run

pytestmark = pytest.mark.usefixtures("one_thread")
SHIPPED = Path(__file__).parents[2] / "examples" / "synthetic-vlm"
SIZES = {
    "text_config": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]
        },
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "fullatt_block_indexes": [1]
    },
}  # fmt: skip
FILES = {
    "README.md", "chat_template.jinja", "config.json", "generation_config.json",
    "model.safetensors", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "training.json",
}  # fmt: skip


@pytest.fixture
def job(tmp_path) -> Job:
    recipe = Recipe(steps=5, batch_size=4, learning_rate=2e-3, warmup_steps=1, seed=3)
    return Job(
        output_dir=tmp_path / "vlm",
        recipe=recipe,
        threads=1,
        save_every=2,
        fresh_scenes=2,
        sizes=SIZES,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return the folder of an untrained model."""
    folder = tmp_path_factory.mktemp("untrained")
    torch.manual_seed(0)
    config = checkpoint.make_config(**SIZES)
    checkpoint.write_model(folder, checkpoint.make_model(config).to(torch.bfloat16))
    checkpoint.write_processor(folder, config)
    return folder


# ------------------------------------------------------------------------------------- scenes
def test_scenes_are_reproducible():
    one, same, other = draw(4, 1), draw(4, 1), draw(4, 2)
    assert one.cells == same.cells
    assert one.image.tobytes() == same.image.tobytes()
    assert (one.image.size, one.image.mode) == ((168, 168), "RGB")
    assert other.cells != one.cells


def test_captions_match_the_drawing():
    seen = set()
    for number in range(40):
        scene = draw(9, number)
        pixels = np.asarray(scene.image).astype(int)
        cells = [
            _recognize(pixels[row * CELL :, column * CELL :][:CELL, :CELL])
            for row in range(ROWS)
            for column in range(ROWS)
        ]
        assert tuple(cells) == scene.cells
        seen.update(cells)
    assert seen == set(CELLS)


def _recognize(pixels: np.ndarray) -> str:
    """Name a cell by its colour, and by the share of the bounding box that its shape fills."""
    filled = pixels.min(-1) < 150  # backgrounds are light, every colour lacks a channel
    if not filled.any():
        return "empty"
    colour = np.median(pixels[filled], 0)
    name = min(COLOURS, key=lambda known: np.abs(colour - COLOURS[known]).sum())
    rows, columns = filled.any(1).nonzero()[0], filled.any(0).nonzero()[0]
    box = filled[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    circle, square, triangle, cross = SHAPES
    if box.mean() > 0.7:
        return f"{name} {square if box[0, 0] else circle}"
    return f"{name} {triangle if box[-1, 0] else cross}"


def test_every_picture_differs_in_more_than_its_cells():
    """Two cells with the same shape differ in position, size and tint."""
    circles = {}
    for number in range(60):
        scene = draw(5, number)
        for at, cell in enumerate(scene.cells):
            if cell == "red circle":
                row, column = divmod(at, ROWS)
                box = column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL
                circles[scene.image.crop(box).tobytes()] = at
    assert len(circles) > 5


def test_scores():
    scene = draw(1, 0)
    assert scene.caption.startswith(f"Row 1 : {scene.cells[0]} , {scene.cells[1]} , ")
    assert scene.caption.endswith(f" , {scene.cells[8]} .")
    right = score(scene.caption, scene)
    assert (right.exact, right.right_cells) == (True, 9)
    spaced = score("  " + scene.caption.replace(" ,", ",").replace(" .", ".\n"), scene)
    assert (spaced.exact, spaced.right_cells) == (True, 9)
    rows = scene.caption.split(" Row ")
    for caption, cells in [
        ("", 0),
        ("a cat", 0),
        (rows[0], 3),
        (" Row ".join(rows[:2]), 6),
        (scene.caption.replace(scene.cells[0], "pink circle", 1), 8),
        (scene.caption + " Row 4 : empty .", 9),
        (scene.caption.replace("Row 2", "Row 5"), 6),
    ]:
        found = score(caption, scene)
        assert (found.exact, found.right_cells) == (False, cells), caption


# -------------------------------------------------------------------------------- conversations
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_transformers(written, kind):
    """Template, ids, pixels and positions; replies with their end tokens have a loss."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    conversation = converse(kind, 7, 7)
    encoder = Encoder.read(written)
    encoded = encoder(conversation)
    tokenizer = AutoTokenizer.from_pretrained(written)
    text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    assert text.count("<|vision_start|><|image_pad|><|vision_end|>") == len(conversation.scenes)
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 36))["input_ids"]
    assert encoded.token_ids.tolist() == ids
    pictures = AutoImageProcessor.from_pretrained(written, backend="pil")
    images = pictures([scene.image for scene in conversation.scenes], return_tensors="pt")
    assert np.array_equal(images["pixel_values"], encoded.pixels)
    assert images["image_grid_thw"].tolist() == [[1, *grid] for grid in encoded.grids]
    model = AutoModelForImageTextToText.from_pretrained(written).model
    tokens = torch.tensor([ids])
    positions, _ = model.get_rope_index(
        tokens,
        mm_token_type_ids=(tokens == model.config.image_token_id).int(),
        image_grid_thw=images["image_grid_thw"],
    )
    assert np.array_equal(positions[:, 0], encoded.positions)
    said = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    learned = tokenizer.decode(encoded.token_ids[encoded.learned])
    assert learned.count("<|im_end|>") == len(said)
    assert tokenizer(" ".join(said))["input_ids"] == [
        token for token in encoded.token_ids[encoded.learned] if token != tokenizer.eos_token_id
    ]
    assert said[-1] == conversation.asked.caption
    prompt = encoder(conversation, prompt=True).token_ids
    assert prompt.tolist() == ids[: len(prompt)]
    assert encoded.learned[len(prompt) - 1 : len(prompt) + 1].tolist() == [False, True]


def test_scenes_are_not_resized(written):
    processor = processors.load(written)
    assert processor.count((168, 168)) == 36
    prepared = processor.prepare(draw(1).image)
    assert (prepared.num_tokens, prepared.grid) == (36, (12, 12))


def test_all_words_are_in_the_vocabulary():
    tokenizer = checkpoint.tokenizer()
    for kind in KINDS:
        for number in range(40):
            for message in converse(kind, number).messages:
                content = message["content"]
                text = content if isinstance(content, str) else content[-1].get("text", "")
                assert checkpoint.UNKNOWN not in tokenizer.encode(text).tokens
                assert message["role"] in checkpoint.vocabulary()


def test_outputs_do_not_depend_on_the_batch(written):
    """Conversations of different lengths are padded on the left."""
    model, encoder = checkpoint.read_model(written), Encoder.read(written)
    asked = [fresh("one", 0), fresh("later", 1), fresh("turns", 2)]
    alone = [answers(model, encoder, [conversation])[0] for conversation in asked]
    assert answers(model, encoder, asked) == alone


# ------------------------------------------------------------------------------------ training
@pytest.mark.nightly
def test_an_interrupted_run_ends_as_an_uninterrupted_one(job, tmp_path, monkeypatch):
    whole = replace(job, output_dir=tmp_path / "whole")
    run(whole)
    train, calls = Trainer._train, []

    def cut(trainer):
        calls.append(trainer.step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train(trainer)

    monkeypatch.setattr(Trainer, "_train", cut)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    assert not job.output_dir.exists()
    run(job)
    assert calls == [0, 1, 2, 3, 2, 3, 4]  # saved at step 2
    for folder in (job.output_dir, whole.output_dir):
        assert {path.name for path in folder.iterdir()} == FILES
    weights = [folder / "model.safetensors" for folder in (job.output_dir, whole.output_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    first, other = (
        torch.load(tmp_path / f"{name}.training/training.pt") for name in ("vlm", "whole")
    )
    assert all(torch.equal(first["model"][name], other["model"][name]) for name in first["model"])
    run(job)  # training is finished
    assert len(calls) == 7
    shutil.rmtree(job.output_dir)  # only the state is left
    with pytest.raises(EdgeLLMError, match="a run with other settings"):
        run(replace(job, recipe=replace(job.recipe, seed=4)))


def test_a_written_folder_is_a_checkpoint(job):
    from transformers import AutoModelForImageTextToText

    run(job)
    model = AutoModelForImageTextToText.from_pretrained(job.output_dir)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [2, 0]
    facts = json.loads((job.output_dir / "training.json").read_text())
    assert set(facts["exactness"]) == set(KINDS)
    assert facts["exactness"]["one"]["scenes"] == 2
    card = (job.output_dir / "README.md").read_text()
    assert "**Synthetic" in card
    assert "--steps 5 --batch_size 4 --learning_rate 0.002 --seed 3" in card


def test_the_loss_goes_down(job, tmp_path):
    config = checkpoint.make_config(**SIZES)
    torch.manual_seed(0)
    checkpoint.write_processor(tmp_path, config)
    recipe = replace(job.recipe, steps=20, learning_rate=1e-2)
    trainer = Trainer(
        model=checkpoint.make_model(config),
        encoder=Encoder.read(tmp_path),
        recipe=recipe,
        folder=tmp_path,
    )
    losses = []
    trainer.run(save_every=20, report=lambda progress: losses.append(progress.loss))
    assert len(losses) == 20
    assert losses[0] > 4
    assert losses[-1] < 2.5


def test_foreign_folders_are_rejected(job):
    job.output_dir.mkdir()
    (job.output_dir / "config.json").write_text("{}")
    with pytest.raises(EdgeLLMError, match="files that this command did not make") as caught:
        app(["--output_dir", str(job.output_dir)], standalone_mode=False)
    assert "another --output_dir" in caught.value.hint
    (job.output_dir / "training.json").write_text("[]")
    with pytest.raises(EdgeLLMError, match="did not make"):
        run(job)
    with pytest.raises(EdgeLLMError, match="is a file"):
        run(replace(job, output_dir=job.output_dir / "config.json"))
    assert {path.name for path in job.output_dir.iterdir()} == {"config.json", "training.json"}


def test_a_model_of_other_settings_is_rejected(job):
    run(job)
    before = (job.output_dir / "model.safetensors").read_bytes()
    with pytest.raises(EdgeLLMError, match="trained with other settings"):
        run(replace(job, recipe=replace(job.recipe, steps=1)))
    assert (job.output_dir / "model.safetensors").read_bytes() == before
    run(job)  # the same run again succeeds


# ------------------------------------------------------------------------------ the shipped one
def test_the_shipped_checkpoint_captions_fresh_scenes():
    model, encoder = checkpoint.read_model(SHIPPED), Encoder.read(SHIPPED)
    assert measure(model, encoder, "one", 10).exact >= 9


def test_the_shipped_files_are_those_that_the_command_writes(tmp_path):
    assert {path.name for path in SHIPPED.iterdir()} == FILES
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 12e6
    checkpoint.write_processor(tmp_path, checkpoint.make_config())
    for name in FILES - {"README.md", "model.safetensors", "training.json", "config.json",
                         "generation_config.json"}:  # fmt: skip
        assert (SHIPPED / name).read_bytes() == (tmp_path / name).read_bytes(), name
    shipped, made = (json.loads((f / "config.json").read_text()) for f in (SHIPPED, tmp_path))
    for part in ("text_config", "vision_config"):
        assert shipped[part] == made[part]
    assert all(
        tensor.dtype == torch.bfloat16
        for tensor in load_file(SHIPPED / "model.safetensors").values()
    )
    layers = shipped["text_config"]["num_hidden_layers"]
    assert len(set(default_taps(layers))) == 3
    facts = json.loads((SHIPPED / "training.json").read_text())
    card = (SHIPPED / "README.md").read_text()
    assert f"| {facts['exactness']['one']['exact']} of 100 |" in card
    assert facts["exactness"]["one"]["exact"] >= 95
