"""Acceptance length of every precision of a draft over every precision of its base.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/eagle_quantized.py --prompts 5

SmolLM2-135M-Instruct and the draft of examples/, both quantized, exported, built and run; greedy,
fixed trees of 16 nodes. Rows of the table differ in the base (and so in the outputs), columns only
in the draft.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import prompts
from methods import EAGLE3, METHODS, measure
from quality import RECIPES, checkpoint

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime.api.llm import LLM
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.scripts import smollm2

BASES = ("fp32", "fp8", "int8_sq", "int4_awq", "nvfp4")
DRAFTS = ("float", "fp8", "int8_sq", "int4_awq", "nvfp4", "nvfp4_awq")


def draft_bundle(work: Path, draft: Path, scheme: str) -> Path:
    """Export the draft in that precision."""
    source, bundle = draft, work / f"draft-{scheme}-bundle"
    if scheme != "float" and not (source := work / f"draft-{scheme}").exists():
        command = [sys.executable, "-m", "edgellm.quantize", "draft", "--quantization", scheme]
        command += ["--base_model_dir", str(checkpoint(work, "fp32")), "--draft_model_dir"]
        subprocess.run([*command, str(draft), "--output_dir", str(source)], check=True)
    base = open_checkpoint(str(checkpoint(work, "fp32")))
    options = DraftOptions("fp32")
    export_draft(open_checkpoint(str(source), tokenizer=False), base, bundle, options)
    return bundle


def base_engine(work: Path, name: str, threads: int) -> Path:
    """Build an engine of the base for drafts."""
    bundle, engine = work / f"eagle-{name}-bundle", work / f"eagle-{name}-all-drafts"
    options = ExportOptions("fp32", draft_model_dir=str(EAGLE3))
    export_llm(open_checkpoint(str(checkpoint(work, name))), bundle, options)
    plan = Plan(1024, 2048, threads, "auto", RECIPES[name][1], max_verify_tree_size=60)
    shutil.rmtree(engine, ignore_errors=True)
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--draft", type=Path, default=EAGLE3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--set", choices=prompts.NAMES, default="humaneval")
    arguments = parser.parse_args()
    work, threads = arguments.work, arguments.threads
    bundles = {scheme: draft_bundle(work, arguments.draft, scheme) for scheme in DRAFTS}
    questions = prompts.load(arguments.set)[: arguments.prompts]
    print(f"{'base':10}" + "".join(f"{name:>11}" for name in DRAFTS), flush=True)
    for name in BASES:
        engine, lengths = base_engine(work, name, threads), []
        for bundle in bundles.values():
            plan = Plan(1024, 2048, threads, "auto", "none", max_draft_tree_size=60)
            build_engine("draft", bundle, engine, plan, "onnxruntime", lambda _: None)
            models = {"plain": LLM(engine), "tree": LLM(engine, spec=METHODS["eagle3-fixed"].spec)}
            tallies, _ = measure(models, questions, arguments.tokens, 0.0)
            lengths.append(tallies["tree"].length)
        print(f"{name:10}" + "".join(f"{length:11.2f}" for length in lengths), flush=True)


if __name__ == "__main__":
    main()
