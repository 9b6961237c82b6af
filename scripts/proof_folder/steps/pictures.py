"""Captions of pictures by a vision-language engine, compared with those of transformers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.scripts.proof_folder.steps.outputs import Result, passed, row
from edgellm.scripts.proof_folder.steps.pair import build_seeing

CAPTIONS = "captions.json"
LIKELIEST = 8  # tokens whose log-probabilities are compared
_GREEDY = SamplingParams(temperature=0, num_logprobs=LIKELIEST)
_Likely = list[tuple[tuple[int, float], ...]]  # token ids with log-probabilities, at each token


def compare_captions(base: Path, visual: Path, pictures: Path, backend: str) -> Result:
    """Build the engines; compare tokens of each caption, and log-probabilities of the likeliest."""
    captions = json.loads((pictures / CAPTIONS).read_text("utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, encoder = build_seeing(base, visual, Path(folder), backend)
        with LLM(engine, multimodal_engine_dir=encoder) as llm:
            for one in captions:
                ids, found, text = _caption(llm, pictures / one["picture"], one)
                said.append(f"{one['picture']}: {text}")
                rows |= _rows(one, ids, found)
    return passed(rows), {"said": said, "outputs": rows}


def _caption(llm: LLM, picture: Path, one: dict[str, Any]) -> tuple[list[int], _Likely, str]:
    content = [
        {"type": "image", "image": str(picture)},
        {"type": "text", "text": one["request"]},
    ]
    output = llm.generate(
        [{"role": "user", "content": content}],
        sampling=_GREEDY,
        max_generate_length=len(one["token_ids"]),
    )
    found = [each.top for step in output for each in step.logprobs]
    return output.token_ids, found, output.text


def _rows(one: dict[str, Any], ids: list[int], found: _Likely) -> dict[str, dict[str, Any]]:
    """Tokens, and log-probabilities up to the first token that differs."""
    wanted = one["token_ids"]
    pairs = zip(ids, wanted, strict=False)  # the last tokens may be missing
    same = next((at for at, (token, other) in enumerate(pairs) if token != other), len(ids))
    likely = found[:same]  # the end token has none
    own = [value for top in likely for _, value in top]
    others = [
        row_of[token]
        for top, row_of in zip(likely, one["logprobs"], strict=False)
        for token, _ in top
    ]
    off = np.abs(np.subtract(own, others)).max(initial=0.0)
    name = one["picture"]
    return {
        f"tokens of {name}": row(ids, wanted, len(wanted) - same, 0),
        f"log-probabilities of {name}": row(own, others, off, one["allowed"]),
    }
