"""Greedy outputs of one library of the venv of vllm_venv.py, in its own process.

`python vllm_answers.py JOB RESULT` reads JSON {"library", "model", "dtype", "draft", "drafted",
"prompts" (token ids), "tokens", "rounding", "logits"} and writes {"answers": [token ids], "rounds",
"accepted", "versions", "read": log-probabilities of the prompts' tokens except the first, one
list}. For transformers, "rounding" quantizes inputs as in the checkpoint, and "logits" is a file
for the logits of prompts and outputs (.npz, an array [S, V] each).
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy

_EOS = 2  # of SmolLM2
_ROUNDS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def vllm(job: dict[str, Any]) -> dict[str, Any]:
    """Run one request at a time, so that rounds are those of a single output."""
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
        job["model"], dtype=job["dtype"], max_model_len=1024, enforce_eager=True, max_num_seqs=1,
        disable_log_stats=False, **(chain if job["draft"] else {}),
    )  # fmt: skip
    reads = None if job["draft"] else 0  # only of the prompts' tokens
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], prompt_logprobs=reads)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    found = llm.generate(prompts, sampling)
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec" in metric.name and hasattr(metric, "value")
    }
    return {
        "answers": [list(one.outputs[0].token_ids) for one in found],
        "read": [
            position[token].logprob
            for one, ids in zip(found, job["prompts"], strict=True)
            for position, token in zip(one.prompt_logprobs or (), ids, strict=False)
            if position is not None
        ],
        "rounds": counts.get(_ROUNDS, 0),
        "accepted": counts.get(_ACCEPTED, 0),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "compressed-tensors")},
    }


def transformers(job: dict[str, Any]) -> dict[str, Any]:
    """Run transformers; compressed-tensors dequantizes weights and quantizes inputs."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
    if not job["rounding"]:
        for module in model.modules():
            if (scheme := getattr(module, "quantization_scheme", None)) is not None:
                scheme.input_activations = None
    answers, logits, read = [], {}, []
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
        with torch.no_grad():
            scores = model(found[:, :-1]).logits[0]
        logits[str(len(logits))] = scores.numpy()
        likely = scores[: len(ids) - 1].log_softmax(-1)
        read += likely[range(len(ids) - 1), ids[1:]].tolist()
    if job["logits"]:
        numpy.savez(job["logits"], **logits)
    versions = {"transformers": version("transformers")}
    return {"answers": answers, "read": read, "versions": versions}


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    asked = json.loads(job.read_text())
    answer = {"vllm": vllm, "transformers": transformers}[asked["library"]]
    result.write_text(json.dumps(answer(asked)))


if __name__ == "__main__":
    main()
