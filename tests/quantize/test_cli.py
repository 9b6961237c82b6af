"""The `edgellm-quantize` command: interrupts, invalid input, foreign files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import assert_one_line_error, interrupt
from quantize_cases import load, make_job, make_model, write_text
from safetensors.numpy import save_file

from edgellm.core.artifact import MADE_BY_NAME
from edgellm.core.commands.output_folder import require_own
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
    UnsupportedModelError,
)
from edgellm.quantize import work_folder as work_module
from edgellm.quantize.algorithms import modelopt
from edgellm.quantize.models import checks
from edgellm.quantize.pipeline import checkpoint_writer as folder_module
from edgellm.quantize.pipeline import run as run_module
from edgellm.quantize.pipeline.run import run_job

FACTS = {"command": "edgellm-quantize llm", "settings": {}, "inputs": {}}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_model(folder / "model", "llama")
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture
def job(place, tmp_path):
    return make_job(place / "model", place / "text.jsonl", tmp_path / "out", "fp8")


@pytest.fixture
def damaged(place, tmp_path):
    """A job for a copy of the model that a test may damage."""
    shutil.copytree(place / "model", tmp_path / "model")
    return make_job(tmp_path / "model", place / "text.jsonl", tmp_path / "out", "fp8")


def _quiet(*_: object) -> None:
    pass


def _change(job, name, change) -> None:
    tensors = load(Path(job.model_dir))
    tensors = {key: np.array(value) for key, value in tensors.items()}
    change(tensors[name])
    save_file(tensors, Path(job.model_dir) / "model.safetensors", metadata={"format": "pt"})


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files that an interrupt must not change: all without timings and sizes."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.startswith("edgellm_quant") and path.name != MADE_BY_NAME
    }


def test_the_command_prints_progress_and_a_summary(command, place, tmp_path):
    arguments = ["--calib_dataset", place / "text.jsonl", "--num_samples", 8, "--seq_len", 32]
    result = command(
        "edgellm-quantize", "llm", "--model_dir", place / "model", "--output_dir",
        tmp_path / "out", "--quantization", "int8_sq", "--kv-cache-quantization", "fp8",
        *arguments,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "worst layers" in result.stdout
    assert "KL " in result.stdout
    assert "top-1 agreement" in result.stdout
    assert "21 layers at 8." in result.stdout
    assert "layer 2 (3/4)" in result.stderr
    assert "Inserted" not in result.stdout + result.stderr  # ModelOpt's prints


@pytest.mark.nightly
def test_a_run_resumes_after_ctrl_c(command_here, place, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = make_model(tmp_path / "deep", "llama", num_hidden_layers=8)
    first = [
        "edgellm-quantize", "llm", "--model_dir", model, "--output_dir", tmp_path / "out",
        "--calib_dataset", place / "text.jsonl", "--num_samples", 12, "--seq_len", 32,
        "--held_out", 2, "--quantization", "nvfp4", "--algo", "max", "--device", "cpu",
    ]  # fmt: skip
    result = interrupt(first, tmp_path, "out.quantizing/layer.00001.json")
    kept = f"error: interrupted; finished layers are kept in {tmp_path / 'out.quantizing'}"
    assert (result[0], result[1][-1:]) == (130, [kept])
    assert not (tmp_path / "out").exists()
    done = len(list((tmp_path / "out.quantizing").glob("layer.*.json")))
    assert 2 <= done < 8
    assert command_here(*first).returncode == 0
    run_job(make_job(model, place / "text.jsonl", tmp_path / "whole", "nvfp4"), _quiet)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
    assert [path.name for path in tmp_path.glob("*.quantizing")] == []


@pytest.mark.each_change("int4_awq")
@pytest.mark.parametrize("scheme", ["fp8", "int4_awq"])
def test_an_interrupt_at_any_file_does_not_change_the_result(place, tmp_path, monkeypatch, scheme):
    """Interrupt when the first, second, ... file is finished, and resume."""
    options = {"lm_head_quantization": "fp8"}
    text = place / "text.jsonl"
    whole = make_job(place / "model", text, tmp_path / "whole", scheme, **options)
    run_job(whole, _quiet)
    job = make_job(place / "model", text, tmp_path / "out", scheme, **options)
    replace, calls = Path.replace, 0

    def cut(path, target):
        nonlocal calls
        calls += job.work_dir in path.parents
        if calls == attempts:
            raise KeyboardInterrupt
        return replace(path, target)

    attempts = 0
    while not job.output_dir.exists():
        attempts, calls = attempts + 1, 0
        assert attempts < 40
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", cut)
            run_job(job, _quiet)
    assert attempts > 6
    assert _files(job.output_dir) == _files(whole.output_dir)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_killed_while_its_files_move_can_be_repeated(tmp_path, monkeypatch, replaces):
    """The folder appears at once, or its files are recorded as this command's."""
    output, replace, moves = tmp_path / "out", Path.replace, 0

    def write(name: str, files: list[str]) -> Path:
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(name)
        listed = {"files": sorted([*files, folder_module.SIDE_FILE]), "of": name}
        (tmp_path / name / folder_module.SIDE_FILE).write_text(json.dumps(listed))
        return tmp_path / name

    if replaces:
        folder_module.publish(write("first", ["config.json", "model-1.safetensors"]), output, FACTS)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def cut(path, target):
        nonlocal moves
        moves += 1
        if moves == attempt:
            raise KeyboardInterrupt
        return replace(path, target)

    for attempt in range(1, 9):
        moves = 0
        second = write(f"second{attempt}", ["config.json", "model.safetensors", "tokenizer.json"])
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", cut)
            folder_module.publish(second, output, FACTS)
            break
        require_own(output)
    assert attempt == (7 if replaces else 3)
    assert {path.name for path in output.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        folder_module.SIDE_FILE,
        MADE_BY_NAME,
    }
    assert json.loads((output / folder_module.SIDE_FILE).read_text())["of"] == f"second{attempt}"


def test_a_run_with_other_settings_is_rejected(job, place):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job, stop)
    other = make_job(place / "model", place / "text.jsonl", job.output_dir, "nvfp4")
    with pytest.raises(EdgeLLMError, match="holds an unfinished run with other settings"):
        run_job(other, _quiet)
    run_job(job, _quiet)


def test_a_result_above_max_kl_is_not_written(job):
    page = job.output_dir.with_name("page.html")
    strict = dataclasses.replace(job, max_kl=1e-9, report=page)
    with pytest.raises(EdgeLLMError, match=r"is above --max_kl 1e-09") as caught:
        run_job(strict, _quiet)
    assert "larger --max_kl writes it" in caught.value.hint
    assert not job.output_dir.exists()
    assert "KL divergence" in page.read_text()
    larger = dataclasses.replace(job, max_kl=10.0)
    report = run_job(larger, _quiet)
    assert 1e-9 < report.quality.kl_divergence < 10
    assert (job.output_dir / "model.safetensors").exists()
    assert not job.work_dir.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quantization", "fp9"], ["no such choice", "did you mean fp8", "int4_awq"]),
        (["--quantization", "fp8", "--lm_head_quantization", "int7"], ["choices: fp8, nvfp4"]),
        (["--quantization", "fp8", "--kv_cache_quantization", "int4"], ["choices: fp8, int8"]),
        (["--quantization", "int4_awq", "--block_size", "48"], ["choices: 128, 64, 32"]),
        (["--quantization", "fp8", "--block_size", "32"], ["is for INT4", "leave it out"]),
    ],
)
def test_invalid_flags_are_rejected(command_here, place, tmp_path, flags, words):
    arguments = ["--model_dir", place / "model", "--output_dir", tmp_path / "out"]
    result = command_here("edgellm-quantize", "llm", *arguments, *flags)
    assert_one_line_error(result, *words)
    assert result.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_invalid_report_pages_are_rejected(job, tmp_path):
    (tmp_path / "own.html").write_text("<h1>Mine</h1>")
    for name, words in {
        "page.txt": "is not an .html file",
        ".": "is not an .html file",
        "none/page.html": "no such folder",
        "/proc/page.html": "/proc is not writable",
        "own.html": "is not a report of edgellm-quantize",
    }.items():
        with pytest.raises(EdgeLLMError, match=words):
            run_job(dataclasses.replace(job, report=tmp_path / name), _quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["own.html"]


def test_an_unknown_device_is_rejected(place, tmp_path):
    text = place / "text.jsonl"
    job = make_job(place / "model", text, tmp_path / "out", "fp8", device="tpu")
    with pytest.raises(EdgeLLMError, match="--device tpu"):
        run_job(job, _quiet)


def test_invalid_models_fail_before_any_output(damaged):
    """The error names the fault."""
    name = "model.layers.1.mlp.up_proj.weight"

    def assert_rejected(error, words):
        with pytest.raises(error, match=words):
            run_job(damaged, _quiet)
        assert not damaged.output_dir.exists()
        assert not damaged.work_dir.exists()

    config = Path(damaged.model_dir) / "config.json"
    good = json.loads(config.read_text())
    for change, words in (
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized already"),
        ({"logit_scale": 3.0}, "logit_scale"),
        ({"max_position_embeddings": 16}, "--seq_len 32: the model has 16 positions"),
    ):
        config.write_text(json.dumps({**good, **change}))
        assert_rejected(EdgeLLMError, words)
    config.write_text(json.dumps(good))

    def spoil(weight):
        weight[3, 5] = np.nan

    _change(damaged, name, spoil)
    assert_rejected(BrokenArtifactError, f"tensor {name} holds values that are not numbers")
    _change(damaged, name, lambda weight: weight.fill(ml_dtypes.bfloat16(0)))
    assert_rejected(BrokenArtifactError, f"tensor {name} is all zeros")


def test_shapes_that_the_scheme_cannot_store_are_rejected(place, tmp_path):
    make_model(tmp_path / "odd", "llama", intermediate_size=80)
    job = make_job(tmp_path / "odd", place / "text.jsonl", tmp_path / "out", "int4_awq")
    with pytest.raises(UnsupportedModelError, match="down_proj has 80 inputs"):
        run_job(job, _quiet)


def test_too_little_memory_fails_before_the_run(job, monkeypatch):
    monkeypatch.setattr(checks, "available_bytes", lambda: 300 << 20)
    with pytest.raises(LimitError, match=r"needs about .* GB of memory"):
        run_job(job, _quiet)
    assert not job.work_dir.exists()


def test_too_little_disk_fails_before_the_run(job, monkeypatch):
    usage = shutil.disk_usage(job.output_dir.parent)._replace(free=1000)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(LimitError, match="GB of disk"):
        run_job(job, _quiet)


def test_a_full_disk_keeps_finished_layers_and_locks_out_other_runs(job, monkeypatch):
    """The error names folder and bytes; finished layers are stored; a second run is locked out."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def once_more(*_: object) -> None:
        with pytest.raises(EdgeLLMError, match="another edgellm-quantize works in"):
            run_job(job, _quiet)

    with monkeypatch.context() as patch:
        patch.setattr(work_module, "write_safetensors", full)
        with pytest.raises(LimitError, match=rf"in {job.work_dir}: more than \d+ bytes") as caught:
            run_job(job, _quiet)
    assert "finished layers are stored" in caught.value.hint
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_safetensors", full)
        with pytest.raises(LimitError, match=rf"in {job.output_dir.parent}: more than \d+ bytes"):
            run_job(job, once_more)
    assert not job.output_dir.exists()
    run_job(job, _quiet)
    assert [path.name for path in job.output_dir.parent.iterdir()] == ["out"]


def test_foreign_files_are_not_overwritten(job):
    job.output_dir.mkdir()
    foreign = job.output_dir / "model.safetensors"
    foreign.write_bytes(b"mine")
    with pytest.raises(EdgeLLMError, match=r"was not made by edgellm: it has model\.safetensors"):
        run_job(job, _quiet)
    foreign.unlink()
    run_job(job, _quiet)
    notes = job.output_dir / "notes.txt"
    notes.write_text("mine")
    run_job(job, _quiet)
    assert notes.read_text() == "mine"
    assert len(list(job.output_dir.iterdir())) == 11
    job.work_dir.mkdir()
    (job.work_dir / "mine").touch()
    with pytest.raises(EdgeLLMError, match="not of an interrupted run"):
        run_job(job, _quiet)


def test_an_uncalibrated_export_fails_the_run(job, monkeypatch):
    """Without calibration ModelOpt silently writes FP8 without input scales."""
    real = modelopt.quantize

    def uncalibrated(model, recipe, loop, log, **options):
        exported = real(model, recipe, loop, log, **options)
        for name in [name for name in exported.tensors if name.endswith("input_scale")]:
            del exported.tensors[name]
        return exported

    monkeypatch.setattr(run_module, "quantize", uncalibrated)
    with pytest.raises(BrokenArtifactError, match=r"model.layers.0.*input_scale is missing"):
        run_job(job, _quiet)
    assert not job.output_dir.exists()


def test_a_weight_far_from_the_source_fails_the_run(job, monkeypatch):
    """As if smoothing was folded into a norm, but not into a linear layer after it."""
    real = modelopt.quantize

    def broken(model, recipe, loop, log, **options):
        exported = real(model, recipe, loop, log, **options)
        scale = exported.tensors["model.layers.0.self_attn.k_proj.weight_scale"]
        data = (scale.array() * 3).astype(np.float32).tobytes()
        exported.tensors["model.layers.0.self_attn.k_proj.weight_scale"] = type(scale)(
            scale.info, data
        )
        return exported

    monkeypatch.setattr(run_module, "quantize", broken)
    with pytest.raises(BrokenArtifactError, match=r"layers\.0\.self_attn\.k_proj: implausible"):
        run_job(job, _quiet)


@pytest.mark.nightly
def test_memory_does_not_grow_with_layers(place, tmp_path):
    """Quantize 3 and then 15 layers of 5 MB in float32 in one process."""
    sizes = {"hidden_size": 384, "intermediate_size": 768}
    lines = [
        "import resource; from pathlib import Path; from edgellm.quantize.job import Job",
        "from edgellm.quantize.pipeline.run import run_job",
    ]
    for layers in (3, 15):
        model = make_model(tmp_path / f"{layers}", "llama", num_hidden_layers=layers, **sizes)
        text, output = str(place / "text.jsonl"), str(tmp_path / f"out{layers}")
        lines += [
            f"run_job(Job(model_dir={str(model)!r}, output_dir=Path({output!r}), "
            f"quantization='fp8', calib_dataset={text!r}, num_samples=4, seq_len=32, "
            "device='cpu'), lambda *_: None)",
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)",
        ]
    command = [sys.executable, "-c", "\n".join(lines)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shallow, deep = (int(line) / 1e3 for line in printed.split())
    assert deep - shallow < 25  # the 12 layers more have 64 MB in float32
