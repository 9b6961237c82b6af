"""Checkpoints as the installed transformers saves them again: model, tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import make_checkpoint, write_tokenizer
from image_checkpoints import write_processor
from resaved_processors import resave_processors
from visual_checkpoints import make_visual_checkpoint

from edgellm.build.engine import build_engine
from edgellm.build.plan import image_plan
from edgellm.export import models, visual
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal import processors

pytestmark = pytest.mark.usefixtures("one_thread")


def resave(folder: Path, target: Path, kind: str) -> Path:
    """Load model and tokenizer in transformers, and save both."""
    import transformers

    getattr(transformers, kind).from_pretrained(folder).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def resaved(tmp_path_factory):
    """Folders by use and model type, with processors that one process loads and saves again."""
    folder = tmp_path_factory.mktemp("resaved")
    for model_type in processors.supported():
        write_processor(folder / "processor" / model_type, model_type)
    for model_type in visual.supported():
        tiny = visual.find(model_type).TINY
        text = {**tiny["text_config"], "eos_token_id": 2}
        source = make_visual_checkpoint(
            folder / "model" / model_type, {**tiny, "text_config": text}
        )
        write_tokenizer(source, text["vocab_size"])
    made = [*folder.glob("processor/*"), *folder.glob("model/*")]
    resave_processors([(each, each.name, each / "saved") for each in made])
    return folder


@pytest.mark.parametrize("model_type", models.supported())
def test_language_models_are_exported(tmp_path, model_type):
    source = make_checkpoint(tmp_path / "source", **models.find(model_type).TINY)
    saved = resave(source, tmp_path / "saved", "AutoModelForCausalLM")
    bundle = tmp_path / "bundle"
    manifest = export_llm(open_checkpoint(str(saved)), bundle, ExportOptions())
    assert manifest.decoder.num_parameters
    assert (bundle / "chat_template.jinja").read_bytes() == _template(source)


def _template(folder: Path) -> bytes:
    return json.loads((folder / "tokenizer_config.json").read_text())["chat_template"].encode()


@pytest.mark.parametrize("model_type", visual.supported())
def test_vision_language_models_are_exported_and_built(resaved, tmp_path, model_type):
    source = resaved / "model" / model_type
    saved = resave(source, tmp_path / "saved", "AutoModelForImageTextToText")
    whole = source / "saved" / "processor_config.json"
    (saved / whole.name).write_bytes(whole.read_bytes())
    weights = []
    for folder in (source, saved):
        checkpoint = open_checkpoint(str(folder))
        text = export_llm(checkpoint, tmp_path / f"{folder.name}-text", ExportOptions())
        bundle = tmp_path / f"{folder.name}-bundle"
        manifest = export_visual(checkpoint, bundle, VisualOptions())
        weights.append([each.files["model.weights"] for each in (text, manifest)])
    assert weights[0] == weights[1]
    engine = tmp_path / "engine"
    build_engine("visual", bundle, engine, image_plan(1, 64, 64, 1), "onnxruntime", lambda _: None)
    assert processors.load(engine)


@pytest.mark.parametrize("model_type", processors.supported())
def test_processors_prepare_the_same(resaved, model_type):
    """The image settings are those of the original; videos have the processor's own."""
    source = resaved / "processor" / model_type
    (source / "saved" / "config.json").write_bytes((source / "config.json").read_bytes())
    expected, found = processors.load(source), processors.load(source / "saved")
    sizes = [(640, 480), (100, 900), (33, 33), (1920, 1080)]
    assert [found.count(size) for size in sizes] == [expected.count(size) for size in sizes]
    films = [getattr(each, "film", None) for each in (expected, found)]
    assert [film is None for film in films] == [films[0] is None] * 2
