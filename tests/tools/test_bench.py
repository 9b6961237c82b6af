"""`edgellm-bench`: what is measured, in which order, and the formats of results."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import statistics
import subprocess
import sys

import pytest
from conftest import assert_one_line_error

from edgellm.core.errors import (
    LimitError,
    RequestError,
)
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine import profile
from edgellm.device_runtime.request_files.request_file import Options, read_file
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.tools.bench import cli, machine, measure, result_formats
from edgellm.tools.bench import interleaved_run as loops
from edgellm.tools.bench.interleaved_run import Texts, Work
from edgellm.tools.bench.measure import check_sizes, decode_rate, prefill_rate, run_both_modes
from edgellm.tools.bench.results import EAGLE, PLAIN, TEXT, Pair, Results, Series

USER = {"role": "user", "content": "w20 w21"}


@pytest.fixture(scope="module")
def llm(tiny_engine) -> LLM:
    return LLM(tiny_engine)


@pytest.fixture(scope="module")
def eagle_llm(eagle_pair) -> LLM:
    return LLM(eagle_pair.engine, spec=SpecOptions())


@pytest.fixture
def passes(llm, monkeypatch):
    """Position and tokens of each forward pass; the clock advances 0.5 ms at each reading."""
    found = []
    run_batch = llm.base.run_batch

    def recorded(parts):
        found.extend((part.write_index, len(part.token_ids)) for part in parts)
        return run_batch(parts)

    clock = itertools.count()
    monkeypatch.setattr(llm.base, "run_batch", recorded)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(clock) / 2e3)
    return found


@pytest.fixture
def run_bench():
    """Run the command."""

    def run(engine, *arguments):
        words = [sys.executable, "-m", "edgellm.tools.bench", "--engineDir", engine, *arguments]
        return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)

    return run


def _pair() -> Pair:
    return Pair(
        plain=Series(test=TEXT, name="x", mode=PLAIN, tokens=0, depth=0),
        eagle=Series(test=TEXT, name="x", mode=EAGLE, tokens=0, depth=0),
    )


def test_statistics_by_hand():
    series = Series(
        test="decode", name="decode", mode="plain", tokens=10, depth=0, samples=[1.0, 2.0, 6.0]
    )
    assert (series.median, series.mean) == (2.0, 3.0)
    assert series.deviation == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert (
        Series(
            test="decode", name="decode", mode="plain", tokens=10, depth=0, samples=[4.0]
        ).deviation
        == 0
    )
    pair = _pair()
    pair.plain.samples, pair.eagle.samples = [2.0, 4.0], [3.0, 10.0]
    pair.rounds, pair.emitted, pair.nodes = 4, 10, 18
    assert pair.ratios == [1.5, 2.5]
    assert (pair.acceptance_length, pair.tree_size) == (2.5, 4.5)


def test_a_prefill_sample_is_one_pass_over_the_prompt(llm, passes):
    assert prefill_rate(llm, 20) == pytest.approx(20_000)  # all of it in one millisecond
    assert passes == [(0, 20)]


@pytest.mark.parametrize(("depth", "prompt"), [(0, 1), (1, 1), (12, 12)])
def test_a_decode_sample_counts_passes_after_the_prefill(llm, passes, depth, prompt):
    assert decode_rate(llm, depth, 5) == pytest.approx(1000)  # a pass, a millisecond
    assert passes == [(0, prompt), *((prompt + step, 1) for step in range(5))]


def test_an_end_token_does_not_end_a_measurement(llm, passes, monkeypatch):
    everything = tuple(range(llm.manifest.decoder.vocab_size))
    ending = dataclasses.replace(llm.manifest, eos_token_ids=everything)
    monkeypatch.setattr(llm, "manifest", ending)
    decode_rate(llm, 4, 9)
    assert len(passes) == 10


def test_tests_are_interleaved_after_a_warm_up(monkeypatch):
    order = []
    clock = itertools.count()

    def answer(_llm, _options, _raw, index, pair, *, eagle_first, **_):
        order.append((f"text {index}", eagle_first))
        pair.plain.samples.append(1.0)
        pair.eagle.samples.append(float(next(clock)))

    monkeypatch.setattr(loops, "prefill_rate", lambda _llm, n, *_: order.append(n) or next(clock))
    monkeypatch.setattr(loops, "decode_rate", lambda _llm, d, n, *_: order.append((d, n)) or 7.0)
    monkeypatch.setattr(loops, "run_both_modes", answer)
    texts = Texts(Options(), [{"messages": [USER]}, "no object"], ["w20 w21", "request"])
    results = Results(engine={}, machine={}, settings={})
    steps = []
    loops.run(
        None,
        Work(prompts=(3, 5), depths=(0, 9), generated=4, texts=texts),
        results,
        2,
        steps.append,
    )  # type: ignore[arg-type]
    tests = [3, 5, (0, 4), (9, 4)]
    even, odd = ([("text 0", first), ("text 1", not first)] for first in (False, True))
    assert order == [*tests, *even, *tests, *even, *tests, *odd]
    assert [one.samples for one in results.series] == [[4, 8], [5, 9], [7.0, 7.0], [7.0, 7.0]]
    assert [pair.eagle.samples for pair in results.pairs] == [[6.0, 10.0], [7.0, 11.0]]
    assert [pair.plain.name for pair in results.pairs] == ["w20 w21", "request"]
    assert results.repetitions == 2
    assert steps[0] == "warming up: prefill 3"
    assert steps[-1] == "2 of 2: request"


def test_a_text_runs_with_and_without_speculation(eagle_llm, monkeypatch):
    start, order = measure.start_request, []

    def recorded(*arguments, speculative):
        order.append(speculative)
        return start(*arguments, speculative=speculative)

    monkeypatch.setattr(measure, "start_request", recorded)
    options = Options(temperature=0, max_generate_length=12)
    pair = _pair()
    for eagle_first in (False, True):
        run_both_modes(eagle_llm, options, {"messages": [USER]}, 0, pair, eagle_first=eagle_first)
    assert order == [False, True, True, False]
    assert len(pair.plain.samples) == len(pair.eagle.samples) == len(pair.ratios) == 2
    assert pair.same_answers == 2  # float32, greedy
    assert pair.rounds <= pair.emitted == 2 * pair.eagle.tokens
    assert pair.nodes >= pair.rounds
    assert pair.plain.depth == eagle_llm.generate([USER]).prompt_token_count


def test_outputs_of_one_token_are_rejected(eagle_llm):
    options = Options(temperature=0, max_generate_length=1)
    with pytest.raises(RequestError, match="an output of one token"):
        run_both_modes(eagle_llm, options, {"messages": [USER]}, 0, _pair(), eagle_first=False)


@pytest.mark.parametrize(
    ("prompts", "depths", "generated", "message", "hint"),
    [
        ((16, 49), (), 4, "--prompt 49: the engine takes prompts of 48", "--maxInputLen 49"),
        ((), (0, 61), 4, "--depth 61 with --generate 4", "--maxKVCacheCapacity 65"),
        ((), (0,), 64, "--depth 0 with --generate 64", "--maxKVCacheCapacity 65"),
        ((-1,), (), 4, "--prompt -1", ""),
        ((), (-3,), 4, "--depth -3", ""),
    ],
)
def test_lengths_beyond_the_engines_limits_are_rejected(
    llm, prompts, depths, generated, message, hint
):
    with pytest.raises(LimitError, match=message) as found:
        check_sizes(llm.manifest, prompts, depths, generated)
    assert hint in found.value.hint
    check_sizes(llm.manifest, (48,), (0, 60), 4)


@pytest.fixture
def results() -> Results:
    pair = _pair()
    pair.plain.name = pair.eagle.name = "a | b"
    pair.plain.samples, pair.eagle.samples = [10.0, 20.0], [15.0, 40.0]
    pair.plain.tokens = 7
    pair.rounds, pair.emitted, pair.nodes, pair.same_answers = 4, 10, 18, 1
    series = [
        Series(
            test="prefill",
            name="prefill 16",
            mode="plain",
            tokens=16,
            depth=0,
            samples=[100.0, 300.0],
        )
    ]
    found = Results(
        engine={"engine": "e"},
        machine={"CPU": "Fast, Inc."},
        settings={"repetitions": "2"},
        series=series,
        pairs=[pair],
    )
    found.repetitions, found.peak_memory_bytes = 2, 123_000_000
    return found


def test_tables_show_medians_and_ratios(results):
    speeds, texts, facts = result_formats.tables(results)
    assert speeds.rows == (("prefill 16", "200.0", "200.0 ± 141.4", "5.00", "2"),)
    assert texts.rows == (("a | b", "0", "7", "15.0", "27.5", "1.75", "2.50", "4.5", "1 of 2"),)
    assert "ratio 1.75 (median of 2 pairs, mean 1.75 ± 0.35)" in texts.note
    assert ("CPU", "Fast, Inc.") in facts.rows
    assert ("peak memory", "123 MB") in facts.rows


def test_markdown_escapes_cells(results):
    lines = result_formats.as_markdown(results).splitlines()
    assert "| prefill 16 | 200.0 | 200.0 ± 141.4 | 5.00 | 2 |" in lines
    assert any(line.startswith("| a \\| b | 0 | 7 |") for line in lines)
    header = lines.index("|  | tokens/s, median | mean ± sd | ms a token | samples |")
    assert lines[header + 1] == "| --- | ---: | ---: | ---: | ---: |"


def test_csv_and_json_have_all_series(results):
    rows = list(csv.DictReader(io.StringIO(result_formats.as_csv(results))))
    assert [(row["name"], row["mode"]) for row in rows] == [
        ("prefill 16", "plain"),
        ("a | b", "plain"),
        ("a | b", "eagle"),
    ]
    assert float(rows[2]["median_tokens_per_s"]) == 27.5
    assert rows[0]["CPU"] == "Fast, Inc."
    content = json.loads(result_formats.as_json(results))
    assert content["series"][0]["samples"] == [100.0, 300.0]
    assert content["texts"][0]["ratios"] == [1.5, 2.0]
    assert content["median_ratio"] == statistics.median([1.5, 2.0])


def test_the_command_measures_every_depth_and_text(run_bench, eagle_pair, tmp_path):
    source = tmp_path / "in.json"
    request = {"messages": [USER], "max_generate_length": 8}
    source.write_text(json.dumps({"temperature": 0, "requests": [request, request]}))
    result = run_bench(
        eagle_pair.engine, "--prompt", "4,8", "--generate", 3, "--depth", "0,5", "--repetitions", 2,
        "--eagle", "--inputFile", source, "--output", "json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert [one["name"] for one in content["series"][:4]] == [
        "prefill 4",
        "prefill 8",
        "decode 3 behind 0",
        "decode 3 behind 5",
    ]
    assert all(len(one["samples"]) == 2 for one in content["series"])
    assert all(text["same_answers"] == 2 for text in content["texts"])
    assert [text["name"] for text in content["texts"]] == ["w20 w21"] * 2 + ["w20 w21 behind 5"] * 2
    assert len(content["engine"]["draft manifest sha256"]) == 64
    assert content["machine"]["cores"]
    assert content["peak_memory_bytes"] > 1e6


def test_defaults_fit_the_engine(run_bench, tiny_engine):
    result = run_bench(tiny_engine, "--generate", 2, "--repetitions", 1)
    assert result.returncode == 0, result.stderr
    assert "prefill 48" in result.stdout  # neither 128 nor 512
    assert "decode 2 behind 0" in result.stdout


def test_the_built_in_requests_are_valid_and_greedy():
    options, requests = read_file(cli.REQUESTS)
    assert options.temperature == 0
    assert len(requests) >= 5
    assert len({json.dumps(request) for request in requests}) == len(requests)


def test_a_depth_adds_an_earlier_turn(eagle_llm):
    system = {"role": "system", "content": "w30"}
    options, raw = Options(max_generate_length=4), {"messages": [system, USER], "seed": 3}
    texts = Texts.at(eagle_llm, options, [raw], [0, 30])
    assert texts.requests[0] is raw
    assert texts.names == ["w20 w21", "w20 w21 behind 30"]
    deep = texts.requests[1]
    assert [one["role"] for one in deep["messages"]] == ["system", "user", "assistant", "user"]
    assert (deep["seed"], deep["messages"][-1]) == (3, USER)
    lengths = [eagle_llm.generate(one["messages"]).prompt_token_count for one in texts.requests]
    assert 30 - 5 <= lengths[1] - lengths[0] <= 30 + 10
    with pytest.raises(RequestError, match="the engine takes 64"):
        Texts.at(eagle_llm, options, [raw], [60])
    with pytest.raises(RequestError, match="messages"):
        Texts.at(eagle_llm, options, [{"messages": []}], [0])
    with pytest.raises(RequestError, match=r"requests\[0\]"):
        Texts.at(eagle_llm, options, ["no object"], [8])


def test_invalid_flags_are_rejected(command_here, tiny_engine, tiny_bundle, tmp_path):
    for arguments, fragments in (
        ((tiny_engine, "--output", "xml"), ("--output xml: give text, markdown, csv or json",)),
        ((tiny_engine, "--depth", "x"), ("--depth x: give whole numbers",)),
        ((tiny_engine, "--inputFile", tmp_path / "in.json"), ("is for speculation", "--eagle")),
        ((tiny_engine, "--eagle"), ("is not an EAGLE base", "--eagleBase")),
        ((tiny_bundle,), ("is of kind llm_bundle, not llm_engine",)),
    ):
        result = command_here("edgellm-bench", "--engineDir", *arguments)
        assert_one_line_error(result, *fragments)
        assert result.stdout == ""


def test_an_interrupt_prints_complete_repetitions(monkeypatch, tiny_engine, capsys):
    calls = itertools.count()

    def interrupted(_llm, _tokens, *_):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return 5.0

    monkeypatch.setattr(loops, "prefill_rate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.bench(engine_dir=tiny_engine, prompt="4", generate=0, repetitions=9, output="json")
    content = json.loads(capsys.readouterr().out)
    assert content["complete_repetitions"] == 2
    assert content["series"][0]["samples"] == [5.0, 5.0]


def test_machine_facts_omit_what_is_unavailable(monkeypatch, tmp_path):
    found = machine.facts()
    assert found["CPU"]
    assert found["python"]
    assert all(found.values())
    tool = tmp_path / "nvpmodel"
    tool.write_text("#!/bin/sh\nprintf 'NV Power Mode: MAXN\\n0\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.facts()["power mode"] == "NV Power Mode: MAXN"
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert "power mode" not in machine.facts()


def test_a_busy_machine_gives_a_warning(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (1.9, 0, 0))
    assert machine.busy_warning() == ""
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (2.5, 0, 0))
    assert "2.5 on 4 cores" in machine.busy_warning()


def test_lengths_are_checked_before_measuring(monkeypatch, tiny_engine):
    monkeypatch.setattr(measure, "prefill_rate", None)
    with pytest.raises(LimitError):
        cli.bench(engine_dir=tiny_engine, prompt="49")
