"""Encoders at tiny random size: hidden states, embeddings and scores are those of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from encoder_checkpoints import make_encoder

from edgellm.build.artifact_kinds import fitted
from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError, RequestError, UnsupportedModelError
from edgellm.device_runtime import LLM
from edgellm.export import encoders, models
from edgellm.export.config.layer_types import FULL, SLIDING
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

LIMIT = 60
TEXTS = ["w20 w30 w40", "w21", " ".join(f"w{at}" for at in range(20, 74))]
QUERY, DOCUMENTS = "w20 w21 w22", ["w30 w31", "w20 w40 w41 w60", "w50"]
_GEMMA = {
    **models.find("gemma3_text").TINY,
    "use_bidirectional_attention": True,
    "sliding_window": 12,
}
_TINY = {name: encoders.find(name).TINY for name in encoders.supported()}
CONFIGS = {
    **_TINY,
    "embeddinggemma": _GEMMA,
    "bert_relu_like": {**_TINY["bert"], "hidden_act": "gelu_pytorch_tanh", "type_vocab_size": 1},
    "xlm_roberta_types": {**_TINY["xlm_roberta"], "type_vocab_size": 2, "pad_token_id": 0},
    "modernbert_biases": {
        **_TINY["modernbert"],
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "local_attention": 2,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "hidden_activation": "silu",
    },
}


def _engine(source, folder, plan=None, **options):
    bundle, engine = folder / "bundle", folder / "engine"
    export_llm(open_checkpoint(str(source)), bundle, ExportOptions(dtype="fp32", **options))
    plan = fitted("llm", bundle, plan or Plan(max_input_len=LIMIT, kv_capacity=LIMIT, threads=1))
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    return LLM(engine)


@pytest.fixture(scope="module", params=CONFIGS)
def encoder(request, tmp_path_factory):
    """Transformers' model and an engine of it, which pools the first token."""
    folder = tmp_path_factory.mktemp(request.param)
    source = make_encoder(folder / "checkpoint", **CONFIGS[request.param])
    model = transformers.AutoModel.from_pretrained(source, attn_implementation="eager")
    return model, _engine(source, folder, pooling="cls")


def _hidden(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


def test_embeddings_equal_transformers(encoder):
    model, llm = encoder
    for text in TEXTS:
        ids = llm.tokenizer.encode(text, add_special_tokens=True)
        first = _hidden(model, ids)[0]
        np.testing.assert_allclose(llm.embed(text), first / np.linalg.norm(first), atol=2e-5)
        vector = llm.embed(text.replace(text.split()[-1], "w74"))
        assert np.abs(vector - llm.embed(text)).max() > 1e-3  # of later tokens


def test_hidden_states_of_all_tokens_equal_transformers(encoder):
    model, llm = encoder
    ids = np.array(llm.tokenizer.encode(TEXTS[2], add_special_tokens=True))
    found = llm.base.run(ids, 0, np.arange(1)).taps.copy()
    expected = _hidden(model, ids.tolist())
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_embeddings_do_not_depend_on_other_texts(encoder):
    _, llm = encoder
    alone = [llm.embed(text) for text in TEXTS]
    np.testing.assert_array_equal(llm.embed([*TEXTS, *TEXTS[::-1]]), [*alone, *alone[::-1]])


def test_an_encoder_generates_nothing(encoder):
    _, llm = encoder
    with pytest.raises(RequestError, match=r"is an encoder \(.+\) and generates no text"):
        llm.generate("w20")
    with pytest.raises(RequestError, match="generates no text"):
        llm.read_logprobs([20, 21])
    with pytest.raises(RequestError, match="the text has 62 tokens, the engine takes 60"):
        llm.embed("w20 " * LIMIT)
    ids = [1, *[20] * (LIMIT - 2), 2]
    np.testing.assert_array_equal(llm.embed("w20 " * LIMIT, truncate=True), llm.embed(ids))


CLASSIFIERS = {
    **{name: (config, {}) for name, config in _TINY.items()},
    "modernbert_mean": (
        {
            **_TINY["modernbert"],
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "norm_bias": True,
        },
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_cross_encoders_score_as_transformers(name, tmp_path):
    config, more = CLASSIFIERS[name]
    kind = "AutoModelForSequenceClassification"
    source = make_encoder(tmp_path / "checkpoint", kind, **config, num_labels=1)
    stated = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(stated | more))
    llm = _engine(source, tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    expected = []
    for document in DOCUMENTS:
        given = tokenizer(QUERY, document, return_tensors="pt")
        if name != "bert":
            given.pop("token_type_ids")
        with torch.no_grad():
            logit = model(**given).logits[0, 0]
        expected.append(float(logit if more else logit.sigmoid()))
    found = llm.rerank(QUERY, DOCUMENTS)
    assert [one.index for one in found] == np.argsort(-np.array(expected)).tolist()
    for one in found:
        assert one.score == pytest.approx(expected[one.index], abs=2e-5 * (10 if more else 1))
    assert max(expected) - min(expected) > 1e-3
    (cut,) = llm.rerank(QUERY, ["w33 " * LIMIT])
    assert np.isfinite(cut.score)
    with pytest.raises(RequestError, match="takes no instruction"):
        llm.rerank(QUERY, DOCUMENTS, instruction="w20")


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_the_first_layers_are_those_of_the_whole_model(tmp_path, name):
    source = make_encoder(tmp_path / "checkpoint", **_TINY[name])
    llm = _engine(source, tmp_path, pooling="cls", num_layers=2)
    config = transformers.AutoConfig.from_pretrained(source, num_hidden_layers=2)
    if name == "modernbert":
        config.layer_types = config.layer_types[:2]
    model = transformers.AutoModel.from_pretrained(source, config=config)
    ids = llm.tokenizer.encode(TEXTS[0], add_special_tokens=True)
    first = _hidden(model, ids)[0]
    np.testing.assert_allclose(llm.embed(TEXTS[0]), first / np.linalg.norm(first), atol=2e-5)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_may_be_rounded(tmp_path, quantize):
    source = make_encoder(tmp_path / "checkpoint", **{**_TINY["bert"], "hidden_size": 96})
    exact = _engine(source, tmp_path / "exact", pooling="mean").embed(TEXTS[0])
    plan = Plan(max_input_len=LIMIT, kv_capacity=LIMIT, threads=1, quantize=quantize)
    found = _engine(source, tmp_path / "rounded", plan, pooling="mean").embed(TEXTS[0])
    assert 0.9 < float(found @ exact) < 1 - 1e-7


def test_what_is_not_supported_is_named(tmp_path):
    source = make_encoder(tmp_path / "checkpoint", **_TINY["bert"])
    checkpoint = open_checkpoint(str(source))
    with pytest.raises(UnsupportedModelError, match="is an encoder without modules"):
        export_llm(checkpoint, tmp_path / "bundle", ExportOptions())
    with pytest.raises(UnsupportedModelError, match="reranker is for models that generate"):
        export_llm(checkpoint, tmp_path / "bundle", ExportOptions(reranker=True))
    plan = Plan(max_input_len=LIMIT, kv_capacity=LIMIT, options=CpuOptions("onnxruntime"))
    with pytest.raises(EdgeLLMError, match="only edgellm's kernels let tokens attend"):
        _engine(source, tmp_path, plan, pooling="mean")
    labels = make_encoder(
        tmp_path / "labels", "AutoModelForSequenceClassification", **_TINY["bert"], num_labels=3
    )
    with pytest.raises(UnsupportedModelError, match="the classifier has 3 labels"):
        export_llm(open_checkpoint(str(labels)), tmp_path / "bundle", ExportOptions())
