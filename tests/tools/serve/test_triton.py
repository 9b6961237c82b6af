"""Triton's generate extension, as curl would ask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from serve_process import serving

from edgellm.device_runtime import SamplingParams

PATH = "/v2/models/tiny/generate"
BODY = {
    "text_input": "w20 w30 w40",
    "sampling_param_max_tokens": 16,
    "sampling_param_temperature": 0,
    "sampling_param_exclude_input_from_output": True,
}
SPECULATIVE = (
    ("tensorrt_llm", (
        "curl -X POST localhost:8000/v2/models/tensorrt_llm/generate \\\n"
        """  -d '{"text_input": "What is ML?", "sampling_param_max_tokens": 50}'""",
        "curl -X POST localhost:8000/v2/models/tensorrt_llm/generate \\\n"
        """  -d '{"text_input": "What is ML?", "sampling_param_max_tokens": 50, """
        """"sampling_param_return_perf_metrics": true}' | jq""",
    )),
    ("eagle_model", (
        """curl -X POST localhost:8000/v2/models/eagle_model/generate -d '{"text_input": """
        """"What is Triton Inference Server?", "parameters": {"stream": false, """
        """"temperature": 0}}' | jq""",
    )),
)  # fmt: skip


@pytest.fixture(scope="module")
def expected(offline):
    answer = offline.generate(
        "w20 w30 w40", sampling=SamplingParams(temperature=0), max_generate_length=16
    )
    list(answer)
    return answer


def test_a_text_and_how_well_it_was_drafted(server, expected):
    status, found = server.json(PATH, {**BODY, "sampling_param_return_perf_metrics": True})
    assert status == 200
    assert found["text_output"] == expected.text
    assert (found["model_name"], found["model_version"]) == ("tiny", "1")
    accepted, drafted = found["total_accepted_draft_tokens"], found["total_draft_tokens"]
    assert 0 <= accepted <= drafted
    assert found["acceptance_rate"] == pytest.approx(accepted / drafted)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("name", "lines"), SPECULATIVE, ids=("tensorrt_llm", "vllm"))
def test_the_lines_of_tritons_tutorial_as_they_stand_there(roomy_engine, tmp_path, name, lines):
    """Typed into a shell, where curl finds this server at port 8000."""
    (tmp_path / "jq").write_text("#!/bin/sh\nexec python3 -m json.tool\n")
    (tmp_path / "jq").chmod(0o755)
    environment = {
        **os.environ,
        "CURL_HOME": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    with serving(roomy_engine, "--eagle", "--modelName", name) as server:
        to = f"127.0.0.1:{server.port}"
        (tmp_path / ".curlrc").write_text(f'silent\nconnect-to = "localhost:8000:{to}"\n')
        found = [
            json.loads(subprocess.check_output(["bash", "-c", line], env=environment, text=True))
            for line in lines
        ]
    asked = json.loads(lines[0][lines[0].index("{") : lines[0].rindex("}") + 1])["text_input"]
    for answer in found:
        assert answer["model_name"] == name
        assert answer["text_output"].startswith(f"{asked} w")
    assert list(found[0]) == ["model_name", "model_version", "text_output"]
    if name == "tensorrt_llm":  # greedy without being told
        assert found[0]["text_output"] == found[1]["text_output"]
        assert found[1]["acceptance_rate"] >= 0
        assert {"total_accepted_draft_tokens", "total_draft_tokens"} < set(found[1])


def test_the_prompt_is_a_part_of_the_answer(server, expected):
    prompt, form = BODY["text_input"], {"content_type": "application/x-www-form-urlencoded"}
    body = {name: value for name, value in BODY.items() if "exclude" not in name}
    for own, told in (
        (body, True),
        ({**body, "sampling_param_exclude_input_from_output": True}, False),
        ({"text_input": prompt, "parameters": {"temperature": 0}}, True),
        ({"text_input": prompt, "exclude_input_in_output": True,
          "parameters": {"temperature": 0}}, False),
    ):  # fmt: skip
        whole = f"{prompt}{expected.text}" if told else expected.text
        status, found = server.json(PATH, own, **form)
        assert (status, found["text_output"]) == (200, whole)
    for own, told in ((body, True), ({"text_input": prompt, "stream": True}, False)):
        content = server.send(f"{PATH}_stream", own)[2].decode()
        pieces = [json.loads(e.removeprefix("data: ")) for e in content.split("\n\n") if e]
        text = "".join(piece["text_output"] for piece in pieces)
        assert text.startswith(f"{prompt} w") == told
    said = server.json(PATH, {**BODY, "return_finish_reason": True})[1]
    assert said["finish_reason"] == expected.finish_reason


def test_acceptance_figures_only_if_requested(server):
    assert "acceptance_rate" not in server.json(PATH, BODY)[1]


def test_a_stream_has_the_text_in_pieces(server, expected):
    body = {**BODY, "id": "7", "sampling_param_return_perf_metrics": True, "streaming": True}
    status, response, content = server.send(f"{PATH}_stream", body)
    assert status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["text_output"] for piece in pieces) == expected.text
    assert len(pieces) > 5
    assert all(piece["id"] == "7" for piece in pieces)
    assert pieces[-1]["total_draft_tokens"] > 0


def test_errors_have_tritons_form(server):
    for path, body, fragment in (
        (PATH, {**BODY, "sampling_param_beam_width": 4}, "sampling_param_beam_width"),
        (PATH, {"sampling_param_max_tokens": 1}, "text_input"),
        (PATH, {**BODY, "streaming": True}, "generate_stream"),
        (PATH, {"text_input": "w20", "parameters": {"stream": True}}, "generate_stream"),
        (PATH, {**BODY, "parameters": {}}, "not both"),
        (PATH, {"text_input": "w20", "parameters": {"best_of": 2}}, "parameters.best_of"),
        (PATH, b"text_input=w20", "not valid JSON"),
        ("/v2/models/other/generate", BODY, "only 'tiny'"),
    ):
        status, found = server.json(path, body)
        assert status in (400, 404)
        assert list(found) == ["error"]
        assert fragment in found["error"]


def test_health_and_ready_paths_answer_200(server):
    for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/tiny/ready"):
        status, _, content = server.send(path)
        assert (status, content) == (200, b"")
    assert server.json("/health") == (200, {"status": "ok"})
    assert server.json("/ready") == (200, {"status": "ready"})
