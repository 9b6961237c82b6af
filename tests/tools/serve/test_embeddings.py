"""Embeddings, reranking, and log-probabilities of prompts through a server."""

from __future__ import annotations

import numpy as np
import ollama
import openai
import pytest
from conftest import make_checkpoint
from encoder_checkpoints import make_encoder
from serve_process import serving

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import RequestError
from edgellm.device_runtime import LLM
from edgellm.export import models
from edgellm.export.encoders import bert
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools.serve.protocols.openai.embeddings import EmbeddingRequest

TEXTS = ["w20 w30 w40", "w21", "w20 w30 w41"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    source = make_checkpoint(folder / "checkpoint", **models.find("qwen3").TINY)
    options = ExportOptions(dtype="fp32", pooling="last")
    export_llm(open_checkpoint(str(source)), folder / "bundle", options)
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto")
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)
    llm = LLM(folder / "engine")
    vectors = [llm.embed(llm.tokenizer.encode(text, add_special_tokens=True)) for text in TEXTS]
    with serving(folder / "engine", "--modelName", "tiny") as server:
        yield server, llm, vectors


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    """A cross-encoder, served."""
    folder = tmp_path_factory.mktemp("ranker")
    kind = "AutoModelForSequenceClassification"
    source = make_encoder(folder / "checkpoint", kind, **bert.TINY, num_labels=1)
    export_llm(open_checkpoint(str(source)), folder / "bundle", ExportOptions(dtype="fp32"))
    plan = Plan(max_input_len=48, kv_capacity=48, threads=1)
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)
    with serving(folder / "engine") as server:
        yield server, LLM(folder / "engine")


def test_embeddings_are_those_of_the_engine(embedder):
    server, llm, expected = embedder
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="tiny", input=TEXTS)  # as base64
    for one, vector in zip(found.data, expected, strict=True):
        np.testing.assert_array_equal(np.float32(one.embedding), vector)
    ids = llm.tokenizer.encode(TEXTS[1], add_special_tokens=True)
    (one,) = client.embeddings.create(model="tiny", input=ids, encoding_format="float").data
    np.testing.assert_array_equal(np.float32(one.embedding), expected[1])
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, expected[0][:8] / np.linalg.norm(expected[0][:8]), rtol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions: the model has"):
        client.embeddings.create(model="tiny", input="w20", dimensions=1 << 20)
    with pytest.raises(openai.BadRequestError, match="tokens, the engine takes"):
        client.embeddings.create(model="tiny", input="w20 " * 60)


def test_ollamas_client_embeds(embedder):
    server, llm, expected = embedder
    client = ollama.Client(server.url)
    found = client.embed("tiny", TEXTS)
    np.testing.assert_array_equal(np.float32(found.embeddings), expected)
    assert found.prompt_eval_count == sum(len(text.split()) for text in TEXTS)
    one = client.embed("tiny:latest", TEXTS[1], dimensions=8).embeddings
    assert (len(one), len(one[0])) == (1, 8)
    np.testing.assert_array_equal(
        np.float32(client.embeddings("tiny", TEXTS[0]).embedding), expected[0]
    )
    long = client.embed("tiny", "w20 " * 60).embeddings[0]  # cut to what the engine takes
    ids = llm.tokenizer.encode("w20 " * 60, add_special_tokens=True)
    np.testing.assert_array_equal(np.float32(long), llm.embed(ids[:48]))
    with pytest.raises(ollama.ResponseError, match="tokens, the engine takes"):
        client.embed("tiny", "w20 " * 60, truncate=False)
    assert client.embed("tiny", []).embeddings == []
    assert client.show("tiny").capabilities == ["embedding"]


def test_an_adapter_embeds(embedder):
    """The engine is asked for the adapter that the request names; this one has none."""
    _, llm, _ = embedder
    (ask,) = EmbeddingRequest(input="w20").asks(llm, "tuned")
    assert ask.lora == "tuned"
    with pytest.raises(RequestError, match="no adapter 'tuned'"):
        llm.embed_input(ask)


def test_prompts_and_long_texts(embedder):
    """`prompt_name` and `truncate` are names of text-embeddings-inference."""
    server, llm, _ = embedder
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options = {"encoding_format": "float", "extra_body": {"truncate": True}}
    (one,) = client.embeddings.create(model="tiny", input="w20 " * 60, **options).data
    np.testing.assert_array_equal(np.float32(one.embedding), llm.embed("w20 " * 60, truncate=True))
    named = {"extra_body": {"prompt_name": "query"}}
    with pytest.raises(openai.BadRequestError, match="the model has no prompt 'query'"):
        client.embeddings.create(model="tiny", input="w20", **named)
    ids = [[20, 30], [21]]
    found = client.embeddings.create(model="tiny", input=ids, dimensions=12).data
    for vector, each in zip(found, ids, strict=True):
        np.testing.assert_array_equal(np.float32(vector.embedding), llm.embed(each, dimensions=12))


def test_documents_are_ranked_by_similarity(embedder):
    server, _, (query, *documents) = embedder
    body = {"query": TEXTS[0], "documents": [{"text": TEXTS[1]}, TEXTS[2]], "top_n": 1}
    status, found = server.json("/v1/rerank", body)
    scores = [float(query @ vector) for vector in documents]
    best = int(np.argmax(scores))
    assert status == 200
    (first,) = found["results"]
    assert first["index"] == best
    assert first["relevance_score"] == pytest.approx(scores[best])
    assert first["document"] == {"text": TEXTS[1 + best]}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_reranker_ranks(path, ranker):
    server, llm = ranker
    documents = ["w30 w31", {"text": "w20 w40"}, "w50"]
    body = {"query": "w20", "documents": documents, "return_documents": False}
    status, found = server.json(path, body)
    assert status == 200
    expected = llm.rerank("w20", ["w30 w31", "w20 w40", "w50"])
    results = [{"index": one.index, "relevance_score": one.score} for one in expected]
    assert found["results"] == results
    assert found["usage"]["total_tokens"] == 3 * 3 + 3 + 5
    status, found = server.json("/v1/embeddings", {"input": "w20"})
    assert status == 400
    assert "scores documents and does not embed" in found["error"]["message"]
    for wrong, said in (({"instruction": "w20"}, "no instruction"), ({"top_n": 0}, "top_n")):
        status, found = server.json(path, body | wrong)
        assert status == 400
        assert said in str(found["error"])
    chat = {"messages": [{"role": "user", "content": "w20"}]}
    for route, asked in (("/v1/completions", {"prompt": "w20"}), ("/v1/chat/completions", chat)):
        status, found = server.json(route, asked)
        assert status == 400


def test_an_engine_that_answers_does_not_embed(server):
    status, found = server.json("/v1/embeddings", {"input": "w20"})
    assert status == 400
    assert "answers and does not embed" in found["error"]["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_of_prompts(server, offline, streams):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    ids = [20, 30, 40, 21]
    asked = {"model": "tiny", "prompt": ids, "max_tokens": 2, "temperature": 0}
    found = client.completions.create(**asked, echo=True, logprobs=2, stream=streams)
    chunks = [chunk.choices[0] for chunk in found] if streams else found.choices
    expected = offline.read_logprobs(ids, 2)
    values = [one for chunk in chunks for one in chunk.logprobs.token_logprobs]
    tops = [one for chunk in chunks for one in chunk.logprobs.top_logprobs]
    assert values[0] is tops[0] is None
    assert values[1:4] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert len(values) == len(tops) == 6
    assert [len(top) for top in tops[1:]] == [2] * 5
    plain = client.completions.create(**asked).choices[0].text
    assert "".join(chunk.text for chunk in chunks).endswith(plain)
