"""Embeddings of sentence-transformers folders equal those of the library itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import make_checkpoint
from encoder_checkpoints import make_encoder

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import RequestError
from edgellm.core.model_spec import POOLER_FILE
from edgellm.device_runtime import LLM
from edgellm.export import models
from edgellm.export.encoders import bert, modernbert
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

sentence_transformers = pytest.importorskip("sentence_transformers")
TEXTS = ["w20 w30 w40 w50", "w21", " ".join(f"w{at}" for at in range(20, 55))]
PROMPTS = {"query": "w60 w61 w62 ", "document": ""}
LIMIT = 64


def build(source, folder, dtype="fp32"):
    """A folder of sentence-transformers as an engine."""
    export_llm(open_checkpoint(str(source)), folder / "bundle", ExportOptions(dtype=dtype))
    plan = Plan(max_input_len=LIMIT, kv_capacity=LIMIT, threads=1, prefill="auto")
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)
    return LLM(folder / "engine")


def _save(folder, *modules, **settings):
    """A random tiny Qwen3 with these modules, as the library saves it; the loaded model."""
    from sentence_transformers.base.modules import Transformer

    plain = make_checkpoint(folder / "plain", **models.find("qwen3").TINY)
    # Without the class, transformers makes Qwen's tokenizer of it.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>"}
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    made = sentence_transformers.SentenceTransformer(
        modules=[Transformer(str(plain)), *modules], prompts=PROMPTS, device="cpu", **settings
    )
    made.save(str(folder / "model"))
    return folder / "model", made


@pytest.fixture(scope="module")
def modules():
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling, Dense, Normalize


@pytest.fixture(scope="module")
def qwen3(modules, tmp_path_factory):
    """Qwen3-Embedding: the last token, normalized; the library's model and the engine."""
    pooling, _, normalize = modules
    folder = tmp_path_factory.mktemp("qwen3")
    source, oracle = _save(folder, pooling(96, "lasttoken"), normalize())
    return oracle, build(source, folder)


@pytest.mark.parametrize("prompt", [None, "query", "document"])
def test_qwen3_embedding_equals_sentence_transformers(qwen3, prompt):
    oracle, llm = qwen3
    found = llm.embed(TEXTS, prompt_name=prompt)
    np.testing.assert_allclose(found, oracle.encode(TEXTS, prompt_name=prompt), atol=1e-5)
    np.testing.assert_array_equal(found[1], llm.embed(TEXTS[1], prompt_name=prompt))
    plain = llm.embed(TEXTS[0])
    assert (np.abs(found[0] - plain).max() > 1e-2) == (prompt == "query")


@pytest.mark.parametrize("size", [1, 8, 96])
def test_dimensions_are_cut_and_normalized_again(qwen3, size):
    oracle, llm = qwen3
    expected = oracle.encode(TEXTS, truncate_dim=size, normalize_embeddings=True)
    np.testing.assert_allclose(llm.embed(TEXTS, dimensions=size), expected, atol=1e-5)


def test_texts_are_cut_to_what_the_engine_takes(qwen3):
    oracle, llm = qwen3
    long = "w20 w31 " * LIMIT
    with pytest.raises(RequestError, match="the text has 128 tokens, the engine takes 64"):
        llm.embed(long)
    oracle.max_seq_length, before = LIMIT, oracle.max_seq_length
    expected = oracle.encode(long)
    oracle.max_seq_length = before
    np.testing.assert_allclose(llm.embed(long, truncate=True), expected, atol=1e-5)


@pytest.mark.each_change("True-cls", "False-mean", "True-lasttoken")
@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("pools_prompt", [True, False])
def test_dense_layers_follow_every_pooling(modules, tmp_path, mode, pools_prompt):
    import torch

    pooling, dense, normalize = modules
    layers = [
        dense(96, 40, bias=False, activation_function=torch.nn.Identity()),
        dense(40, 24, activation_function=torch.nn.GELU()),
        dense(24, 12),
    ]
    more = [normalize()] if pools_prompt else []
    source, oracle = _save(
        tmp_path,
        pooling(96, mode, include_prompt=pools_prompt),
        *layers,
        *more,
        default_prompt_name="query",
    )
    llm = build(source, tmp_path)
    expected = oracle.encode(TEXTS)
    assert expected.shape == (3, 12)
    np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)
    lengths = np.linalg.norm(expected, axis=1)
    assert (np.abs(lengths - 1).max() < 1e-5) == pools_prompt
    assert (tmp_path / "engine" / POOLER_FILE).exists()
    named = llm.embed(TEXTS, prompt_name="document")
    np.testing.assert_allclose(named, oracle.encode(TEXTS, prompt_name="document"), atol=1e-5)
    assert np.abs(named - expected).max() > 1e-4


def test_the_files_of_older_versions_are_read(qwen3, tmp_path):
    """Version 3 named classes and modes otherwise, and wrote truncate_dim."""
    oracle, _ = qwen3
    oracle.save(str(tmp_path / "model"))
    folder = tmp_path / "model"
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    names = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(names))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {
                "word_embedding_dimension": 96,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": False,
                "pooling_mode_lasttoken": True,
                "include_prompt": True,
            }
        )
    )
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 3, "do_lower_case": False})
    )
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps(settings | {"truncate_dim": 16})
    )
    llm = build(folder, tmp_path)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(
        TEXTS[0], truncate_dim=16, normalize_embeddings=True
    )
    np.testing.assert_allclose(llm.embed(TEXTS[0], truncate=True), expected, atol=1e-5)
    with pytest.raises(RequestError, match="the text has 4 tokens, the engine takes 3"):
        llm.embed(TEXTS[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_name": "qeury"}, "no prompt 'qeury'"),
        ({"dimensions": 97}, "the model has 96, 97 were wanted"),
        ({"dimensions": 0}, "the model has 96, 0 were wanted"),
    ],
)
def test_wrong_options_are_rejected(qwen3, options, said):
    with pytest.raises(RequestError, match=said):
        qwen3[1].embed(TEXTS[0], **options)
    with pytest.raises(RequestError, match="token ids take no prompt"):
        qwen3[1].embed([20, 30], prompt_name="query")


ENCODERS = {
    "embeddinggemma": {
        **models.find("gemma3_text").TINY,
        "use_bidirectional_attention": True,
    },
    "bge": bert.TINY,
    "gte": modernbert.TINY,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_sentence_transformers(modules, tmp_path, name):
    """EmbeddingGemma has a mean and two dense layers, bge and gte the first token."""
    import torch
    from sentence_transformers.base.modules import Transformer

    pooling, dense, normalize = modules
    config = ENCODERS[name]
    make_encoder(tmp_path / "plain", **config)
    size, layers, mode = config["hidden_size"], [], "cls"
    if name == "embeddinggemma":
        identity, mode = torch.nn.Identity(), "mean"
        widths = ((size, 2 * size), (2 * size, size))
        layers = [dense(*each, bias=False, activation_function=identity) for each in widths]
    oracle = sentence_transformers.SentenceTransformer(
        modules=[Transformer(str(tmp_path / "plain")), pooling(size, mode), *layers, normalize()],
        prompts=PROMPTS,
        device="cpu",
    )
    oracle.save(str(tmp_path / "model"))
    llm = build(tmp_path / "model", tmp_path)
    for prompt in ("query", "document"):
        expected = oracle.encode(TEXTS, prompt_name=prompt)
        np.testing.assert_allclose(llm.embed(TEXTS, prompt_name=prompt), expected, atol=2e-5)
    expected = oracle.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(llm.embed(TEXTS, dimensions=8), expected, atol=2e-5)
