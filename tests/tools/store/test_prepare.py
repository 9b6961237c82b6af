"""Engines that `edgellm run` makes of GGUF files with a visual encoder next to them."""

from __future__ import annotations

import json

import pytest
from gguf_encoders import write_vlm
from visual_checkpoints import make_visual_checkpoint

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import LLM_ENGINE, VISUAL_ENGINE, load_engine
from edgellm.export import visual
from edgellm.tools.store.prepare import prepare
from edgellm.tools.store.store import Recipe, Store

RECIPE = Recipe(context=64, quantize="none")


@pytest.fixture
def files(tmp_path):
    config = json.loads(json.dumps(visual.find("idefics3").TINY))
    config["text_config"] |= {"bos_token_id": 1, "eos_token_id": 2}
    return write_vlm(tmp_path / "files", make_visual_checkpoint(tmp_path / "hf", config))


def test_the_encoder_next_to_a_gguf_file_is_built(files, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    made = prepare(str(files), RECIPE, store=Store())
    assert made.visual is not None
    assert load_engine(made.visual, VISUAL_ENGINE).spec.model_type == "idefics3"
    assert load_engine(made.engine, LLM_ENGINE).decoder.images.model_type == "idefics3"
    mmproj = files.parent / "mmproj-model-f32.gguf"
    whole = mmproj.read_bytes()
    mmproj.write_bytes(whole[:2000])
    with pytest.raises(BrokenArtifactError, match=r"mmproj-model-f32\.gguf is not a whole GGUF"):
        prepare(str(files), RECIPE, store=Store())
    mmproj.unlink()
    made = prepare(str(files), RECIPE, store=Store())
    assert made.visual is None
    assert load_engine(made.engine, LLM_ENGINE).decoder.images is None
