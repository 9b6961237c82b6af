"""Tests of the command `llm_build --device cuda`."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import INTERRUPTED, assert_one_line_error, interrupt, limit_file_size
from visual_checkpoints import make_visual_checkpoint

from edgellm.core.artifact import verify_files
from edgellm.core.manifest import LLM_ENGINE, VISUAL_ENGINE, load_engine
from edgellm.export import visual
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual

SMALL = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64)
CUDA = ("--backend", "onnxruntime", "--device", "cuda")


def _build(command, bundle, engine, *flags, **options):
    return command(
        "llm_build", "--onnxDir", bundle, "--engineDir", engine, *SMALL, *flags, **options
    )


def test_an_engine_for_cuda_is_built_without_a_gpu(command, tiny_bundle, tmp_path):
    result = _build(command, tiny_bundle, tmp_path / "engine", *CUDA, "--maxBatchSize", 3)
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert manifest.max_batch_size == 3
    verify_files(tmp_path / "engine", manifest.files)
    assert (manifest.machine, manifest.backend) == ("cuda", "onnxruntime_cuda")
    assert {"llm.onnx", "llm.data", "rows.onnx"} <= set(manifest.files)
    assert "nothing was measured" in result.stderr
    assert "a pass takes" not in result.stdout


def test_the_cpu_is_the_default_device_of_onnxruntime(command_here, tiny_bundle, tmp_path):
    result = _build(command_here, tiny_bundle, tmp_path / "engine", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert manifest.machine != "cuda"
    assert manifest.cost_ms["pass"]


def test_visual_build_builds_an_encoder_for_cuda(command, tmp_path):
    checkpoint = make_visual_checkpoint(tmp_path / "checkpoint", visual.find("smolvlm").TINY)
    source = open_checkpoint(str(checkpoint), tokenizer=False)
    export_visual(source, tmp_path / "bundle", VisualOptions("fp16"))
    folders = ("--onnxDir", tmp_path / "bundle", "--engineDir", tmp_path / "engine")
    result = command("visual_build", *folders, *CUDA)
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine", VISUAL_ENGINE)
    assert (manifest.machine, manifest.main_graphs[0].precision) == ("cuda", "fp16")


def test_dry_run_predicts_the_engine(command_here, tiny_bundle, tmp_path):
    flags = (*CUDA, "--quantize", "int8")
    predicted = _build(command_here, tiny_bundle, tmp_path / "engine", *flags, "--dry-run")
    assert predicted.returncode == 0, predicted.stderr
    assert "tokens/s" not in predicted.stdout  # of another memory than this machine's
    assert not (tmp_path / "engine").exists()
    megabytes = float(predicted.stdout.splitlines()[0].split()[1])
    _build(command_here, tiny_bundle, tmp_path / "engine", *flags)
    size = load_engine(tmp_path / "engine", LLM_ENGINE).files["llm.data"].num_bytes
    assert megabytes == pytest.approx(size / 1e6, rel=0.1, abs=0.1)


@pytest.mark.parametrize(
    ("flags", "message", "remedy"),
    [
        (("--device", "gpu"), "--device gpu: give cpu or cuda", ""),
        (("--backend", "tensorrt", "--device", "cpu"), "--device cpu is not for", "onnxruntime"),
        (
            (*CUDA, "--kvCache", "int8"),
            "--kvCache int8 is not for ONNX Runtime on CUDA",
            "leave out --kvCache",
        ),
        ((*CUDA, "--kvCache", "int4"), "--kvCache int4 is not for ONNX", "leave out --kvCache"),
        ((*CUDA, "--prefill", "int8"), "--prefill int8 is for the CPU", "leave out --prefill"),
        ((*CUDA, "--gpu", "8.9"), "--gpu is not for ONNX Runtime", "--backend tensorrt"),
        (("--attention", "plain"), "--attention is not for cpu", "--device cuda"),
        ((*CUDA, "--attention", "flash"), "--attention flash: give auto, fused, plain", ""),
    ],
    ids=str,
)
def test_unsupported_flags_are_rejected_with_a_remedy(
    command_here, tiny_bundle, tmp_path, flags, message, remedy
):
    result = _build(command_here, tiny_bundle, tmp_path / "engine", *flags)
    assert_one_line_error(result, message, remedy)
    assert not (tmp_path / "engine").exists()


def test_visual_build_rejects_unknown_devices(command_here, tiny_bundle, tmp_path):
    folders = ("--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine")
    result = command_here("visual_build", *folders, "--device", "gpu")
    assert_one_line_error(result, "--device gpu: give cpu or cuda")


def test_ctrl_c_leaves_nothing_half_written(tiny_bundle, tmp_path):
    flags = ["--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine", *SMALL, *CUDA]
    code, said = interrupt(["llm_build", *flags], tmp_path, ".*/files/llm.data")
    assert (code, said[-1:]) == INTERRUPTED
    assert not list(Path(tmp_path).iterdir())


def test_a_full_disk_is_reported_in_one_line(command, tiny_bundle, tmp_path):
    result = _build(command, tiny_bundle, tmp_path / "e", *CUDA, preexec_fn=limit_file_size)
    assert_one_line_error(result, "File too large")
    assert not list(tmp_path.iterdir())
