"""Tests of the command `llm_build`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from conftest import INTERRUPTED, assert_one_line_error, interrupt, limit_file_size
from manifests import read_manifest, write_manifest

from edgellm.build import cli, resource_estimate
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.artifact import verify_files
from edgellm.core.errors import EdgeLLMError, LimitError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime import runners

SMALL = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64)


def _build(command, bundle, engine, *more, **options):
    arguments = more or SMALL
    return command("llm_build", "--onnxDir", bundle, "--engineDir", engine, *arguments, **options)


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_llm_build_writes_a_timed_and_checked_engine(command, tiny_bundle, tmp_path):
    result = _build(command, tiny_bundle, tmp_path / "engine")
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    verify_files(tmp_path / "engine", manifest.files)
    assert (manifest.max_input_len, manifest.max_kv_cache_capacity) == (48, 64)
    assert manifest.backend == "onnxruntime_cpu"
    # half of 64 is context
    assert list(manifest.cost_ms["pass"]) == ["1", "2", "4", "8", "16", "32"]
    assert all(cost > 0 for cost in manifest.cost_ms["pass"].values())
    assert "a pass takes" in result.stdout
    assert "check: decoder passed: 12 tokens, relative error" in result.stdout
    verdict = result.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"verdict: [\d.]+ MB in [\d.]+ s; one sequence decodes about \d+ tokens/s here when short; "
        r"outputs equal those of the bundle up to the engine's rounding",
        verdict,
    )


def test_max_verify_tree_size_needs_no_eagle_base(command_here, tiny_bundle, tmp_path):
    result = _build(
        command_here, tiny_bundle, tmp_path / "engine", *SMALL, "--maxVerifyTreeSize", 12
    )
    assert result.returncode == 0, result.stderr
    built = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert (built.max_verify_tree_size, built.hidden_taps) == (12, ())


def test_flags_may_be_kebab_case(command_here, tiny_bundle, tmp_path):
    arguments = ("--onnx-dir", tiny_bundle, "--engine-dir", tmp_path / "engine")
    lengths = ("--max-input-len", 16, "--maxKVCacheCapacity", 32, "--maxBatchSize", 4)
    result = command_here("llm_build", *arguments, *lengths)
    assert result.returncode == 0, result.stderr
    assert load_engine(tmp_path / "engine", LLM_ENGINE).max_batch_size == 4
    for backend, kernels in (("onnxruntime", "onnxruntime"), ("tensorrt", "tensorrt")):
        flags = ("--backend", backend, "--kernels", kernels, "--dry-run")
        refused = command_here("llm_build", *arguments, *lengths, *flags)
        assert_one_line_error(refused, "a pass serves one request", "--kernels edgellm")


def test_dry_run_builds_nothing(command_here, tiny_bundle, tmp_path):
    result = _build(command_here, tiny_bundle, tmp_path / "engine", *SMALL, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "engine").exists()
    for word in ("engine", "KV cache", "peak build memory", "tokens/s"):
        assert word in result.stdout


def test_dry_run_predicts_the_engine(command_here, tiny_bundle, tmp_path):
    predicted = _build(command_here, tiny_bundle, tmp_path / "engine", *SMALL, "--dry-run").stdout
    megabytes = float(predicted.splitlines()[1].split()[1])
    _build(command_here, tiny_bundle, tmp_path / "engine")
    files = load_engine(tmp_path / "engine", LLM_ENGINE).files
    actual = sum(record.num_bytes for name, record in files.items() if name.endswith(".data")) / 1e6
    assert megabytes == pytest.approx(actual, rel=0.1, abs=0.2)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (("--maxInputLen", 65, "--maxKVCacheCapacity", 64), "exceeds --maxKVCacheCapacity 64"),
        (("--maxInputLen", 8, "--maxKVCacheCapacity", 129), "exceeds the model's 128 positions"),
        ((*SMALL, "--backend", "tensorflow"), "unknown backend 'tensorflow'"),
        ((*SMALL, "--prefill", "fp4"), "give auto, same or int8"),
        ((*SMALL, "--prefill", "int8"), "is for quantized bundles"),
    ],
)
def test_unknown_and_contradicting_options_are_rejected(
    command_here, tiny_bundle, tmp_path, lengths, message
):
    result = _build(command_here, tiny_bundle, tmp_path / "engine", *lengths)
    assert_one_line_error(result, message)
    assert not (tmp_path / "engine").exists()


def test_zero_lengths_are_usage_errors(command_here, tiny_bundle, tmp_path):
    result = _build(command_here, tiny_bundle, tmp_path / "engine", "--maxInputLen", 0)
    assert result.returncode == 2
    assert "maxInputLen" in result.stderr


def test_damaged_bundles_are_rejected(command_here, bundle, tmp_path):
    engine = tmp_path / "engine"
    weights = bundle / "model.weights"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    assert_one_line_error(_build(command_here, bundle, engine), "model.weights has")
    weights.write_bytes(data[:1000] + b"\x00\x01" + data[1002:])
    assert_one_line_error(_build(command_here, bundle, engine), "sha256 differs")
    weights.unlink()
    assert_one_line_error(_build(command_here, bundle, engine), "model.weights is missing")
    weights.write_bytes(data)
    graph = bundle / "model.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    assert_one_line_error(_build(command_here, bundle, engine), "model.onnx", "sha256 differs")
    assert not engine.exists()


def test_newer_contracts_and_other_artifacts_are_rejected(
    command_here, bundle, tiny_engine, tmp_path
):
    engine = tmp_path / "engine"
    write_manifest(bundle, {**read_manifest(bundle), "contract_version": 3})
    assert_one_line_error(
        _build(command_here, bundle, engine), "has contract version 3", "update edgellm here"
    )
    assert_one_line_error(_build(command_here, tiny_engine, engine), "is of kind llm_engine")
    assert_one_line_error(_build(command_here, tmp_path / "none", engine), "no such folder")


def test_a_bundle_is_rejected_as_an_engine_folder(command_here, bundle):
    for flags in ((), ("--overwrite",)):
        result = _build(command_here, bundle, bundle, *SMALL, *flags)
        assert_one_line_error(result, "is the input --onnxDir", "another output folder")
    verify_files(bundle, load_bundle(bundle, LLM_BUNDLE).files)


FULL = {
    "available_memory_bytes": 1_000_000,
    "free_disk_bytes": 1000,
    "physical_memory_bytes": 1000,
}


@pytest.mark.parametrize(
    ("short", "said", "remedy"),
    [
        (
            ("available_memory_bytes",),
            r"1\.0 MB are available: .* are missing",
            "quantize the model",
        ),
        (("free_disk_bytes",), "of disk", "free some space"),
        (("physical_memory_bytes",), "a full KV cache takes", "smaller --maxKVCacheCapacity"),
        (tuple(FULL), "are missing; .* of disk .*, ", "free some space"),
    ],
)
def test_exceeded_limits_are_reported_before_the_work(
    tiny_bundle, tmp_path, monkeypatch, short, said, remedy
):
    """Before the bundle is read, too, which takes its time: its damage is not even seen."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    weights = bundle / "model.weights"
    weights.write_bytes(bytes(weights.stat().st_size))
    for name in short:
        monkeypatch.setattr(resource_estimate, name, lambda *_, size=FULL[name]: size)
    with pytest.raises(LimitError, match=said) as caught:
        build_engine(
            "llm",
            bundle,
            tmp_path / "e",
            Plan(max_input_len=16, kv_capacity=32, threads=1, prefill="auto"),
            "auto",
            lambda _: None,
        )
    assert remedy in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_dry_run_shows_all_that_does_not_fit(tiny_bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resource_estimate, "free_disk_bytes", lambda _: 1000)
    arguments = ["--onnxDir", tiny_bundle, "--engineDir", tmp_path / "e", *SMALL, "--dryRun"]
    with pytest.raises(LimitError, match="of disk"):
        cli.app(list(map(str, arguments)), standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok     compiler: 1.") for line in lines)
    assert any(line.startswith("ok     build memory: ") for line in lines)
    fault = next(index for index, line in enumerate(lines) if line.startswith("fault  disk: "))
    assert lines[fault + 1].startswith("       remedy: free some space")


def test_ctrl_c_keeps_the_old_engine(command, tiny_bundle, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    assert _build(command, tiny_bundle, work / "engine").returncode == 0
    before = load_engine(work / "engine", LLM_ENGINE)
    build = [
        "llm_build",
        "--onnxDir",
        tiny_bundle,
        "--engineDir",
        work / "engine",
        *SMALL,
        "--overwrite",
    ]
    code, said = interrupt(build, work, ".engine.partial-*")
    assert (code, said[-1:]) == INTERRUPTED
    assert [path.name for path in work.iterdir()] == ["engine"]
    assert load_engine(work / "engine", LLM_ENGINE) == before


def test_a_failing_disk_leaves_nothing_half_written(command, tiny_bundle, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    result = _build(command, tiny_bundle, work / "engine", preexec_fn=limit_file_size)
    assert_one_line_error(result, "File too large")
    assert not list(work.iterdir())


def test_cuda_is_refused_where_it_cannot_run(command_here, tiny_bundle, tmp_path, monkeypatch):
    """A named library still compiles for the GPU of another machine."""

    def refuse() -> None:
        raise EdgeLLMError("there is no NVIDIA GPU here")

    for name in ("tensorrt", "onnxruntime_cuda"):
        monkeypatch.setattr(runners.find(name), "require_device", refuse)
    engine = tmp_path / "engine"
    result = _build(command_here, tiny_bundle, engine, *SMALL, "--device", "cuda")
    assert_one_line_error(result, "CUDA cannot run here", "leave it out to build for the CPU")
    assert result.returncode == 2
    assert not engine.exists()


def test_the_same_command_returns_at_once(command_here, tiny_bundle, tmp_path):
    engine = tmp_path / "engine"
    assert _build(command_here, tiny_bundle, engine).returncode == 0
    before = {path.name: path.stat().st_mtime_ns for path in engine.iterdir()}
    again = _build(command_here, tiny_bundle, engine)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[-1].startswith(f"{engine}: finished already")
    copy = Path(shutil.copytree(engine, tmp_path / "copy", copy_function=shutil.copyfile))
    assert "finished already" in _build(command_here, tiny_bundle, copy).stdout
    weights = next(copy.glob("*.data"))
    weights.write_bytes(bytes(weights.stat().st_size))
    assert "finished already" not in _build(command_here, tiny_bundle, copy).stdout
    verify_files(copy, load_engine(copy, LLM_ENGINE).files)
    other = _build(command_here, tiny_bundle, engine, *SMALL, "--threads", 1)
    assert_one_line_error(other, "it has --threads 0, not 1", "--overwrite")
    assert other.returncode == 2
    assert before == {path.name: path.stat().st_mtime_ns for path in engine.iterdir()}
    replaced = _build(command_here, tiny_bundle, engine, *SMALL, "--threads", 1, "--overwrite")
    assert replaced.returncode == 0, replaced.stderr
    assert load_engine(engine, LLM_ENGINE).threads == 1
