"""`edgellm-quantize llm --algo auto` and `--rotate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import decode, load, make_job, make_model, write_text

from edgellm.contract import EdgeLLMError, UnsupportedModelError
from edgellm.quantize import contest
from edgellm.quantize.contest import run_contest
from edgellm.quantize.layerwise_run import run_job
from edgellm.quantize.plan import Job

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("contest")
    make_model(folder / "model", "qwen2", num_hidden_layers=2)
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture
def job(place, tmp_path, monkeypatch) -> Job:
    """AutoRound, which has tests of its own, is left out."""
    monkeypatch.setattr(contest, "is_there", lambda: False)
    return make_job(
        place / "model", place / "text.jsonl", tmp_path / "out", "int4_awq", algo="auto",
        num_samples=16,
    )  # fmt: skip


def _quiet(*_: object) -> None:
    pass


def test_the_best_stays_and_an_interrupt_costs_only_what_is_unfinished(job, tmp_path):
    report = run_contest(job, None, _quiet)
    assert report.tried is not None
    assert set(report.tried) == {"gptq", "gptq, values rotated", "awq"}
    assert report.quality.kl_divergence == min(report.tried.values())
    side = json.loads((job.output_dir / "edgellm_quant.json").read_text())
    assert side["tried"] == report.tried
    assert not job.work_dir.exists()

    begun: list[str] = []

    def stop(what: str, done: int, _total: int) -> None:
        begun.append(what)
        if what.startswith("awq") and done == 1:
            raise KeyboardInterrupt

    cut = replace(job, output_dir=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        run_contest(cut, None, stop)
    assert not cut.output_dir.exists()
    begun.clear()
    again = run_contest(cut, None, lambda what, *_: begun.append(what))
    assert {what.split(":")[0] for what in begun} == {"awq"}
    assert again.tried == report.tried
    name = "model.safetensors"
    assert (cut.output_dir / name).read_bytes() == (job.output_dir / name).read_bytes()


def test_a_budget_of_no_time_gives_the_first(job):
    report = run_contest(job, 0.0, _quiet)
    assert set(report.tried or ()) == {"gptq"}


def test_too_far_is_refused_and_kept(job):
    with pytest.raises(EdgeLLMError, match="above --max_kl"):
        run_contest(replace(job, max_kl=1e-9), 0.0, _quiet)
    assert not job.output_dir.exists()
    assert run_contest(job, 0.0, _quiet).tried


def test_rotated_values_compute_the_same(place, job):
    """All of the float model stays, but the values and what reads them."""
    rotated = replace(job, algo="gptq", rotate="values")
    report = run_job(rotated, _quiet)
    found, source = load(rotated.output_dir), load(place / "model")
    layer = "model.layers.1.self_attn."
    value, output = (decode(found, f"{layer}{name}_proj") for name in "vo")
    wanted = [source[f"{layer}{name}_proj.weight"].astype(np.float32) for name in "vo"]
    assert np.linalg.norm(value - wanted[0]) > 0.5 * np.linalg.norm(wanted[0])
    heads = output.shape[1] // len(value)
    config = json.loads((place / "model" / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    products = []
    for v, o in ((value, output), wanted):
        by_head = np.repeat(v.reshape(-1, head_dim, v.shape[1]), heads, 0)
        columns = o.reshape(len(o), -1, head_dim)
        products.append(np.einsum("ohd,hdi->hoi", columns, by_head))
    assert np.linalg.norm(products[0] - products[1]) < 0.3 * np.linalg.norm(products[1])
    bias = [each[f"{layer}v_proj.bias"].astype(np.float32) for each in (found, source)]
    assert np.linalg.norm(bias[0]) == pytest.approx(np.linalg.norm(bias[1]), rel=1e-2)
    plain = run_job(replace(job, algo="gptq", output_dir=job.output_dir.parent / "p"), _quiet)
    assert report.quality.kl_divergence < 2 * plain.quality.kl_divergence


def test_a_model_without_values_of_its_own(place, job):
    fused = make_model(place / "fused", "phi3")
    with pytest.raises(UnsupportedModelError, match="no v_proj of its own"):
        run_job(replace(job, model_dir=str(fused), algo="gptq", rotate="values"), _quiet)
