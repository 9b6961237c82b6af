"""Greedy outputs for prompts of HumanEval and gsm8k, and acceptance lengths of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from harness import prompts
from methods import EAGLE3, METHODS

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint, open_draft
from edgellm.quantize.metrics.divergence import Changes, GreedyOutput, count_changes

SETS = ("humaneval", "gsm8k")
_DRAFTED = 64  # tokens of an output with a draft
_GREEDY = SamplingParams(0.0, top_p=1.0, top_k=0)


def ask(engine: Path, count: int, tokens: int) -> list[GreedyOutput]:
    """Return an engine's greedy outputs for the first prompts of every set."""
    with LLM(engine) as model:
        return [
            GreedyOutput(name, tuple(answer.prompt.token_ids), tuple(answer.token_ids))
            for name in SETS
            for question in prompts.load(name)[:count]
            for answer in [_answer(model, question, tokens)]
        ]


def changes(logits: Callable[[np.ndarray], np.ndarray], asked: Sequence[GreedyOutput]) -> Changes:
    """Count the outputs that a model changes; `logits` maps ids [S] to [S, V]."""
    found = [logits(np.array(each.input_ids, np.int64))[each.start :].argmax(-1) for each in asked]
    return count_changes(asked, found)


def draft_bundle(base: Path, output: Path) -> Path:
    """Export the float draft of examples/."""
    source = open_checkpoint(str(base), tokenizer=False)
    export_draft(open_draft(str(EAGLE3)), source, output, DraftOptions("fp32"))
    return output


def acceptance_length(
    base: Path, draft: Path, folder: Path, rounding: str, threads: int, count: int
) -> float:
    """Return the acceptance length over outputs of every set, with fixed trees of 16 nodes.

    Args:
        base: the checkpoint.
        draft: its draft's bundle.
        folder: for a bundle and an engine.
        rounding: quantization by the build.
        threads: of the engine.
        count: number of prompts of each set.
    """
    bundle, engine = folder / "bundle", folder / "engine"
    options = ExportOptions("fp16" if rounding == "none" else "fp32", draft_model_dir=str(EAGLE3))
    export_llm(open_checkpoint(str(base)), bundle, options)
    plan = Plan(1024, 2048, threads, "auto", rounding, max_verify_tree_size=16)
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    plan = Plan(1024, 2048, threads, "auto", "none", max_draft_tree_size=60)
    build_engine("draft", draft, engine, plan, "onnxruntime", lambda _: None)
    rounds = []
    with LLM(engine, spec=METHODS["eagle3-fixed"].spec) as model:
        for name in SETS:
            for question in prompts.load(name)[:count]:
                rounds += _answer(model, question, _DRAFTED).profile.rounds
    return sum(one.emitted for one in rounds) / len(rounds)


def _answer(model: LLM, question: str, tokens: int) -> RequestOutput:
    message = {"role": "user", "content": question}
    answer = model.generate([message], sampling=_GREEDY, max_generate_length=tokens)
    for _ in answer:
        pass
    return answer
