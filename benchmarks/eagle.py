"""EAGLE3 against plain decoding on real prompts: acceptance length and tokens per second.

    pip install -e '.[dev]'
    python benchmarks/eagle.py                      # everything; hours
    python benchmarks/eagle.py --prompts 20         # the first 20 of every set

Every prompt is answered by all modes, which take turns in starting, so that the ratios compare
what ran side by side. The answers of one prompt must be the same in all modes of an fp32 engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import prompts
import weights

from edgellm.build.draft import build_draft
from edgellm.build.engine import build_engine
from edgellm.device_runtime.backends import Plan
from edgellm.device_runtime.llm import LLM
from edgellm.device_runtime.sampling import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.draft import DraftOptions, export_draft
from edgellm.export.source import open_checkpoint
from edgellm.tools import smollm2

DRAFT = Path(__file__).parents[1] / "examples" / "smollm2-135m-instruct-eagle3"
TAPS = (2, 15, 27)
ENGINES = {"fp32": ("fp32", "auto"), "int8": ("fp32", "int8"), "int4": ("int4", "auto")}
MODES = {
    "plain": None,
    "fixed 16": SpecOptions(top_k=8, steps=5, verify_size=16, tree="fixed"),
    "cost": SpecOptions(),
    "cost+ngram": SpecOptions(lookups=("ngram",)),
}


@dataclass
class Tally:
    """Sums over prompts."""

    tokens: int = 0
    ms: float = 0.0
    rounds: int = 0
    emitted: int = 0
    nodes: int = 0
    ratios: list[float] = field(default_factory=list)  # to plain, prompt by prompt

    @property
    def rate(self) -> float:
        return self.tokens / self.ms * 1e3


def build(work: Path, draft: Path, threads: int) -> dict[str, Path]:
    """Export and build what is not there yet."""
    source = str(smollm2.fetch())
    work.mkdir(parents=True, exist_ok=True)
    checkpoints = {"fp32": work / "fp32", "int4": work / "int4_b32"}
    if not checkpoints["fp32"].exists():
        weights.float_checkpoint(source, checkpoints["fp32"])
    if not checkpoints["int4"].exists():
        weights.round_checkpoint(source, checkpoints["int4"], 32)
    for name, checkpoint in checkpoints.items():
        bundle = work / f"eagle-{name}-bundle"
        if not bundle.exists():
            options = ExportOptions("fp32", hidden_taps=TAPS)
            export_llm(open_checkpoint(str(checkpoint)), bundle, options)
    drafted = work / "eagle-draft-bundle"
    base = open_checkpoint(str(checkpoints["fp32"]))
    export_draft(open_checkpoint(str(draft), tokenizer=False), base, drafted, DraftOptions("fp32"))
    engines = {}
    for name, (bundle, precision) in ENGINES.items():
        engines[name] = engine = work / f"eagle-{name}-{threads}"
        if not engine.exists():
            plan = Plan(1024, 2048, threads, "auto", precision, max_verify_tree_size=60)
            build_engine(
                work / f"eagle-{bundle}-bundle", engine, plan, "onnxruntime", lambda _: None
            )
        plan = Plan(1024, 2048, threads, "auto", max_draft_tree_size=60)
        build_draft(drafted, engine, plan, "onnxruntime", lambda _: None)
    return engines


def measure(
    models: dict[str, LLM], questions: list[str], tokens: int, temperature: float
) -> tuple[dict[str, Tally], int]:
    """Answer every question in every mode; the sums, and how many answers differ from plain."""
    tallies = {name: Tally() for name in models}
    names, differing = list(models), 0
    for index, question in enumerate(questions):
        sampling = SamplingParams(temperature, top_p=1.0, top_k=0, seed=index)
        turn = index % len(names)
        answers = {}
        for name in names[turn:] + names[:turn]:
            answer = models[name].generate(
                [{"role": "user", "content": question}],
                sampling=sampling,
                max_generate_length=tokens,
            )
            for _ in answer:
                pass
            answers[name] = answer
        plain = answers["plain"]
        differing += any(other.token_ids != plain.token_ids for other in answers.values())
        plain_ms = plain.profile.decode_ms() / max(len(plain.token_ids) - 1, 1)
        for name, answer in answers.items():
            _add(tallies[name], answer, plain_ms)
    return tallies, differing


def _add(tally: Tally, answer, plain_ms: float) -> None:  # noqa: ANN001
    decoded, ms = len(answer.token_ids) - 1, answer.profile.decode_ms()
    if decoded < 1:
        return
    rounds = answer.profile.rounds
    tally.tokens += decoded
    tally.ms += ms
    tally.rounds += len(rounds)
    tally.emitted += sum(counts.emitted for counts in rounds)
    tally.nodes += sum(counts.tree_size for counts in rounds)
    tally.ratios.append(plain_ms / (ms / decoded))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompts", type=int, default=None, help="of each set; default all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--sets", nargs="+", choices=prompts.NAMES, default=list(prompts.NAMES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    arguments = parser.parse_args()
    built = build(arguments.work, arguments.draft, arguments.threads)
    figures = []
    print(
        f"{'engine':6} {'set':10} {'T':>3} {'mode':11} {'tok/s':>7} {'x plain':>8} {'median':>7} "
        f"{'length':>7} {'nodes':>6}"
    )
    for engine in arguments.engines:
        models = {
            name: LLM(built[engine], spec=MODES[name]) for name in ["plain", *arguments.modes]
        }
        for temperature in arguments.temperatures:
            for name in arguments.sets:
                questions = prompts.load(name)[: arguments.prompts]
                tallies, differing = measure(models, questions, arguments.tokens, temperature)
                for mode, tally in tallies.items():
                    figures.append(_report(engine, name, temperature, mode, tally, tallies))
                print(f"       {len(questions)} prompts, {differing} with different answers")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


def _report(
    engine: str, name: str, temperature: float, mode: str, tally: Tally, all_: dict[str, Tally]
) -> dict[str, object]:
    ratio = tally.rate / all_["plain"].rate
    median = statistics.median(tally.ratios)
    length = tally.emitted / tally.rounds if tally.rounds else 1.0
    nodes = tally.nodes / tally.rounds if tally.rounds else 1.0
    print(
        f"{engine:6} {name:10} {temperature:3.1f} {mode:11} {tally.rate:7.1f} {ratio:8.2f} "
        f"{median:7.2f} {length:7.2f} {nodes:6.1f}",
        flush=True,
    )
    return {
        "engine": engine, "set": name, "temperature": temperature, "mode": mode,
        "tokens_per_s": tally.rate, "ratio": ratio, "median_ratio": median,
        "acceptance_length": length, "verified_nodes": nodes,
    }  # fmt: skip


if __name__ == "__main__":
    main()
