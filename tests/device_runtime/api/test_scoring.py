"""Scoring: log-probabilities and embeddings equal those of transformers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from encoder_checkpoints import make_encoder
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    RequestError,
    UnsupportedModelError,
)
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.pooler import EmbeddingInput
from edgellm.export import encoders, models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

NIGHTLY = pytest.mark.nightly
GREEDY = SamplingParams(temperature=0)
TEXT = [20, 30, 40, 50, 60, 21, 22, 23, 24, 25] * 8  # of more than one piece


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tied head."""
    tiny = {
        **models.find("qwen3").TINY,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
    }
    return make_checkpoint(tmp_path_factory.mktemp("tied") / "checkpoint", **tiny)


def _engine(folder, engine, **options):
    bundle = engine.with_name(f"{engine.name}-bundle")
    export_llm(open_checkpoint(str(folder)), bundle, ExportOptions(dtype="fp32", **options))
    build_engine(
        "llm",
        bundle,
        engine,
        Plan(max_input_len=100, kv_capacity=128, threads=1, prefill="auto"),
        "onnxruntime",
        lambda _: None,
    )
    return LLM(engine)


def test_logprobs_equal_transformers(folder, tmp_path):
    llm = _engine(folder, tmp_path / "engine")
    with torch.no_grad():
        rows = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([TEXT])).logits[0]
    expected = rows.double().log_softmax(-1).numpy()
    found = llm.read_logprobs(TEXT, 3)
    assert [one.token_id for one in found] == TEXT[1:]
    for at, one in enumerate(found):
        assert one.logprob == pytest.approx(expected[at, TEXT[at + 1]], abs=2e-4)
        assert [top for top, _ in one.top] == np.argsort(-expected[at])[:3].tolist()
    assert llm.read_logprobs([20]) == []
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.read_logprobs([])
    with pytest.raises(RequestError, match="answers and does not embed"):
        llm.embed(TEXT)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_transformers(folder, tmp_path, pooling):
    bare = tmp_path / "bare"  # as models for embeddings are saved, without a head
    AutoModel.from_pretrained(folder).save_pretrained(bare)
    for path in folder.glob("tokenizer*"):
        (bare / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bare / "model.safetensors")
    names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(names, bare / "model.safetensors", metadata={"format": "pt"})
    llm = _engine(bare, tmp_path / "engine", pooling=pooling)
    with torch.no_grad():
        rows = AutoModel.from_pretrained(folder)(torch.tensor([TEXT])).last_hidden_state[0]
    vector = rows[-1] if pooling == "last" else rows.mean(dim=0)
    expected = (vector / vector.norm()).numpy()
    np.testing.assert_allclose(llm.embed(TEXT), expected, atol=2e-5)
    assert llm.embed(TEXT[:3]).tolist() != expected.tolist()


def test_an_embedding_model_cannot_be_a_base(folder, tmp_path):
    options = ExportOptions(dtype="fp32", pooling="last", is_eagle_base=True)
    with pytest.raises(UnsupportedModelError, match="is no base of a draft"):
        export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", options)


@pytest.fixture(scope="module", params=["modernbert", pytest.param("qwen3", marks=NIGHTLY)])
def sharing(request, tmp_path_factory):
    """An engine with six blocks of KV cache; of an encoder with windows, or of a decoder."""
    folder = tmp_path_factory.mktemp(request.param)
    if (module := encoders.find(request.param)) is not None:
        checkpoint = make_encoder(folder / "checkpoint", **module.TINY)
    else:
        checkpoint = make_checkpoint(folder / "checkpoint", **models.find(request.param).TINY)
    options = ExportOptions(dtype="fp32", pooling="mean")
    export_llm(open_checkpoint(str(checkpoint)), folder / "bundle", options)
    plan = Plan(max_input_len=60, kv_capacity=60, threads=1, max_batch_size=6)
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)
    return LLM(folder / "engine")


@pytest.fixture
def passes(sharing, monkeypatch):
    """Numbers of tokens in each pass, for each of its texts."""
    found, run = [], sharing.base.run_batch

    def recorded(parts):
        found.append([len(part.token_ids) for part in parts])
        return run(parts)

    monkeypatch.setattr(sharing.base, "run_batch", recorded)
    return found


IDS = [[20 + at, *range(30, 32 + 2 * at)] for at in range(8)]


def test_short_texts_share_passes_without_padding(sharing, passes):
    alone = [sharing.embed(ids) for ids in IDS]
    assert passes == [[len(ids)] for ids in IDS]
    passes.clear()
    found = sharing.embed_inputs([EmbeddingInput(text=ids) for ids in IDS])
    for one, expected in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one.vector, expected)
    free = sharing.base.num_free
    assert [len(lengths) for lengths in passes] == [6, 2]  # of six blocks of the cache
    assert [length for lengths in passes for length in lengths] == [len(ids) for ids in IDS]
    passes.clear()
    sharing.embed_inputs([EmbeddingInput(text=[*range(20, 45)])] * 3)
    assert passes == [[25, 25], [25]]  # of at most 60 tokens
    assert sharing.base.num_free == free


def _wait_for(llm, count):
    """Until this number of texts waits for the engine."""
    while sum(not text.is_done for text in llm._texts._waiting) < count:
        time.sleep(0.001)


def test_texts_of_threads_share_a_pass(sharing, passes):
    """The second thread's request has ended before its pass: its text fails, others do not."""
    alone = [sharing.embed(ids) for ids in IDS[:4]]
    passes.clear()

    def refused():
        raise TimeoutError("too late")

    checks = [lambda: _wait_for(sharing, 4), refused, lambda: None, lambda: None]

    def embed(at):
        if at:
            _wait_for(sharing, at)  # in their order
        return sharing.embed_input(EmbeddingInput(text=IDS[at]), checks[at]).vector

    with ThreadPoolExecutor(4) as threads:
        first, second, *others = [threads.submit(embed, at) for at in range(4)]
        np.testing.assert_array_equal(first.result(60), alone[0])
        with pytest.raises(TimeoutError, match="too late"):
            second.result(60)
        for one, expected in zip(others, alone[2:], strict=True):
            np.testing.assert_array_equal(one.result(60), expected)
    assert [sorted(each) for each in passes] == [[len(IDS[0])], sorted(map(len, IDS[2:4]))]
    assert sharing._texts._waiting == []


@pytest.mark.parametrize("reuses", [False, True])
def test_requests_continue_during_scoring(tiny_engine, reuses):
    llm = LLM(tiny_engine, context_reuse=reuses)
    alone = [LLM(tiny_engine).generate(f"w{at} w30", sampling=GREEDY) for at in (20, 21)]
    for answer in alone:
        list(answer)
    first, other = (llm.generate(f"w{at} w30", sampling=GREEDY) for at in (20, 21))
    steps = iter(first)
    next(steps)
    expected = LLM(tiny_engine).read_logprobs(TEXT[:30])
    assert llm.read_logprobs(TEXT[:30]) == expected
    next(steps)
    llm.kv_cache_manager.release(first._entry.sequence)  # as on preemption
    list(other)
    list(steps)
    assert [first.token_ids, other.token_ids] == [answer.token_ids for answer in alone]
