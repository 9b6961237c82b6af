"""`n` of request files: several outputs of a request, each as of a request with its seed."""

from __future__ import annotations

import json

import pytest

from edgellm.device_runtime import LLM
from edgellm.device_runtime.request_files.resume import UnfinishedRun

USER = {"role": "user", "content": "w20 w21"}
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_generate_length": 6}
REQUESTS = [
    {"messages": [USER], "seed": 5, "n": 3},
    {"messages": [USER], "seed": 8},
    {"messages": [], "n": 2},
    {"messages": [USER], "seed": 2**63 - 1, "n": 2},
]
PLACES = [(0, 0), (0, 1), (0, 2), (1, None), (2, None), (3, 0), (3, 1)]


@pytest.fixture
def ask(infer_here, tiny_engine):
    return lambda content, *flags: infer_here(tiny_engine, content, *flags)


def _places(responses):
    return [(one["request_idx"], one.get("choice_idx")) for one in responses]


def _without_times(responses):
    return [{name: value for name, value in one.items() if name != "timings"} for one in responses]


def test_outputs_are_those_of_requests_with_their_seeds(ask):
    seeds = [5, 6, 7, 8, 2**63 - 1, 0]
    singles = [{"messages": [USER], "seed": seed} for seed in seeds]
    _, expected = ask({**SAMPLED, "requests": singles})
    result, found = ask({**SAMPLED, "requests": REQUESTS})
    assert result.returncode == 1  # of the request without messages
    assert _places(found) == PLACES
    right = [one for one in found if "error" not in one]
    for name in ("seed", "output_text", "generated_token_count", "finish_reason"):
        assert [one[name] for one in right] == [one[name] for one in expected]
    assert len({one["output_text"] for one in right}) > 3
    assert "7 responses, 1 failed" in result.stdout


def test_the_files_n_is_of_every_request(ask):
    requests = [{"messages": [USER]}, {"messages": [USER], "n": 1}, {"messages": [USER], "n": None}]
    _, found = ask({**SAMPLED, "n": 2, "requests": requests}, "--dumpOutput")
    assert _places(found) == [(0, 0), (0, 1), (1, None), (2, 0), (2, 1)]
    assert len({one["seed"] for one in found}) == 5  # random ones
    result, _ = ask({**SAMPLED, "n": 2, "requests": [{"messages": [USER]}]}, "--dumpOutput")
    assert [line[:6] for line in result.stdout.splitlines()[:2]] == ["[0.0] ", "[0.1] "]


@pytest.mark.parametrize("number", [0, -1, 1025, 1.5, "2", True])
def test_a_faulty_n_fails_its_request(ask, number):
    requests = [{"messages": [USER], "n": number}, {"messages": [USER]}]
    result, found = ask({**SAMPLED, "requests": requests})
    assert result.returncode == 1
    assert _places(found) == [(0, None), (1, None)]
    assert "$.requests[0].n" in found[0]["error"]["message"]


def test_an_interrupted_run_continues_within_a_request(ask, tmp_path, monkeypatch):
    content = {**SAMPLED, "batch_size": 3, "requests": REQUESTS}
    _, expected = ask(content)
    add = UnfinishedRun.add

    def interrupted(run, answered):
        add(run, answered)
        if len(run.answered) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "batch_size", 3)
        patch.setattr(UnfinishedRun, "add", interrupted)
        result, part = ask(content)
    assert "2 of 7 outputs are saved in" in result.stderr
    assert len(part) == 2
    assert set(_places(part)) < set(PLACES)
    result, found = ask(content, "--resume")
    assert "2 are finished" in result.stderr
    assert _without_times(found) == _without_times(expected)
    assert not (tmp_path / "out.json.partial").exists()


def test_trees_name_their_outputs(infer_here, eagle_pair, tmp_path):
    content = {"temperature": 0, "max_generate_length": 8}
    content["requests"] = [{"messages": [USER], "n": 2}, {"messages": [USER]}]
    path = tmp_path / "trees.json"
    infer_here(eagle_pair.engine, content, "--eagle", "--treeOutputFile", path)
    found = json.loads(path.read_text())["requests"]
    assert _places(found) == [(0, 0), (0, 1), (1, None)]
    texts = [[token for one in each["rounds"] for token in one["emitted"]] for each in found]
    assert texts[0] == texts[1] == texts[2]  # greedy outputs are equal
