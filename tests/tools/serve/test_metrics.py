"""Figures of /metrics, compared with the responses."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from serve_process import serving

PATH = "/v1/completions"


def _samples(server):
    status, response, content = server.send("/metrics")
    assert status == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(content.decode())
    return {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels and not sample.name.endswith("_created")
    }


def test_counters_are_the_sums_of_the_responses(roomy_engine):
    flags = ["--eagle", "--eagleTree", "fixed", "--eagleDraftTopK", 4, "--eagleDraftStep", 3]
    with serving(roomy_engine, *flags, "--eagleVerifyTreeSize", 12) as server:
        found = []
        for words in ("w20 w30", "w20 w30 w40", "w20 w30 w40 w50"):
            status, answer = server.json(PATH, {"prompt": words, "max_tokens": 9})
            assert status == 200
            found.append(answer["usage"])
        assert server.json(PATH, {"prompt": ""})[0] == 400
        samples = _samples(server)

    def total(*path):
        def value(usage):
            for name in path:
                usage = usage[name]
            return usage

        return sum(map(value, found))

    assert samples["vllm:prompt_tokens_total", None] == total("prompt_tokens")
    assert samples["vllm:generation_tokens_total", None] == total("completion_tokens")
    cached = total("prompt_tokens_details", "cached_tokens")
    assert samples["vllm:prefix_cache_hits_total", None] == cached > 0
    drafted = total("speculation", "total_draft_tokens")
    assert samples["vllm:spec_decode_num_draft_tokens_total", None] == drafted > 0
    accepted = total("speculation", "total_accepted_draft_tokens")
    assert samples["vllm:spec_decode_num_accepted_tokens_total", None] == accepted
    assert samples["vllm:spec_decode_num_drafts_total", None] > 0
    assert samples["vllm:request_success_total", "length"] == 3
    assert samples["vllm:request_success_total", "error"] == 1
    assert samples["vllm:time_to_first_token_seconds_count", None] == 3
    assert samples["vllm:e2e_request_latency_seconds_count", None] == 3
    assert samples["vllm:inter_token_latency_seconds_count", None] > 3
    assert samples["vllm:num_requests_running", None] == 0
    assert samples["vllm:kv_cache_usage_perc", None] == 0
