"""`batch_size` of request files: outputs equal those of requests one after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgellm.device_runtime import LLM, SpecOptions
from edgellm.device_runtime.cli import _run_all
from edgellm.device_runtime.request_files.held_interrupts import HeldInterrupts
from edgellm.device_runtime.request_files.request_file import Options

WAYS = {"plain": {}, "eagle": {"spec": SpecOptions(tree="fixed"), "context_reuse": True}}
REQUESTS = [
    {
        "messages": [{"role": "user", "content": f"w{20 + at} w30"}],
        "seed": at, "max_generate_length": tokens, "save_system_prompt_kv_cache": at == 3,
    }
    for at, tokens in enumerate((12, 2, 7, 9, 12, 5))
]  # fmt: skip
REQUESTS[2] = {"messages": []}


def _answers(llm, options, has_trees, capsys):
    outputs, run = SimpleNamespace(trees=has_trees or None), SimpleNamespace(answered=[])
    for answered in _run_all(llm, options, REQUESTS, run, outputs, HeldInterrupts(), stream=True):
        run.answered.append(answered)
        answered.response.pop("timings", None)
    found = sorted(run.answered, key=lambda one: one.index)  # they come as they finish
    return [(one.response, one.rounds) for one in found], capsys.readouterr()


@pytest.mark.parametrize("way", WAYS)
def test_batch_size_keeps_order_stream_and_trees(eagle_pair, way, monkeypatch, capsys):
    options, llm = Options(top_p=1.0, top_k=0), LLM(eagle_pair.engine, **WAYS[way])
    expected = _answers(llm, options, way == "eagle", capsys)
    monkeypatch.setattr(LLM, "batch_size", 3)
    shared, sizes = LLM(eagle_pair.engine, **WAYS[way]), []
    shared.on_pass(lambda answers, _: sizes.append(answers))
    together = Options(top_p=1.0, top_k=0, batch_size=3)
    assert _answers(shared, together, way == "eagle", capsys) == expected
    assert max(sizes) == 3
    assert [response["request_idx"] for response, _ in expected[0]] == list(range(6))


def test_a_batch_size_above_the_engines_gives_a_note(tiny_engine, capsys):
    _, captured = _answers(LLM(tiny_engine), Options(batch_size=4), False, capsys)
    assert captured.err == "note: the engine's batch size is 1; build it with --maxBatchSize\n"
