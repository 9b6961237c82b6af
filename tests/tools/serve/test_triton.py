"""Triton's generate extension, as curl would ask."""

from __future__ import annotations

import json

import pytest

from edgellm.device_runtime import SamplingParams

PATH = "/v2/models/tiny/generate"
BODY = {
    "text_input": "w20 w30 w40",
    "sampling_param_max_tokens": 16,
    "sampling_param_temperature": 0,
}


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


def test_figures_are_only_told_when_asked(server):
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
        ("/v2/models/other/generate", BODY, "only 'tiny'"),
    ):
        status, found = server.json(path, body)
        assert status in (400, 404)
        assert list(found) == ["error"]
        assert fragment in found["error"]


def test_health(server):
    for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/tiny/ready"):
        status, _, content = server.send(path)
        assert (status, content) == (200, b"")
    assert server.json("/health") == (200, {"status": "ok"})
    assert server.json("/ready") == (200, {"status": "ready"})
