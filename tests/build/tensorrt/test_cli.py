"""Tests of the commands `llm_build` and `visual_build` with `--backend tensorrt`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import INTERRUPTED, assert_one_line_error, interrupt, limit_file_size
from tensorrt_bundles import Bundles

from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict
from edgellm.build.tensorrt import compiler, target
from edgellm.core.artifact import MADE_BY_NAME, verify_files
from edgellm.core.checksums import RECORD_NAME
from edgellm.core.manifest import (
    DRAFT_ENGINE,
    LLM_BUNDLE,
    LLM_ENGINE,
    VISUAL_ENGINE,
    load_bundle,
    load_engine,
)
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.tensorrt.library import trt_import
from edgellm.tools.inspection.sources.detect import inspect

pytest.importorskip(
    "tensorrt_rtx", reason="engines are compiled with tensorrt_rtx: pip install '.[tensorrt-rtx]'"
)
SMALL = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64, "--backend", "tensorrt")
ADA = (*SMALL, "--gpu", "8.9")
has_no_gpu = pytest.mark.skipif(compute_capability() is not None, reason="there is a GPU here")


@pytest.fixture(scope="module")
def half_bundle(tmp_path_factory) -> Path:
    return Bundles(tmp_path_factory.mktemp("half")).make("base", "fp16")


@pytest.fixture(scope="module")
def int4_bundle(tmp_path_factory) -> Path:
    return Bundles(tmp_path_factory.mktemp("int4")).make("base", "int4_awq")


def _build(command, bundle, engine, *flags, **options):
    return command("llm_build", "--onnxDir", bundle, "--engineDir", engine, *flags, **options)


def test_llm_build_compiles_and_writes_a_layer_report(command, half_bundle, tmp_path):
    flags = (*ADA, "--layerReport", "--optLevel", 2, "--workspace", 64)
    result = _build(command, half_bundle, tmp_path / "engine", *flags)
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    verify_files(tmp_path / "engine", manifest.files)
    assert (manifest.backend, manifest.machine) == ("tensorrt", "sm89")
    assert manifest.backend_version.startswith("TensorRT-RTX 1.7.1")
    assert [(graph.path, graph.max_rows) for graph in manifest.main_graphs] == [
        ("llm.engine", 1),
        ("llm.engine", 48),
    ]
    assert (manifest.options["--workspace"], manifest.options["--optLevel"]) == (64, 2)
    report = json.loads((tmp_path / "engine" / "llm.layers.json").read_text())
    assert report["passes"]["decode"]["fused_attentions"] == manifest.decoder.kv.num_layers
    (fused,) = inspect(tmp_path / "engine").fusions
    assert (fused.graph, fused.told_by) == ("llm", "the compiler's log")
    assert [(each.name, each.products) for each in fused.passes] == [
        ("decode", {"Half": 17}),
        ("prefill", {"Half": 17}),
    ]
    assert "TensorRT-RTX 1.7.1" in result.stdout
    assert "a pass takes" not in result.stdout  # nothing ran
    leftovers = {path.name for path in (tmp_path / "engine").iterdir()} - set(manifest.files)
    assert leftovers == {"manifest.json", RECORD_NAME, MADE_BY_NAME}


def test_visual_build_compiles_an_encoder(command_here, tmp_path):
    bundle = Bundles(tmp_path).make("smolvlm", "fp16")
    flags = ("--onnxDir", bundle, "--engineDir", tmp_path / "engine", "--backend", "tensorrt")
    result = command_here("visual_build", *flags, "--gpu", "sm120")
    assert result.returncode == 0, result.stderr
    assert load_engine(tmp_path / "engine", VISUAL_ENGINE).machine == "sm120"
    dry = command_here("visual_build", *flags[:2], "--engineDir", tmp_path / "e", *flags[4:],
                  "--gpu", "sm120", "--dryRun")  # fmt: skip
    assert dry.returncode == 0, dry.stderr
    assert "ok     disk: " in dry.stdout
    assert not (tmp_path / "e").exists()


def test_dry_run_predicts_the_engine(command_here, int4_bundle, tmp_path):
    predicted = _build(command_here, int4_bundle, tmp_path / "engine", *ADA, "--dryRun")
    assert predicted.returncode == 0, predicted.stderr
    assert "tokens/s" not in predicted.stdout  # of another memory than this machine's
    assert not (tmp_path / "engine").exists()


def test_dry_runs_report_sizes_and_unsupported_precisions(command_here, half_bundle, tmp_path):
    fits = _build(command_here, half_bundle, tmp_path / "engine", *ADA, "--dryRun")
    assert fits.returncode == 0, fits.stderr
    assert "ok     compiler: TensorRT-RTX 1.7.1" in fits.stdout
    assert "ok     build memory: " in fits.stdout
    assert "engine memory" not in fits.stdout  # the GPU is not here
    lacks = Bundles(tmp_path).make("base", "fp8")
    result = _build(command_here, lacks, tmp_path / "engine", *SMALL, "--gpu", "8.6", "--dryRun")
    assert_one_line_error(result, "FP8 needs a GPU of compute capability 8.9", "hint: quantize")


@pytest.mark.parametrize(("size", "fits"), [(8 << 30, True), (1 << 20, False)])
def test_a_dry_run_compares_with_the_memory_of_this_gpu(
    half_bundle, tmp_path, monkeypatch, size, fits
):
    monkeypatch.setattr(compiler, "memory_bytes", lambda: size)
    monkeypatch.setattr(target, "compute_capability", lambda: 89)
    plan = Plan(max_input_len=48, kv_capacity=64, threads=0, prefill="auto")
    manifest = load_bundle(half_bundle, LLM_BUNDLE)
    needs = predict(half_bundle, manifest, plan, "tensorrt", tmp_path).needs
    assert needs[-1].what == "engine memory"
    assert ("the GPU has 8.6 GB" if fits else "the GPU has 1.0 MB") in needs[-1].found
    assert bool(needs[-1].remedy) != fits


@has_no_gpu
def test_engines_of_another_machine_are_rejected_before_loading(command, half_bundle, tmp_path):
    engine = tmp_path / "engine"
    assert _build(command, half_bundle, engine, *ADA).returncode == 0
    plan = engine / "llm.engine"
    plan.write_bytes(b"\0" * plan.stat().st_size)  # would be an error of the library's
    requests = tmp_path / "requests.json"
    requests.write_text('{"requests": [{"messages": [{"role": "user", "content": "w9"}]}]}')
    files = ("--inputFile", requests, "--outputFile", tmp_path / "out.json")
    result = command("llm_inference", "--engineDir", engine, *files, "--noVerify")
    assert_one_line_error(
        result,
        "was compiled by TensorRT-RTX 1.7.1",
        "for sm89",
        "has no NVIDIA GPU",
        "run llm_build",
    )
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu", "Orin"), "--gpu Orin is not a compute capability"),
        (("--gpu", "9.0"), "does not compile for compute capability 9.0"),
        ((*ADA[-2:], "--timingCache", "cache"), "has no timing cache"),
        ((*ADA[-2:], "--quantize", "int8"), "--quantize int8 rounds for the CPU"),
        ((*ADA[-2:], "--prefill", "int8"), "--prefill int8 is for the CPU"),
        ((*ADA[-2:], "--kvCache", "int4"), "--kvCache int4 is for the CPU"),
        ((*ADA[-2:], "--kvCache", "int8"), "int8 needs edgellm's kernels: TensorRT-RTX"),
        (
            ("--gpu", "8.6", "--kvCache", "fp8"),
            "fp8 needs a GPU of compute capability 8.9",
        ),
        ((*ADA[-2:], "--kvCache", "fp8", "--kernels", "tensorrt"), "updates caches of floats only"),
        ((*ADA[-2:], "--kernels", "edgellm"), "--kernels edgellm: TensorRT-RTX 1.7.1"),
        ((*ADA[-2:], "--kernels", "onnxruntime"), "--kernels onnxruntime is not for tensorrt"),
        (("--backend", "onnxruntime", "--kernels", "tensorrt"), "--kernels tensorrt is not for"),
        (("--backend", "onnxruntime", "--kvCache", "fp8"), "fp8 is for --backend tensorrt"),
        ((*ADA[-2:], "--backend", "onnxruntime"), "--gpu is not for ONNX Runtime"),
        (("--backend", "onnxruntime", "--layerReport"), "--layerReport is not for ONNX Runtime"),
        ((*ADA[-2:], "--stripWeights"), "--stripWeights: TensorRT-RTX 1.7.1"),
        (("--backend", "onnxruntime", "--stripWeights"), "--stripWeights is not for ONNX Runtime"),
    ],
)
def test_unsupported_flags_are_rejected_with_a_hint(
    command_here, half_bundle, tmp_path, flags, message
):
    result = _build(command_here, half_bundle, tmp_path / "engine", *SMALL, *flags)
    assert_one_line_error(result, message, "hint: ")
    assert not (tmp_path / "engine").exists()


def test_a_named_gpu_implies_tensorrt(command_here, half_bundle, tmp_path, monkeypatch):
    """Only TensorRT-RTX compiles ahead of time."""
    flags = (*SMALL[:4], "--gpu", "8.9", "--dryRun")
    said = "backend: TensorRT (--gpu 8.9 compiles ahead of time)\n"
    for more in ((), ("--device", "cuda")):
        result = _build(command_here, half_bundle, tmp_path / "engine", *flags, *more)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(said)
    result = _build(command_here, half_bundle, tmp_path / "engine", *flags, "--device", "cpu")
    assert_one_line_error(result, "--gpu is not for", "--backend tensorrt")
    doctor = ("edgellm-doctor", "--onnxDir", half_bundle, "--gpu", "8.9")
    assert "TensorRT-RTX 1.7.1" in command_here(*doctor).stdout
    monkeypatch.setattr(trt_import, "_load", lambda name: f"{name} is not installed")
    result = _build(command_here, half_bundle, tmp_path / "engine", *flags)
    assert_one_line_error(result, "tensorrt_rtx is not installed", "tensorrt-rtx")
    assert not (tmp_path / "engine").exists()


@has_no_gpu
def test_a_gpu_must_be_named_where_there_is_none(command_here, half_bundle, tmp_path):
    result = _build(command_here, half_bundle, tmp_path / "engine", *SMALL)
    assert_one_line_error(result, "there is no NVIDIA GPU here", "--gpu 89")


def test_ctrl_c_leaves_nothing_half_written(half_bundle, tmp_path):
    flags = ["--onnxDir", half_bundle, "--engineDir", tmp_path / "engine", *ADA]
    code, said = interrupt(["llm_build", *flags], tmp_path, ".*/files/llm.lowered.onnx")
    assert (code, said[-1:]) == INTERRUPTED
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_reported_in_one_line(command, half_bundle, tmp_path):
    result = _build(command, half_bundle, tmp_path / "engine", *ADA, preexec_fn=limit_file_size)
    assert_one_line_error(result, "File too large")
    assert not list(tmp_path.iterdir())


def test_llm_build_compiles_medusa_heads(command_here, eagle_pairs, tmp_path):
    heads = eagle_pairs("medusa").draft_bundle
    base = shutil.ignore_patterns("draft")
    shutil.copytree(eagle_pairs("medusa").engine, tmp_path / "engine", ignore=base)
    result = _build(
        command_here, heads, tmp_path / "engine", *ADA, "--eagleDraft", "--profilingDetailed"
    )
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine" / "draft", DRAFT_ENGINE)
    verify_files(tmp_path / "engine" / "draft", manifest.files)
    assert (manifest.backend, manifest.machine) == ("tensorrt", "sm89")
    assert (manifest.draft.num_heads, [*manifest.files]) == (
        3,
        ["heads.engine", "heads.layers.json"],
    )
    shown = command_here("edgellm-inspect", tmp_path / "engine" / "draft", "--all")
    assert (shown.returncode, "medusa" in shown.stdout) == (0, True), shown.stderr
    assert "Compiled kernels: heads" in shown.stdout
