"""Verdicts of `edgellm-quantize`, its default algorithm, and its warning of quantized files."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mixed_gguf import write_mixed
from quantize_cases import make_job, make_model, write_text

from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize import cli
from edgellm.quantize.formats.schemes import choose_scheme
from edgellm.quantize.pipeline.run import run_job
from edgellm.quantize.pipeline.search.algorithms import with_default
from edgellm.quantize.pipeline.summary import print_verdict
from edgellm.quantize.report.speed_estimate import memory_bandwidth, speed_line
from edgellm.quantize.report.verdict import advice, grade

INT4 = {"quantization": "int4_awq", "algo": "gptq", "block_size": 32, "num_samples": 48}


def report(kl: float, subject: str = "language model", **settings: object) -> SimpleNamespace:
    """The part of a report that a verdict reads."""
    return SimpleNamespace(
        subject=subject,
        settings={"model_dir": "a model", "target": "cpu", **settings},
        quality=SimpleNamespace(kl_divergence=kl, tokens=2048),
        quantized_modules=210,
        bytes_before=200_000_000,
        bytes_after=50_000_000,
        read_bytes=40_000_000,
    )


@pytest.mark.parametrize(
    ("kl", "word"),
    [(0.0, "good"), (0.03, "good"), (0.031, "noticeable"), (0.1, "noticeable"), (0.11, "poor"),
     (float("nan"), "poor")],
)  # fmt: skip
def test_a_divergence_has_a_word(kl, word):
    assert grade(kl) == word


@pytest.mark.parametrize(
    ("settings", "better"),
    [
        ({**INT4, "algo": "awq", "block_size": 64}, "--algo gptq --block_size 32"),
        ({**INT4, "block_size": 64}, "--algo gptq --block_size 32"),
        ({**INT4, "num_samples": 16}, "--algo gptq --num_samples 48"),
        (INT4, "--quantization mixed --target_bits 5.7"),
        ({**INT4, "format": "compressed-tensors"}, "--algo gptq --keep_layers auto"),
        ({"quantization": "nvfp4", "algo": "max"}, "--algo gptq --num_samples 48"),
        ({"quantization": "nvfp4_awq"}, "--quantization nvfp4 --algo gptq"),
        ({"quantization": "int8_sq"}, "--keep_layers auto"),
        ({"quantization": "mixed", "target_bits": 5.2}, "--target_bits 6.2"),
        ({"quantization": "mixed", "target_kl": 0.08}, "--target_kl 0.04"),
    ],
)
def test_a_poor_result_names_a_command_that_exists(settings, better):
    words = shlex.split(advice(report(0.2, **settings), Path("out")))
    assert words[:2] == ["edgellm-quantize", "llm"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--model_dir"], given["--output_dir"]) == ("a model", "out-better")
    wanted = better.split()
    assert dict(zip(wanted[::2], wanted[1::2], strict=True)).items() <= given.items()
    choose_scheme(given["--quantization"], given.get("--algo"))  # or an error


def test_a_poor_result_warns_and_a_good_one_is_left_alone(capsys):
    print_verdict(report(0.2, **INT4), Path("out"))
    printed = capsys.readouterr()
    assert "quality: poor, KL 0.2000 nats by gptq" in printed.out
    assert "size: 50.0 MB, 25% of the float checkpoint" in printed.out
    assert "a second decoder read all 210 quantized layers back" in printed.out
    assert "speed: at most about " in printed.out
    assert printed.err.startswith("warning: the KL divergence is above 0.1: try edgellm-quantize")
    print_verdict(report(0.05, **INT4), Path("out"))
    printed = capsys.readouterr()
    assert "to lower the KL divergence: edgellm-quantize llm" in printed.out
    assert not printed.err
    for good in (report(0.01, **INT4), report(0.2, "draft", **INT4)):
        print_verdict(good, Path("out"))
        printed = capsys.readouterr()
        assert "edgellm-quantize" not in printed.out + printed.err


def test_the_speed_is_an_estimate_of_this_machine_or_not_said():
    model = report(0.01, **INT4)
    assert speed_line(model, lambda: 8e9) == (
        "speed: at most about 200 tokens/s on this machine, an estimate: a token reads 40.0 MB, "
        "and its memory gave 8.0 GB/s now; llm_build measures it"
    )
    others = {
        "not estimated for a GPU: a token reads 40.0 MB": report(0.01, target="gpu"),
        "not estimated: a token reads some experts only": report(0.01),
        "not estimated: the base accepts some": report(0.01, "draft"),
    }
    others["not estimated: a token reads some experts only"].read_bytes = 0
    for reason, found in others.items():
        assert reason in speed_line(found, lambda: pytest.fail("not measured"))
    assert 1e8 < memory_bandwidth() < 1e13


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_that_a_token_reads_are_those_of_the_engine(tmp_path, tied):
    """The estimate before an export is that of `llm_build --dryRun` after it."""
    text = write_text(tmp_path / "text.jsonl")
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    model = make_model(tmp_path / "model", "llama", **sizes)
    job = make_job(model, text, tmp_path / "out", "fp8")
    found = run_job(job, lambda *_: None).read_bytes
    export_llm(open_checkpoint(str(tmp_path / "out")), tmp_path / "bundle", ExportOptions())
    bundle = load_bundle(tmp_path / "bundle", LLM_BUNDLE)
    plan = Plan(max_input_len=16, kv_capacity=32, threads=1, prefill="same", quantize="none")
    expected = predict(tmp_path / "bundle", bundle, plan, "onnxruntime", tmp_path / "engine")
    assert found == pytest.approx(expected.estimate.decode_bytes, rel=0.05)


def test_the_default_algorithm_of_4_bits_is_gptq_with_few_samples(tmp_path):
    text = write_text(tmp_path / "text.jsonl")
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    job = make_job(model, text, tmp_path / "out", "int4_awq", num_samples=None)
    for scheme in ("int4_awq", "nvfp4"):
        chosen = with_default(replace(job, quantization=scheme))
        assert (chosen.algo, chosen.num_samples) == ("gptq", 16)
    assert with_default(replace(job, num_samples=7)).num_samples == 7
    experts = make_model(tmp_path / "experts", "qwen3_moe", num_hidden_layers=1)
    for other in (
        replace(job, algo="awq"),
        replace(job, quantization="int8_sq"),
        replace(job, quantization="fp8"),
        replace(job, base_model_dir=str(model)),
        replace(job, model_dir=str(experts)),
    ):
        assert with_default(other) == other


def test_a_quantized_file_is_named_before_the_work(tmp_path, capsys):
    path = write_mixed(tmp_path)
    capsys.readouterr()  # transformers' own
    cli._warn_of_blocks(str(path))
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning: {path} is quantized already (Q3_K, Q4_0, Q4_1, Q4_K, ")
    cli._warn_of_blocks(str(tmp_path / "hf"))
    assert not capsys.readouterr().err
