"""The command `llm_inference`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import assert_one_line_error
from manifests import read_manifest, write_manifest

USER = {"role": "user", "content": "w20 w21"}


@pytest.fixture
def infer(infer_requests, tiny_engine):
    """Run `llm_inference` with a request file; return the outputs."""

    def run(content, *more, engine=tiny_engine):
        return infer_requests(engine, content, *more)

    return run


@pytest.fixture
def ask(infer_here, tiny_engine):
    """The same in this process."""
    return lambda content, *more, engine=tiny_engine: infer_here(engine, content, *more)


def test_responses_have_all_fields(infer, tmp_path):
    requests = [{"messages": [{"role": "system", "content": "w30"}, USER]}, {"messages": [USER]}]
    result, answers = infer({"temperature": 0, "max_generate_length": 5, "requests": requests})
    assert result.returncode == 0, result.stderr
    first = answers[0]
    assert first["formatted_system_prompt"] == "system : w30 . "
    assert first["formatted_complete_request"] == "system : w30 . user : w20 w21 . assistant : "
    assert first["messages"][1] == {
        "role": "user",
        "content": [{"type": "text", "text": "w20 w21"}],
    }
    assert first["prompt_token_count"] == 11
    assert first["finish_reason"] in ("stop", "length")
    assert 1 <= first["generated_token_count"] <= 5
    assert first["timings"]["prefill_ms"] > 0
    assert [answer["request_idx"] for answer in answers] == [0, 1]
    assert json.loads((tmp_path / "out.json").read_text())["input_file"].endswith("in.json")


def test_invalid_requests_do_not_stop_the_others(infer):
    requests = [
        {"messages": [USER]},
        {"messages": [{"role": "usr", "content": "x"}]},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": "w20 " * 60}]},
        "no object",
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [USER], "seed": 3},
    ]
    result, answers = infer({"max_generate_length": 3, "requests": requests})
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert ["error" in answer for answer in answers] == [False, *[True] * 6, False]
    messages = [answer["error"]["message"] for answer in answers[1:7]]
    for message, expected in zip(
        messages,
        [
            "messages[0].role",
            "messages",
            "no tools here",
            "has 65 tokens",
            "$.requests[5]",
            "surrogate",
        ],
        strict=True,
    ):
        assert expected in message
    assert "8 responses, 6 failed" in result.stdout
    assert result.stderr.count("failed:") == 6


def test_clamped_lengths_give_a_warning(ask):
    requests = [{"messages": [{"role": "user", "content": "w20 " * 40}]}]
    result, answers = ask({"temperature": 0, "requests": requests})
    assert result.returncode == 0
    assert "cut to 19" in result.stderr
    assert "cut to 19" in answers[0]["warnings"][0]
    assert answers[0]["generated_token_count"] <= 19


def test_raw_mode_multi_turn_and_overrides(ask):
    turns = [USER, {"role": "assistant", "content": "w9"}, {"role": "user", "content": "w22"}]
    content = {"apply_chat_template": False, "requests": [{"messages": turns}], "batch_size": 4}
    result, answers = ask(content, "--maxGenerateLength", 2, "--warmup", 1)
    assert result.returncode == 0, result.stderr
    assert answers[0]["formatted_complete_request"] == "w20 w21w9w22"
    assert answers[0]["generated_token_count"] <= 2
    assert "note: the engine's batch size is 1; build it with --maxBatchSize" in result.stderr
    assert "at a time" not in result.stdout


def test_equal_seeds_give_equal_outputs(ask):
    request = {"messages": [USER], "seed": 5, "temperature": 3.0, "top_p": 1.0, "top_k": 0}
    content = {"max_generate_length": 12, "requests": [request, request, {**request, "seed": 6}]}
    _, answers = ask(content)
    assert answers[0]["output_text"] == answers[1]["output_text"] != answers[2]["output_text"]


def test_stream_and_profile(infer, tmp_path):
    profile = tmp_path / "profile.json"
    content = {"temperature": 0, "max_generate_length": 4, "requests": [{"messages": [USER]}]}
    result, answers = infer(content, "--stream", "--dumpProfile", "--profileOutputFile", profile)
    assert result.returncode == 0, result.stderr
    assert answers[0]["output_text"] in result.stdout
    report = json.loads(profile.read_text())
    assert report["prefill"]["computed_tokens"] == answers[0]["prompt_token_count"]
    assert report["generation"]["generated_tokens"] == answers[0]["generated_token_count"]
    stages = {stage["stage_id"]: stage for stage in report["stages"]}
    assert stages["llm_prefill"]["total_runs"] == 1
    assert stages["llm_generation"]["gpu_time_stats"]["count"] == 3
    assert report["peak_cpu_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"requests": [', "line 1, column"),
        ('{"requests": {}}', "$.requests must be a list"),
        ('{"requests": [1], "top_k": "x"}', "$.top_k: expected `int | null`"),
    ],
)
def test_invalid_files_write_nothing(ask, content, message):
    result, answers = ask(content)
    assert_one_line_error(result, message)
    assert answers is None


def test_links_are_followed_and_closed_pipes_are_ignored(infer, tmp_path, tiny_engine, command):
    good = {"max_generate_length": 3, "requests": [{"messages": [USER]}]}
    infer(good)
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    arguments = ("--engineDir", tiny_engine, "--inputFile", tmp_path / "in.json")
    result = command("llm_inference", *arguments, "--outputFile", link)
    assert result.returncode == 0, result.stderr
    assert link.is_symlink()
    assert "responses" in json.loads(target.read_text())
    read_end, write_end = os.pipe()
    os.close(read_end)
    script = Path(sys.executable).parent / "llm_inference"
    words = [script, *map(str, arguments), "--outputFile", str(target), "--stream"]
    target.write_text("old")
    process = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, check=False)
    assert b"Traceback" not in process.stderr
    assert "responses" in json.loads(target.read_text())


def test_missing_folders_are_reported(ask, command_here, tmp_path, tiny_engine, tiny_bundle):
    good = {"requests": [{"messages": [USER]}]}
    assert_one_line_error(ask(good, engine=tmp_path / "none")[0], "no such folder")
    assert_one_line_error(ask(good, engine=tiny_bundle)[0], "is of kind llm_bundle")
    result = command_here(
        "llm_inference", "--engineDir", tiny_engine, "--inputFile", tmp_path / "in.json",
        "--outputFile", tmp_path / "no" / "out.json",
    )  # fmt: skip
    assert_one_line_error(result, "no such folder")


def test_output_files_are_checked_before_the_run(command_here, tiny_engine, tmp_path):
    source = tmp_path / "in.json"
    text = json.dumps({"requests": [{"messages": [USER]}]})
    source.write_text(text)
    os.mkfifo(tmp_path / "fifo")
    for output, message in (
        (source, "is the input file"),
        (tmp_path, "is a folder"),
        (tmp_path / "fifo", "is not a regular file"),
        (tiny_engine / "out.json", "lies in the engine's folder"),
        ("/proc/out.json", "cannot write /proc/out.json"),
    ):
        result = command_here(
            "llm_inference", "--engineDir", tiny_engine, "--inputFile", source,
            "--outputFile", output,
        )  # fmt: skip
        assert_one_line_error(result, message)
    assert source.read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "x86_64 mmx"}, "was built for processor x86_64 mmx"),
        ({"backend_version": "1.0.0"}, "was built for ONNX Runtime 1.0.0"),
        ({"contract_version": 0}, "has contract version 0"),
    ],
)
def test_engines_of_other_machines_are_rejected(ask, tiny_engine, tmp_path, change, message):
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    write_manifest(engine, {**read_manifest(engine), **change})
    result, _ = ask({"requests": [{"messages": [USER]}]}, engine=engine)
    assert_one_line_error(result, message, "llm_build")


def test_damaged_engines_are_rejected(ask, tiny_engine, tmp_path):
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    good = {"requests": [{"messages": [USER]}]}
    graph = engine / "decode.onnx"
    graph.write_bytes(b"\x00" * graph.stat().st_size)
    assert_one_line_error(ask(good, engine=engine)[0], "decode.onnx was changed: its sha256")
    unread = ask(good, "--noVerify", engine=engine)[0]
    assert_one_line_error(unread, "cannot load", "build the engine again")
    shutil.copy(tiny_engine / "decode.onnx", engine)
    data = engine / "decode.data"
    whole = data.read_bytes()
    assert ask(good, engine=engine)[0].returncode == 0
    data.write_bytes(whole[:5000] + b"\x01\x02" + whole[5002:])
    for flags in ((), ("--verify",)):
        result = ask(good, *flags, engine=engine)[0]
        assert_one_line_error(result, "decode.data was changed: its sha256 differs")
        assert result.returncode == 2
    assert ask(good, "--no-verify", engine=engine)[0].returncode == 0
    data.write_bytes(whole[:1000])
    assert_one_line_error(ask(good, engine=engine)[0], "has 1000 bytes instead of")
    data.unlink()
    assert_one_line_error(ask(good, engine=engine)[0], "decode.data is missing")
