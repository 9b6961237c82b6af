"""Default schemes of heads and drafts by target."""

from __future__ import annotations

import pytest
from conftest import assert_one_line_error

from edgellm.core.errors import EdgeLLMError
from edgellm.quantize import cli
from edgellm.quantize.formats.schemes import HEAD_SCHEMES, SCHEMES
from edgellm.quantize.job import Job
from edgellm.quantize.pipeline import run, summary
from edgellm.quantize.pipeline.deploy_target import form_of_draft, form_of_head, rounds_as
from edgellm.quantize.pipeline.search import algorithms


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        *((each, "fp8") for each in ("cpu", "gpu", "8.9", "9.0")),
        ("8.7", "int4_awq"),
        *((each, "nvfp4") for each in ("11.0", "12.0")),
    ],
)
def test_each_target_has_its_default_head_and_draft_schemes(target, draft):
    assert form_of_draft(target) == draft
    assert draft in SCHEMES
    heads = {body: form_of_head(target, body, is_modelopt=True) for body in (*SCHEMES, "mixed")}
    if target == "cpu":
        assert {*heads.values()} == {None}
    else:
        assert heads.pop("mixed") is None  # mixed precision has no default head
        assert {*heads.values()} <= {*HEAD_SCHEMES}
        assert heads["nvfp4_awq"] == "nvfp4"
    assert form_of_head(target, "fp8", is_modelopt=False) is None
    assert rounds_as(target) == ("cpu" if target == "cpu" else "gpu")


@pytest.mark.parametrize("target", ["", "tpu", "110", "8", "8.7a"])
def test_invalid_targets_are_rejected(target):
    with pytest.raises(EdgeLLMError, match=r"--target .*: unknown") as caught:
        rounds_as(target)
    assert "11.0 (Thor)" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "target", "head"),
    [(None, "11.0", "nvfp4"), ("float", "gpu", None), ("fp8", "gpu", "fp8"), (None, "cpu", None)],
)
def test_a_job_has_the_default_head_and_the_target(monkeypatch, tmp_path, given, target, head):
    jobs: list[Job] = []
    monkeypatch.setattr(run, "run_job", lambda job, _: jobs.append(job))
    monkeypatch.setattr(algorithms, "with_default", lambda job: job)  # which reads the model
    monkeypatch.setattr(summary, "print_summary", lambda *_: None)
    (tmp_path / "model").mkdir()
    flags = [
        "--model_dir",
        str(tmp_path / "model"),
        "--output_dir",
        str(tmp_path / "out"),
        "--target",
        target,
    ]
    head_flag = [] if given is None else ["--lm_head_quantization", given]
    cli.app(["llm", *flags, "--quantization", "nvfp4", *head_flag], standalone_mode=False)
    assert [(job.lm_head_quantization, job.target) for job in jobs] == [(head, rounds_as(target))]


def test_an_invalid_target_fails_before_the_run(command_here, tmp_path):
    folders = ("--model_dir", tmp_path / "model", "--output_dir", tmp_path / "out")
    result = command_here(
        "edgellm-quantize", "llm", *folders, "--quantization", "fp8", "--target", "x"
    )
    assert_one_line_error(result, "--target x: unknown", "compute capability")
