"""The time model of absent GPUs: sums, shapes, and figures beside published ones."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from harness.gpu import comparison, model
from harness.gpu.comparison import FITTED, compare, figures, fitted
from harness.gpu.model import (
    BOARDS,
    ORIN,
    THOR,
    TODAY,
    WAYS,
    Case,
    plain_parts_ms,
    prompt_parts_ms,
    round_parts_ms,
    tokens_per_s,
)
from harness.gpu.published import ROWS, SHAPES
from harness.results import Report, read

from edgellm.build.verify_tree_size import TOKENS
from edgellm.quantize.pipeline.deploy_target import form_of_draft, form_of_head

NVFP4 = Case(precision="nvfp4")


def test_predicted_speed_of_nvfp4_on_thor():
    assert form_of_head("11.0", "nvfp4", is_modelopt=True) == form_of_draft("11.0") == "nvfp4"
    plain, drafted = plain_parts_ms(THOR, NVFP4), round_parts_ms(THOR, NVFP4)
    assert tokens_per_s(plain) >= 49
    assert tokens_per_s(drafted, TOKENS) >= 185
    limit = model.roofline(THOR, NVFP4)
    assert tokens_per_s(plain) < limit
    # What separates it from the roofline has names.
    read_ms = sum(plain[kind] for kind in ("weights", "head", "cache"))
    assert read_ms * THOR.share == pytest.approx(1e3 / limit)
    others = {kind for kind, ms in plain.items() if ms} - {"weights", "head", "cache"}
    assert others == {"sums", "launches", "waits"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_each_way_is_no_slower_than_the_one_before(board):
    for precision, parts in itertools.product(board.precisions, (plain_parts_ms, round_parts_ms)):
        case = Case(precision=precision)
        rates = [tokens_per_s(parts(board, replace(case, way=way))) for way in WAYS]
        assert rates == sorted(rates)
        assert rates[-1] > rates[0]


def test_a_round_waits_as_often_as_the_runtime_does():
    assert (TODAY.waits, WAYS[0].waits) == (1, 1 + model.STEPS)
    before, today = (
        round_parts_ms(THOR, Case(precision="fp16", way=way)) for way in (WAYS[0], TODAY)
    )
    assert before["waits"] == WAYS[0].waits * today["waits"]
    assert today["tree"] < before["tree"]


def test_int4_products_take_longer_than_reading_only_for_many_tokens():
    rounds = {
        nodes: round_parts_ms(THOR, Case(precision="int4", nodes=nodes)) for nodes in (16, 60)
    }
    assert rounds[16]["products"] == 0
    assert rounds[60]["products"] > 2 * rounds[60]["weights"]
    assert round_parts_ms(THOR, NVFP4)["products"] == 0


def test_orin_reads_int4_weights_at_a_lower_share():
    """Issue 60 of TensorRT Edge-LLM: 52.2 tokens/s with Qwen3-4B."""
    case = Case(precision="int4", shape=SHAPES["Qwen3-4B"], context=512)
    assert tokens_per_s(plain_parts_ms(ORIN, case)) == pytest.approx(52.2, rel=0.1)
    assert ORIN.rate("int4") < ORIN.rate("fp16")


def test_the_tiles_of_prompts_are_in_their_time():
    """From 128 tokens on they have 64 rows."""
    few, many = (prompt_parts_ms(THOR, NVFP4, tokens)["attention"] for tokens in (64, 128))
    of_many, of_few = THOR.attention_shares
    assert many / few == pytest.approx(4 * of_few / of_many)


CONFIGS = {
    "Llama-3.1-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3.5-0.8B": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
KINDS = {"Llama-3.1": "Llama", "Qwen3": "Qwen3", "Qwen3.5": "Qwen3_5"}


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_have_the_weights_of_transformers(name):
    torch, transformers = (pytest.importorskip(each) for each in ("torch", "transformers"))
    made = getattr(transformers, f"{KINDS[name.rpartition('-')[0]]}ForCausalLM")
    with torch.device("meta"):
        network = made(made.config_class(**CONFIGS[name]))
    layers = [
        each.weight.numel()
        for path, each in network.named_modules()
        if isinstance(each, torch.nn.Linear) and path != "lm_head"
    ]
    assert sum(layers) == SHAPES[name].linear


def test_launches_of_an_engine(tmp_path):
    report = tmp_path / "llm.layers.json"
    passes = {"decode": {"kernels": 85}, "verify": {"kernels": 97}, "prefill": {"kernels": 98}}
    report.write_text(json.dumps({"passes": passes}))
    (few, many), outside = model.read_launches(report, 4)
    assert (few, many, outside) == (21, 24, 1)


def test_the_fit_holds_for_rows_that_it_does_not_take():
    """Bandwidth and launches that four published rows imply also give those of later releases."""
    board = fitted()
    assert 0.85 < board.share < 1
    assert board.launch_us > THOR.launch_us
    for row in FITTED:
        assert figures(board, row).rate == pytest.approx(row.rate, rel=0.03)
    others = [
        row
        for row in ROWS
        if (row.precision, row.way, row.batch) == ("nvfp4", "plain", 1)
        and row.model in ("Qwen3-1.7B", "Qwen3-VL-2B")
    ]
    assert len(others) == 3
    for row in others:
        assert figures(board, row).rate == pytest.approx(row.rate, rel=0.1)


def test_every_published_row_has_figures_or_a_reason(tmp_path, capsys):
    rows = compare()
    assert len(rows) == len(ROWS) == 72
    assert {each.row.release for each in rows} == {"0.4.0", "0.7.0", "0.7.1", "0.9.0"}
    for each in rows:
        assert (each.found is None) == bool(each.why_not)
        is_known = each.row.model in SHAPES and not (
            SHAPES[each.row.model].state_bytes and each.row.batch > 1
        )
        assert is_known == (each.found is not None)
    comparison.add_tables(Report(tmp_path / "results.json"), rows)
    tables = read(tmp_path / "results.json")
    assert len(tables["gpu-model-speed"].rows) == len(rows)
    assert all(row[-1] for row in tables["gpu-model-speed"].rows)
    shown = capsys.readouterr().out
    assert "| 0.4.0 | Thor | Llama-3.1-8B | nvfp4 | plain | 1 | | 54.9 |" in shown
    # A goal's number of rows below it is that of the table.
    plain = next(row for row in tables["gpu-model-goals"].rows if row[0] == "plain on Thor")
    ratios = [
        each.ratio
        for each in rows
        if each.found and each.row.way.startswith("plain") and each.row.board == "Thor"
    ]
    assert (plain[2], plain[3]) == (str(len(ratios)), str(sum(each < 0.95 for each in ratios)))


def test_the_tables_by_configuration(capsys):
    comparison.show_ways(1024, 4096)
    shown = capsys.readouterr().out
    assert "Thor, nvfp4: roofline" in shown
    assert "with 16 nodes" in shown
    assert "Orin, nvfp4" not in shown
