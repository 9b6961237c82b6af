"""NVIDIA's AIPerf measures a server: what it counts is what the server says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import downloaded
import pytest

REQUESTS, TOKENS = 16, 12
DRAFTS = "vllm:spec_decode_num_"


@pytest.fixture(scope="session")
def aiperf() -> Path:
    """The folder of AIPerf and its dependencies."""
    return downloaded.packages(Path(__file__).with_name("aiperf.txt"))


def _profile(aiperf: Path, folder: Path, *flags: object) -> dict:
    """AIPerf's figures of a run."""
    environment = {**os.environ, "PYTHONPATH": str(aiperf)}
    # Told to be offline it takes no tokenizer but one of the hub's cache.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    command = [
        sys.executable,
        aiperf / "bin" / "aiperf",
        "profile",
        "--output-artifact-dir",
        folder,
    ]
    fixed = ["--ui", "none", "--no-gpu-telemetry", "--random-seed", 1]
    result = subprocess.run(
        [*map(str, [*command, *fixed, *flags])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "profile_export_aiperf.json").read_text())


@pytest.mark.nightly
def test_its_figures_are_those_of_the_server(aiperf, server, roomy_engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"w{20 + index} w{40 + index}" for index in range(REQUESTS)]
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # Special tokens have no text: AIPerf, which counts by the text, would miss them.
    words_only = {"max_tokens": TOKENS, "temperature": 0, "logit_bias": {"1": -100, "2": -100}}
    counters = ("drafts", "draft_tokens", "accepted_tokens")
    before = [server.metric(f"{DRAFTS}{name}_total") for name in counters]
    found = _profile(
        aiperf, tmp_path / "artifacts", "--model", "tiny", "--url", server.url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", roomy_engine,
        "--input-file", prompts, "--custom-dataset-type", "single_turn",
        "--request-count", REQUESTS, "--concurrency", 4, "--extra-inputs", json.dumps(words_only),
    )  # fmt: skip
    assert found["request_count"]["avg"] == REQUESTS
    assert found["request_error_rate"]["avg"] == 0
    assert found["error_summary"] == []
    said = found["total_usage_completion_tokens"]["avg"]
    assert said == found["total_osl"]["avg"] == REQUESTS * TOKENS
    assert 0 < found["time_to_first_token"]["p50"] < found["request_latency"]["max"]
    assert found["inter_token_latency"]["max"] > 0
    after = [server.metric(f"{DRAFTS}{name}_total") for name in counters]
    drafted = [
        found[f"total_{name}"]["avg"]
        for name in ("spec_decode_steps", "draft_tokens", "accepted_draft_tokens")
    ]
    assert drafted == [now - then for now, then in zip(after, before, strict=True)]
    assert drafted[1] > drafted[0] > 0
    scraped = json.loads((tmp_path / "artifacts" / "server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{server.url}/metrics"]
    assert "vllm:e2e_request_latency_seconds" in scraped["metrics"]
