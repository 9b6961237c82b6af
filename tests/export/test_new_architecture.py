"""A new architecture is one file: found by its name, exported, built and run."""

from __future__ import annotations

import json
import shutil

import pytest
from added_files import added

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

DOUBLED = '''
"""Llama, but for the embedding, which is doubled, and a key of its own."""

import onnx_ir as ir

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.models import llama

TINY = {**llama.TINY, "model_type": "doubled", "embedding_times": 2}


class Config(DecoderConfig):
    @classmethod
    def from_hf(cls, reader):
        reader.expect("embedding_times", 2)
        return cls.read(reader)


class Model(llama.Model):
    def __init__(self, config, weights):
        super().__init__(config, weights)
        table = self.embed_tokens
        self.embed_tokens = lambda op, ids: op.Add(table(op, ids), table(op, ids))
'''


@pytest.fixture
def checkpoints(tiny_checkpoint, tmp_path):
    """The tiny model under the new name, and a Llama with equal outputs."""
    from safetensors.numpy import load_file, save_file

    for name in ("doubled", "llama"):
        shutil.copytree(tiny_checkpoint, tmp_path / name)
    path = tmp_path / "doubled" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "doubled", "embedding_times": 2}))
    path = tmp_path / "llama" / "config.json"
    path.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(weights)
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "model.embed_tokens.weight": 2 * table, "lm_head.weight": table}, weights)
    return tmp_path


def _built(checkpoint):
    """Its engine."""
    bundle, engine = checkpoint / "bundle", checkpoint / "engine"
    export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype="fp32"))
    assert load_bundle(bundle, LLM_BUNDLE).decoder.model_type == checkpoint.name
    build_engine(
        "llm",
        bundle,
        engine,
        Plan(max_input_len=32, kv_capacity=48, threads=1),
        "onnxruntime",
        lambda _: None,
    )
    return engine


def _answer(engine) -> list[int]:
    with LLM(engine) as llm:
        answer = llm.generate(
            "w20 w30 w40", sampling=SamplingParams(temperature=0), max_generate_length=12
        )
        list(answer)
        return answer.token_ids


def test_one_file_adds_an_architecture(checkpoints, tiny_engine, tmp_path):
    with added(models, tmp_path / "more", doubled=DOUBLED):
        assert "doubled" in models.supported()
        found = _answer(_built(checkpoints / "doubled"))
    assert len(found) > 4
    assert found == _answer(_built(checkpoints / "llama"))
    assert found != _answer(tiny_engine)  # the same weights, as Llama has them


def test_an_architecture_without_a_file_is_unknown(checkpoints):
    with pytest.raises(UnsupportedModelError, match="architecture 'doubled' is not supported"):
        export_llm(
            open_checkpoint(str(checkpoints / "doubled")),
            checkpoints / "no",
            ExportOptions(dtype="fp32"),
        )
