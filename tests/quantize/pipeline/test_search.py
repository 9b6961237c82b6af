"""`edgellm-quantize llm --algo auto` and `--rotate`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import decode, load, make_job, make_model, write_text
from safetensors.numpy import save_file

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline.flag_checks import check_together, float_layer_options
from edgellm.quantize.pipeline.run import run_job
from edgellm.quantize.pipeline.search import algorithms
from edgellm.quantize.pipeline.search.algorithms import search_algorithms, ways
from edgellm.quantize.pipeline.search.float_layers import choose, search_float_layers
from edgellm.quantize.report.report import Kept

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("contest")
    make_model(folder / "model", "qwen2", num_hidden_layers=2, tie_word_embeddings=True)
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture
def job(place, tmp_path, monkeypatch) -> Job:
    """Return a job of `--algo auto` without AutoRound, which has its own tests."""
    monkeypatch.setattr(algorithms, "is_installed", lambda: False)
    return make_job(
        place / "model", place / "text.jsonl", tmp_path / "out", "int4_awq", algo="auto",
        num_samples=16,
    )  # fmt: skip


def _quiet(*_: object) -> None:
    pass


def test_the_best_candidate_wins_and_finished_ones_survive_an_interrupt(job, tmp_path):
    report = search_algorithms(job, None, _quiet)
    assert report.tried is not None
    assert set(report.tried) == {"gptq", "gptq, values rotated", "awq"}
    divergences = [one.kl_divergence for one in report.tried.values()]
    assert report.quality.kl_divergence == min(divergences)
    side = json.loads((job.output_dir / "edgellm_quant.json").read_text())
    assert side["tried"] == {name: asdict(one) for name, one in report.tried.items()}
    assert "KL by candidate" in (job.output_dir / "edgellm_quant.html").read_text()
    assert not job.work_dir.exists()

    begun: list[str] = []

    def stop(what: str, done: int, _total: int) -> None:
        begun.append(what)
        if what.startswith("awq") and done == 1:
            raise KeyboardInterrupt

    cut = replace(job, output_dir=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        search_algorithms(cut, None, stop)
    assert not cut.output_dir.exists()
    begun.clear()
    again = search_algorithms(cut, None, lambda what, *_: begun.append(what))
    assert {what.split(":")[0] for what in begun} == {"awq"}
    assert again.tried == report.tried
    name = "model.safetensors"
    assert (cut.output_dir / name).read_bytes() == (job.output_dir / name).read_bytes()


def test_without_time_only_the_first_candidate_runs(job):
    report = search_algorithms(job, 0.0, _quiet)
    assert set(report.tried or ()) == {"gptq"}


def test_candidates_above_max_kl_stay_for_a_second_run(job):
    with pytest.raises(EdgeLLMError, match="above --max_kl"):
        search_algorithms(replace(job, max_kl=1e-9), 0.0, _quiet)
    assert not job.output_dir.exists()
    assert search_algorithms(job, 0.0, _quiet).tried


def test_rotated_values_compute_the_same(place, job):
    """Only v_proj and o_proj change."""
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


def test_a_model_without_v_proj_cannot_rotate_values(place, job):
    fused = make_model(place / "fused", "phi3")
    assert ways(replace(job, model_dir=str(fused))) == ["gptq", "awq"]
    untied = make_model(place / "untied", "llama", tie_word_embeddings=False)
    assert "gptq, all rotated" in ways(replace(job, model_dir=str(untied)))
    post_norm = make_model(place / "post-norm", "olmo2", tie_word_embeddings=False)
    assert ways(replace(job, model_dir=str(post_norm))) == ["gptq", "gptq, values rotated", "awq"]
    with pytest.raises(UnsupportedModelError, match="no separate v_proj"):
        run_job(replace(job, model_dir=str(fused), algo="gptq", rotate="values"), _quiet)


def test_the_most_sensitive_layers_stay_float(tmp_path):
    """All except the last one, which adds the least, close to the estimate."""
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=3)
    tensors = load(model)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        place = f"model.layers.2.{name}.weight"
        tensors[place] = (0.2 * tensors[place].astype(np.float32)).astype(tensors[place].dtype)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = write_text(tmp_path / "text.jsonl")
    job = make_job(model, text, tmp_path / "out", "int4_awq", algo="gptq", keep_budget=1000)
    report = search_float_layers(job, _quiet)
    assert report.kept is not None
    assert report.tried is not None
    whole, rest = report.tried.values()
    assert {one.layer for one in report.kept} == {0, 1}
    assert whole.kl_divergence > 10 * rest.kl_divergence
    assert rest.kl_divergence == report.quality.kl_divergence
    alone = (1 - sum(one.share for one in report.kept)) / report.kept[0].share
    assert alone * report.kept[0].divergence == pytest.approx(rest.kl_divergence, rel=0.5)
    assert rest.num_bytes - whole.num_bytes == sum(one.num_bytes for one in report.kept)
    found = load(job.output_dir)
    assert "model.layers.2.mlp.up_proj.weight_scale" in found
    assert "model.layers.1.mlp.up_proj.weight_scale" not in found
    page = (job.output_dir / "edgellm_quant.html").read_text()
    assert "layer 1 stays float: quantizing it alone adds a KL of" in page


def test_float_layers_fit_the_budget():
    costs = [
        Kept(layer=0, divergence=0.1, share=0.2, num_bytes=10),
        Kept(layer=1, divergence=0.3, share=0.6, num_bytes=40),
        Kept(layer=2, divergence=0.05, share=0.1, num_bytes=5),
        Kept(layer=3, divergence=0.0, share=0, num_bytes=1),
    ]
    assert [one.layer for one in choose(costs, 15)] == [0, 2]
    assert choose(costs, 4) == ()
    assert [one.layer for one in choose(costs, 99)] == [0, 2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 5.0}, "--time_budget is for --algo auto"),
        ({"points": 1.0}, "--max_loss is for --quantization auto"),
        (
            {"quantization": "auto", "base_model_dir": "base", "algo": "gptq"},
            "chooses --algo and --block_size itself",
        ),
        ({"algo": "auto", "keep_budget": 5.0}, "--keep_layers auto needs one --algo"),
        ({"algo": "auto", "base_model_dir": "base"}, "--algo auto does not support drafts"),
    ],
)
def test_invalid_combinations_of_flags_are_rejected(options, message):
    options = dict(options)
    minutes, points = options.pop("minutes", None), options.pop("points", None)
    job = {"model_dir": "", "output_dir": Path(), "quantization": "int4_awq"}
    with pytest.raises(EdgeLLMError, match=message):
        check_together(Job(**{**job, **options}), minutes, points)
    assert float_layer_options("auto", None) == {"keep_budget": 10.0}
    assert float_layer_options("0,2", None) == {"keep_layers": (0, 2)}
    with pytest.raises(EdgeLLMError, match="--keep_budget is for"):
        float_layer_options("0", 5.0)


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        (search_algorithms, {"model_dir": "nowhere"}, "no such folder"),
        (
            search_float_layers,
            {"keep_budget": 5.0, "kv_cache_quantization": "fp8"},
            "KV cache scales are calibrated",
        ),
        (
            search_float_layers,
            {"keep_budget": 5.0, "quantization": "mixed", "target_bits": 5.0},
            "chooses the float layers itself",
        ),
    ],
)
def test_a_rejected_search_writes_nothing(job, run, changes, message):
    wrong = replace(job, algo="auto" if run is search_algorithms else None, **changes)
    with pytest.raises(EdgeLLMError, match=message):
        run(wrong, *((None, _quiet) if run is search_algorithms else (_quiet,)))
    assert not wrong.work_dir.exists()
