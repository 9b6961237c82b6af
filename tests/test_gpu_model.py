"""The time model of absent GPUs: sums, predictions and bytes read."""

from __future__ import annotations

import itertools
import json

import pytest
from harness.gpu import model
from harness.gpu.model import (
    ACCEPTED,
    BOARDS,
    TODAY,
    WAYS,
    plain_parts_ms,
    round_parts_ms,
    tokens_per_s,
)

from edgellm.quantize.pipeline.deploy_target import form_of_draft, form_of_head

SIZES = (1024, 4096)
THOR = BOARDS[0]


def test_predicted_speed_of_nvfp4_on_thor():
    assert form_of_head("11.0", "nvfp4", is_modelopt=True) == form_of_draft("11.0") == "nvfp4"
    plain = plain_parts_ms(THOR, TODAY, "nvfp4", *SIZES)
    drafted = round_parts_ms(THOR, TODAY, "nvfp4", *SIZES)
    assert tokens_per_s(plain) >= 49
    assert tokens_per_s(drafted, ACCEPTED) >= 185
    limit = model.roofline(THOR, "nvfp4", SIZES[0])
    assert tokens_per_s(plain) < limit
    # What separates it from the roofline has names.
    read = sum(plain[kind] for kind in ("weights", "head", "cache"))
    assert read * THOR.share == pytest.approx(1e3 / limit)
    assert set(plain) - {"weights", "head", "cache"} == {"sums", "launches", "waits"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_each_way_is_no_slower_than_the_one_before(board):
    for precision, parts in itertools.product(
        ("nvfp4", "int4", "fp16"), (plain_parts_ms, round_parts_ms)
    ):
        rates = [tokens_per_s(parts(board, way, precision, *SIZES)) for way in WAYS]
        assert rates == sorted(rates)
        assert rates[-1] > rates[0]


def test_a_round_waits_as_often_as_the_runtime_does():
    assert (TODAY.waits, WAYS[0].waits) == (1, 1 + model.STEPS)
    before, today = (round_parts_ms(THOR, way, "fp16", *SIZES) for way in (WAYS[0], TODAY))
    assert before["waits"] == WAYS[0].waits * today["waits"]
    assert today["tree"] < before["tree"]


def test_launches_of_an_engine(tmp_path):
    report = tmp_path / "llm.layers.json"
    passes = {"decode": {"kernels": 85}, "verify": {"kernels": 97}, "prefill": {"kernels": 98}}
    report.write_text(json.dumps({"passes": passes}))
    (few, many), outside = model.read_launches(report, 4)
    assert (few, many, outside) == (21, 24, 1)


def test_the_tables(capsys):
    model.show(*SIZES)
    shown = capsys.readouterr().out
    assert "published, TensorRT Edge-LLM   plain   54.9  EAGLE3  189.2" in shown
    assert "Orin, nvfp4" not in shown
