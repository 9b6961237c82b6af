"""The command `llm_inference --eagle`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import assert_one_line_error
from manifests import read_manifest, write_manifest

USER = {"role": "user", "content": "w20 w21"}
STAGES = {
    "llm_prefill",
    "eagle_draft_prefill",
    "eagle_draft_accept",
    "eagle_construct_draft_tree",
    "eagle_base_verification",
    "eagle_accept",
}
GOOD = {"temperature": 0, "max_generate_length": 20, "requests": [{"messages": [USER]}]}


@pytest.fixture
def infer(infer_requests, eagle_pair):
    """Run `llm_inference` with a request file; return the outputs."""

    def run(content, *more, engine=eagle_pair.engine):
        return infer_requests(engine, content, *more)

    return run


@pytest.fixture
def ask(infer_here, eagle_pair):
    """The same in this process."""
    return lambda content, *more, engine=eagle_pair.engine: infer_here(engine, content, *more)


@pytest.fixture
def engine(eagle_pair, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(eagle_pair.engine, tmp_path / "engine"))


def test_outputs_profile_and_trees(infer, tmp_path):
    requests = [
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": "w23"}], "temperature": 0.8, "seed": 5},
        {"messages": [{"role": "user", "content": "w23"}]},
    ]
    content = {**GOOD, "max_generate_length": 40, "requests": requests}
    _, plain = infer(content)
    profile, trees = tmp_path / "profile.json", tmp_path / "trees.json"
    result, answers = infer(
        content, "--eagle", "--eagleTree", "fixed", "--profileOutputFile", profile,
        "--treeOutputFile", trees, "--dumpProfile", "--stream", "--verify", "--warmup", 1,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for one, other in zip(plain, answers, strict=True):
        for name in ("output_text", "finish_reason", "generated_token_count"):
            assert one[name] == other[name]
        assert "spec_verify_count" in other["timings"]
        assert "spec_verify_count" not in one["timings"]
        assert other["timings"]["spec_acceptance_length"] >= 1
    assert "acceptance length" in result.stdout
    assert answers[0]["output_text"] in result.stdout
    report = json.loads(profile.read_text())
    _check_profile(report, answers)
    _check_trees(json.loads(trees.read_text()), report)


def _check_profile(report, answers) -> None:
    eagle = report["eagle_generation"]
    generated = sum(answer["generated_token_count"] for answer in answers)
    assert eagle["total_runs"] == 3
    assert eagle["total_generated_tokens"] == generated
    assert eagle["average_tokens_per_run"] == pytest.approx(generated / 3)
    assert eagle["total_iterations"] == sum(
        answer["timings"]["spec_verify_count"] for answer in answers
    )
    emitted = generated - 3  # the prefill gives the first token of an output
    assert eagle["average_acceptance_rate"] == pytest.approx(emitted / eagle["total_iterations"])
    assert eagle["overall_tokens_per_second_excluding_base_prefill"] > 0
    assert 2 <= eagle["average_tree_size"] <= 60
    accepted, drafted = eagle["total_accepted_draft_tokens"], eagle["total_draft_tokens"]
    assert 0 < accepted < drafted
    assert eagle["acceptance_rate"] == pytest.approx(accepted / drafted)
    depths = eagle["acceptance_by_depth"]
    assert [entry["depth"] for entry in depths] == list(range(1, len(depths) + 1))
    assert depths[0]["drafted_rounds"] >= depths[0]["accepted_rounds"]
    assert report["generation"]["generated_tokens"] == 0
    stages = {stage["stage_id"]: stage for stage in report["stages"]}
    assert set(stages) == STAGES
    assert all(stage["total_gpu_time_ms"] > 0 for stage in stages.values())
    assert stages["eagle_base_verification"]["total_runs"] == eagle["total_iterations"]
    assert stages["eagle_draft_prefill"]["total_runs"] == 3


def _check_trees(trees, report) -> None:
    assert [request["request_idx"] for request in trees["requests"]] == [0, 1, 2]
    drafted = [r for request in trees["requests"] for r in request["rounds"] if "parents" in r]
    # A round that gives only the end token is no step.
    missing = report["eagle_generation"]["total_iterations"] - len(drafted)
    assert 0 <= missing <= 3
    for found in drafted:
        sizes = {len(found[name]) for name in ("tokens", "parents", "expected", "confidence")}
        assert len(sizes) == 1
        accepted = [found["tokens"][node] for node in found["path"][1:]]
        whole = [*accepted, found["bonus"]]
        assert found["emitted"] == whole[: len(found["emitted"])]


def test_requests_can_disable_speculation(ask, tmp_path):
    requests = [{"messages": [USER], "disable_spec_decode": True}, {"messages": [USER]}]
    profile = tmp_path / "profile.json"
    result, answers = ask({**GOOD, "requests": requests}, "--eagle", "--profileOutputFile", profile)
    assert result.returncode == 0, result.stderr
    assert "spec_verify_count" not in answers[0]["timings"]
    assert "spec_verify_count" in answers[1]["timings"]
    assert answers[0]["output_text"] == answers[1]["output_text"]
    report = json.loads(profile.read_text())
    assert report["generation"]["total_runs"] == report["eagle_generation"]["total_runs"] == 1
    assert report["prefill"]["total_runs"] == 2


def test_flag_aliases(ask):
    _, plain = ask(GOOD)
    for flags in (
        ("--specDecode", "--specDraftTopK", 4, "--specDraftStep", 3, "--specVerifyTreeSize", 9),
        ("--eagle", "--ngram", "--eagle-tree", "fixed", "--eagle-draft-top-k", 2),
        ("--eagle", "--typicalAcceptance", 0.09),
    ):
        result, answers = ask(GOOD, *flags)
        assert result.returncode == 0, result.stderr
        assert answers[0]["output_text"] == plain[0]["output_text"]
        assert "spec_verify_count" in answers[0]["timings"]


def test_prove_reports_identical_tokens_for_each_request(infer):
    requests = [{"messages": [{"role": "user", "content": f"w{at}"}]} for at in range(20, 24)]
    flags = ("--eagle", "--eagleTree", "fixed", "--prove")
    result, answers = infer({"max_generate_length": 30, "requests": requests}, *flags, 3)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["request 0", "request 1", "request 2"]
    assert all("tokens, identical" in line for line in lines[:3])
    equal = sum(line.endswith(", equal bits") for line in lines[:3])  # products of float32
    bits = f"; {equal} with equal bits of all logits" if equal else ""
    assert lines[3] == f"3 of 3 answers identical, token by token{bits}"
    assert answers is None


def test_prove_continues_after_an_invalid_request(infer):
    good = {"messages": [{"role": "user", "content": "w20"}]}
    requests = [{"messages": 3}, good]
    flags = ("--eagle", "--eagleTree", "fixed", "--prove", 2)
    result, _ = infer({"max_generate_length": 8, "requests": requests}, *flags)
    assert result.returncode == 1
    refused, compared, last = result.stdout.splitlines()
    assert refused.startswith("request 0: ")
    assert "messages" in refused
    assert compared.startswith("request 1: 8 tokens, identical")
    assert last.startswith("1 of 1 answers identical")


def test_prove_shows_divergences(eagle_pair):
    """A draft that is accepted although the base would choose another token."""
    from edgellm.device_runtime.api.llm import LLM
    from edgellm.device_runtime.request_files.lossless_check import prove
    from edgellm.device_runtime.request_files.request_file import Options
    from edgellm.device_runtime.speculate.acceptance import Accepted
    from edgellm.device_runtime.speculate.options import SpecOptions

    class Wrong(SpecOptions):
        @property
        def accept(self):
            def first_child(tree, result, _):
                end = min(len(tree) - 1, 1)
                return Accepted([0, 1][: end + 1], int(result.token_ids[end]))

            return first_child

    llm = LLM(eagle_pair.engine, spec=Wrong(tree="fixed"))
    requests = [{"messages": [USER]}, {"messages": [USER], "disable_spec_decode": True}]
    wrong, declined = prove(llm, Options(max_generate_length=30), requests)
    assert wrong.divergence is not None
    assert wrong.margin is not None
    assert wrong.margin > 0
    assert wrong.plain_token != wrong.speculated_token
    assert f"diverges at token {wrong.divergence} of {wrong.tokens}" in wrong.line()
    assert declined.divergence is None


@pytest.mark.parametrize("more", [(), (7,)])
def test_prove_compares_lengths(eagle_pair, monkeypatch, more):
    from edgellm.device_runtime.api.llm import LLM
    from edgellm.device_runtime.request_files import lossless_check as prove
    from edgellm.device_runtime.request_files.request_file import Options

    answers = iter([[4, 5, *more], [4, 5, 6, *more][: 3 - len(more)]])
    monkeypatch.setattr(prove, "_token_ids", lambda *_, **__: next(answers))
    (found,) = prove.prove(LLM(eagle_pair.engine), Options(), [{"messages": [USER]}])
    assert found.divergence == 2
    assert found.line() == "request 0: identical until one ends, after 2 tokens"


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (("--eagle", "--eagleVerifyTreeSize", 61), ("trees of 61 nodes", "the engine's 60")),
        (
            ("--eagle", "--eagleDraftTopK", 11),
            ("11 x --eagleDraftStep 6 = 66 drafted tokens", "60"),
        ),
        (("--eagle", "--eagleDraftTopK", 41, "--eagleDraftStep", 1), ("vocabulary of 40",)),
        (("--eagle", "--eagleTree", "nonsense"), ("--eagleTree nonsense: give cost or fixed",)),
        (("--prove", 1), ("--prove needs speculation", "give --eagle or --spec as well")),
        (("--treeOutputFile", "t.json"), ("--treeOutputFile needs speculation",)),
    ],
    ids=str,
)
def test_contradictory_flags_are_rejected(ask, flags, messages):
    result, answers = ask(GOOD, *flags)
    assert_one_line_error(result, *messages)
    assert answers is None


@pytest.mark.parametrize(
    "flags",
    [("--eagleVerifyTreeSize", 0), ("--eagleDraftTopK", 0), ("--eagleDraftStep", -1),
     ("--typicalAcceptance", 2), ("--prove", -1)],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range_are_usage_errors(ask, flags):
    result, _ = ask(GOOD, "--eagle", *flags)
    assert result.returncode == 2
    assert flags[0].removeprefix("--") in result.stderr
    assert "Traceback" not in result.stderr


def test_trees_and_outputs_need_different_files(ask, tmp_path):
    result, _ = ask(GOOD, "--eagle", "--treeOutputFile", tmp_path / "out.json")
    assert_one_line_error(result, "to different files")


def test_engines_without_a_draft_are_rejected(ask, tiny_engine, engine):
    assert_one_line_error(
        ask(GOOD, "--eagle", engine=tiny_engine)[0], "is not an EAGLE base", "--eagleBase"
    )
    shutil.rmtree(engine / "draft")
    result, _ = ask(GOOD, "--eagle", engine=engine)
    assert_one_line_error(result, "has no draft engine", "llm_build --eagleDraft")
    assert ask(GOOD, engine=engine)[0].returncode == 0


def test_the_cache_may_be_too_small_for_the_tree(ask, engine):
    write_manifest(engine, {**read_manifest(engine), "max_kv_cache_capacity": 60})
    result, _ = ask(GOOD, "--eagle", engine=engine)
    assert_one_line_error(result, "KV cache of 60 tokens is too small", "--maxKVCacheCapacity")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_hidden_size": 64}, "hidden size 64, this one has 96"),
        ({"hidden_taps": [1, 4, 5]}, "hidden taps (1, 4, 5), this one has (2, 4, 5)"),
    ],
)
def test_a_draft_of_another_base_is_rejected(ask, engine, change, message):
    manifest = read_manifest(engine / "draft")
    manifest["spec"] |= change
    write_manifest(engine / "draft", manifest)
    assert_one_line_error(ask(GOOD, "--eagle", engine=engine)[0], message)


def test_damaged_drafts_are_rejected(ask, eagle_pair, engine):
    draft = engine / "draft"
    data = draft / "draft.data"
    whole = data.read_bytes()
    data.write_bytes(whole[:1000])
    assert_one_line_error(ask(GOOD, "--eagle", engine=engine)[0], "has 1000 bytes instead of")
    data.write_bytes(whole[:5000] + b"\x01\x02\x03" + whole[5003:])
    result, _ = ask(GOOD, "--eagle", engine=engine)
    assert_one_line_error(result, "draft.data", "sha256 differs")
    data.unlink()
    assert_one_line_error(ask(GOOD, "--eagle", engine=engine)[0], "draft.data is missing")
    data.write_bytes(whole)
    fuse = draft / "fuse.onnx"
    fuse.write_bytes(b"\x00" * fuse.stat().st_size)
    result, _ = ask(GOOD, "--eagle", "--noVerify", engine=engine)
    assert_one_line_error(result, "cannot load")
    shutil.copy(eagle_pair.engine / "draft" / "fuse.onnx", fuse)
    manifest = draft / "manifest.json"
    for text, message in (
        ('{"kind": ', "is damaged"),
        ((engine / "manifest.json").read_text(), "is of kind llm_engine, not draft_engine"),
        (
            manifest.read_text().replace('"draft_vocab_size": 40', '"draft_vocab_size": "x"'),
            "is damaged",
        ),
    ):
        manifest.write_text(text)
        assert_one_line_error(ask(GOOD, "--eagle", engine=engine)[0], message)
        shutil.copy(eagle_pair.engine / "draft" / "manifest.json", manifest)
    manifest.unlink()
    assert_one_line_error(ask(GOOD, "--eagle", engine=engine)[0], "holds no manifest.json")
    write_manifest(draft, {**read_manifest(eagle_pair.engine / "draft"), "machine": "x86_64 mmx"})
    result, _ = ask(GOOD, "--eagle", engine=engine)
    assert_one_line_error(result, "was built for processor x86_64 mmx", "llm_build")


def test_eagle1_outputs(ask, eagle_pairs):
    engine = eagle_pairs("eagle1").engine
    plain, speculated = (ask(GOOD, *flags, engine=engine) for flags in ((), ("--eagle",)))
    assert speculated[0].returncode == 0, speculated[0].stderr
    assert plain[1][0]["output_text"] == speculated[1][0]["output_text"]


def test_ctrl_c_writes_finished_outputs(eagle_pair, tmp_path):
    source, output = tmp_path / "in.json", tmp_path / "out.json"
    request = {"messages": [USER], "temperature": 2.0, "top_p": 1.0, "top_k": 0}
    source.write_text(json.dumps({"max_generate_length": 60, "requests": [request] * 3000}))
    script = Path(sys.executable).parent / "llm_inference"
    profile, trees = tmp_path / "profile.json", tmp_path / "trees.json"
    words = [script, "--engineDir", eagle_pair.engine, "--inputFile", source,
             "--outputFile", output, "--eagle", "--stream",
             "--profileOutputFile", profile, "--treeOutputFile", trees]  # fmt: skip
    process = subprocess.Popen(
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(3):  # outputs, one a line
        assert process.stdout.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in printed
    answers = json.loads(output.read_text())["responses"]
    assert 3 <= len(answers) < 3000
    assert all(answer["finish_reason"] in ("stop", "length") for answer in answers)
    assert json.loads(profile.read_text())["eagle_generation"]
    assert len(json.loads(trees.read_text())["requests"]) >= 3
