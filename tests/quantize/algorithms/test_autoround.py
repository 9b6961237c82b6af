"""`edgellm-quantize llm --algo autoround`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantize_cases import decode, load, make_job, make_model, write_text

from edgellm.core.errors import EdgeLLMError
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.algorithms import autoround
from edgellm.quantize.formats.modelopt import pack_int4, unpack_int4
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("autoround")
    make_model(folder / "model", "qwen3")
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture
def rounding(place, tmp_path) -> Job:
    return make_job(
        place / "model", place / "text.jsonl", tmp_path / "out", "int4_awq", algo="autoround",
        num_samples=16,
    )  # fmt: skip


def _quiet(*_: object) -> None:
    pass


def test_it_learns_from_the_layers_output(rounding, tmp_path, monkeypatch):
    """Fewer steps leave a larger error; values differ from rounding to nearest."""
    monkeypatch.setitem(autoround._ITERATIONS, "cpu", 40)
    learned = run_job(rounding, _quiet)
    monkeypatch.setitem(autoround._ITERATIONS, "cpu", 1)
    started = run_job(replace(rounding, output_dir=tmp_path / "started"), _quiet)
    assert learned.quality.kl_divergence < 0.7 * started.quality.kl_divergence
    assert learned.layers[-1].stream_error < 0.9 * started.layers[-1].stream_error
    assert learned.quantization == "int4_autoround"
    found, source = load(rounding.output_dir), load(Path(rounding.model_dir))
    name = "model.layers.1.mlp.down_proj"
    weight = source[f"{name}.weight"].astype(np.float32)
    nearest = np.linalg.norm(unpack_int4(*pack_int4(weight, 32)) - weight)
    assert nearest < np.linalg.norm(decode(found, name) - weight) < 2 * nearest
    assert found[f"{name}.weight_scale"].min() > 0
    bundle = tmp_path / "bundle"
    export_llm(open_checkpoint(str(rounding.output_dir)), bundle, ExportOptions(dtype="fp32"))


def test_an_interrupt_does_not_change_the_result(rounding, tmp_path, monkeypatch):
    monkeypatch.setitem(autoround._ITERATIONS, "cpu", 4)
    whole = replace(rounding, output_dir=tmp_path / "whole", lm_head_quantization="int4")
    run_job(whole, _quiet)

    def stop(_what: str, done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    cut = replace(whole, output_dir=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run_job(cut, stop)
    torch.rand(7)
    np.random.rand(7)
    run_job(cut, _quiet)
    name = "model.safetensors"
    assert (cut.output_dir / name).read_bytes() == (whole.output_dir / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization": "fp8"}, "--algo autoround: no such choice"),
        ({"algo": "autorounds"}, "did you mean autoround"),
        ({"base_model_dir": "base"}, "does not support drafts"),
    ],
)
def test_unsupported_jobs_are_rejected(rounding, change, words):
    with pytest.raises(EdgeLLMError) as caught:
        run_job(replace(rounding, **change), _quiet)
    assert words in f"{caught.value} {caught.value.hint}"
    assert not rounding.work_dir.exists()


def test_a_missing_package_is_reported(rounding, monkeypatch):
    monkeypatch.setattr(autoround.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EdgeLLMError, match="needs the package auto-round"):
        run_job(rounding, _quiet)
