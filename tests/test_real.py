"""SmolLM2-135M-Instruct through the whole pipeline, against transformers, and with its draft."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from real_cases import PROMPTS, build

from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.request_files.lossless_check import prove
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export.pipeline.verify import run_portable

pytestmark = pytest.mark.real
PREFILL, DECODED = 128, 16
ROWS = 96  # of a comparison of precisions
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text("utf-8")


@pytest.fixture(scope="module")
def bundle(smollm2_bundles) -> Path:
    return smollm2_bundles / "base"


@pytest.fixture(scope="module")
def engine(smollm2_engine) -> Path:
    return smollm2_engine


@pytest.fixture(scope="module")
def int4_engine(smollm2_bundles, tmp_path_factory) -> Path:
    """ONNX Runtime's GEMM: prompts and trees in int8, single tokens in INT4."""
    folder = tmp_path_factory.mktemp("int4") / "engine"
    return build(smollm2_bundles, folder, "int4", "onnxruntime")


@pytest.fixture(scope="module")
def transformers_model(smollm2_gguf):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def reference(bundle, transformers_model):
    """128 tokens of text, 16 tokens that transformers decodes greedily, logits of them all.

    The logits in float64: two float32 computations may lie twice as far apart as either is wrong.
    """
    import torch
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode(TEXT).ids[:PREFILL]
    with torch.no_grad():
        all_ids = transformers_model.generate(
            torch.tensor([ids]), max_new_tokens=DECODED, min_new_tokens=DECODED, do_sample=False
        )
        # transformers' own `double` rejects models from GGUF.
        model = torch.nn.Module.double(copy.deepcopy(transformers_model))
        logits = model(all_ids).logits[0].float().numpy()
    return all_ids[0].numpy(), logits


@pytest.mark.nightly
def test_portable_graph(bundle, reference):
    ids, expected = reference
    found = run_portable(bundle, load_bundle(bundle, LLM_BUNDLE), ids, PREFILL)
    assert np.abs(found - expected).max() <= 2e-4
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.nightly
def test_engine(engine, reference):
    ids, expected = reference
    session = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    found = session.run(ids[:PREFILL], 0, np.arange(PREFILL)).logits.copy()
    assert np.abs(found - expected[:PREFILL]).max() <= 2e-4
    for position in range(PREFILL, PREFILL + DECODED):
        result = session.run(ids[position : position + 1], position, np.array([0]))
        assert np.abs(result.logits[0] - expected[position]).max() <= 2e-4
        assert result.token_ids[0] == expected[position].argmax()


def test_tokenizer_equals_transformers(bundle, smollm2_gguf):
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    # transformers 5 loses the model's digit splitting when it reads GGUF; llama.cpp keeps it.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in (TEXT, "naïve café, 東京 12345 🤖\n\n\tx  y", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]


def test_chat_through_the_commands(command, engine, tmp_path):
    requests = [
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        {"messages": [{"role": "user", "content": "Write one sentence about the sea."}]},
    ]
    source, output = tmp_path / "in.json", tmp_path / "out.json"
    content = {"temperature": 0, "max_generate_length": 40, "requests": requests}
    source.write_text(json.dumps(content))
    result = command(
        "llm_inference", "--engineDir", engine, "--inputFile", source, "--outputFile", output
    )
    assert result.returncode == 0, result.stderr
    answers = json.loads(output.read_text())["responses"]
    assert "Paris" in answers[0]["output_text"]
    assert answers[0]["finish_reason"] == "stop"
    assert answers[0]["formatted_complete_request"].startswith("<|im_start|>system\nYou are")


def test_python_interface(engine, transformers_model):
    import torch

    llm = LLM(engine)
    answer = llm.generate(
        [{"role": "user", "content": "Name three colours."}],
        sampling=SamplingParams(temperature=0),
        max_generate_length=48,
    )
    text = "".join(step.text for step in answer)
    assert text == answer.text != ""
    prompt = llm.tokenizer.render(
        [{"role": "user", "content": "Name three colours."}], add_generation_prompt=True
    )
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    with torch.no_grad():
        expected = transformers_model.generate(
            torch.tensor([ids]), max_new_tokens=48, do_sample=False
        )
    assert answer.token_ids == expected[0, len(ids) :].tolist()


@pytest.mark.nightly
def test_int4_engine_keeps_its_precision_switch_honest(int4_engine, reference):
    """Prompts as int8 move the logits of an INT4 engine less than INT4 itself does.

    With ONNX Runtime's kernels; single tokens are INT4 in the same engine. edgellm's kernels have
    no such option.
    """
    ids, expected = reference
    ids, expected = ids[:ROWS], expected[:ROWS]
    session = open_decoder(int4_engine, load_engine(int4_engine, LLM_ENGINE))
    in_int8 = session.run(ids, 0, np.arange(len(ids))).logits.copy()
    rows = [session.run(ids[at : at + 1], at, np.array([0])).logits[0].copy() for at in range(ROWS)]
    in_int4 = np.stack(rows)

    def divergence(p: np.ndarray, q: np.ndarray) -> float:
        log_p, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (p, q))
        return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())

    of_int4, of_int8 = divergence(expected, in_int4), divergence(in_int4, in_int8)
    assert 0.05 < of_int4 < 1
    assert of_int8 < of_int4 / 4


def _requests(count: int) -> list[dict]:
    return [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS[:count]]


@pytest.mark.nightly
def test_speculative_outputs_of_edgellms_kernels_are_bit_identical(smollm2_bundles, tmp_path):
    llm = LLM(
        build(smollm2_bundles, tmp_path / "own", "int4", "edgellm"), spec=SpecOptions(tree="cost")
    )
    for comparison in prove(llm, Options(max_generate_length=48), _requests(6)):
        assert comparison.line().endswith("tokens, identical, equal bits")


def test_speculative_fp32_outputs_are_identical(engine):
    llm = LLM(engine, spec=SpecOptions(tree="cost"))
    accepted = verified = 0
    for request in _requests(3):
        ids = []
        for speculative in (False, True):
            answer = llm.generate(
                request["messages"],
                sampling=SamplingParams(temperature=0),
                max_generate_length=48,
                speculative=speculative,
            )
            list(answer)
            ids.append(answer.token_ids)
        assert ids[0] == ids[1], request
        accepted += sum(counts.accepted for counts in answer.profile.rounds)
        verified += len(answer.profile.rounds)
    assert accepted > 0.5 * verified  # the draft has learned something


@pytest.mark.nightly
def test_int4_divergences_are_close_calls(int4_engine):
    llm = LLM(int4_engine, spec=SpecOptions(tree="fixed"))
    for comparison in prove(llm, Options(max_generate_length=48), _requests(2)):
        if comparison.divergence is not None:
            assert comparison.margin is not None
            assert comparison.spread is not None
            assert abs(comparison.margin) < 0.25 * comparison.spread, comparison.line()
