"""All speculative methods against plain decoding on real prompts: tokens/s, acceptance length.

    pip install -e '.[dev]'
    python benchmarks/methods.py --prompts 20            # the first 20 of every set
    python benchmarks/methods.py --eagle1 DIR --medusa DIR      # with these two drafts as well
    python benchmarks/methods.py --dflash DIR --dspark DIR      # with block drafts

All methods run each prompt, and alternate in starting, so that ratios compare the same minutes of
the machine. In an fp32 engine, the outputs of all methods must be equal. EAGLE3's draft is that of
examples/; edgellm-train-draft trains the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from harness import checkpoints, prompts

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.speculate.policy.static_tree import NAMED
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint, open_draft
from edgellm.scripts import smollm2

EAGLE3 = Path(__file__).parents[1] / "examples" / "smollm2-135m-instruct-eagle3"
DRAFTS = ("eagle3", "eagle1", "medusa", "dflash", "dspark")
ENGINES = {"fp32": ("fp32", "auto"), "int8": ("fp32", "int8"), "int4": ("int4", "auto")}
DRAFT_MODEL = "int4"  # the same base, quantized; there is no smaller SmolLM2
TREE_SIZE = 64  # the 63 choices and the root


@dataclass(frozen=True, slots=True)
class Method:
    """A speculative method, and the draft in the engine's folder."""

    spec: SpecOptions | None
    draft: str = "eagle3"


_FIXED = SpecOptions(top_k=8, steps=5, verify_size=16, tree="fixed")
_EAGLE2 = SpecOptions(top_k=10, steps=6, verify_size=60, tree="fixed")
_CHOICES = NAMED["mc_sim_7b_63"]
_STATIC = SpecOptions(choices=_CHOICES)
_THREE_LEVELS = SpecOptions(choices=tuple(path for path in _CHOICES if len(path) <= 3))
METHODS = {
    "plain": Method(None),
    "ngram": Method(SpecOptions(network=None, lookups=("ngram",))),
    "suffix": Method(SpecOptions(network=None, lookups=("suffix",))),
    "eagle3-fixed": Method(_FIXED),
    "eagle3": Method(SpecOptions()),
    "eagle3+ngram": Method(SpecOptions(lookups=("ngram",))),
    "eagle3+suffix": Method(SpecOptions(lookups=("suffix",))),
    "eagle1-static": Method(_STATIC, "eagle1"),
    "eagle2": Method(_EAGLE2, "eagle1"),
    "eagle1": Method(SpecOptions(), "eagle1"),
    "medusa-static": Method(_THREE_LEVELS, "medusa"),  # heads with short training
    "medusa": Method(SpecOptions(), "medusa"),
    "dflash": Method(SpecOptions(), "dflash"),
    "dspark": Method(SpecOptions(), "dspark"),
    "dspark-fixed": Method(_FIXED, "dspark"),
    "model": Method(None),  # its options name an engine
    "auto": Method(SpecOptions(network="auto")),
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

    @property
    def length(self) -> float:
        return self.emitted / self.rounds if self.rounds else 1.0

    def add(self, answer: RequestOutput, plain_ms: float) -> None:
        """Add an output; `plain_ms`: time of a token without a draft."""
        decoded, ms = len(answer.token_ids) - 1, answer.profile.decode_ms()
        if decoded < 1:
            return
        rounds = answer.profile.rounds
        self.tokens += decoded
        self.ms += ms
        self.rounds += len(rounds)
        self.emitted += sum(counts.emitted for counts in rounds)
        self.nodes += sum(counts.tree_size for counts in rounds)
        self.ratios.append(plain_ms / (ms / decoded))


def checkpoint(work: Path, name: str) -> Path:
    """Return SmolLM2 in float32, or in INT4 in blocks of 32."""
    source, folder = str(smollm2.fetch()), work / {"fp32": "fp32", "int4": "int4_b32"}[name]
    work.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        if name == "fp32":
            checkpoints.float_checkpoint(source, folder)
        else:
            checkpoints.round_checkpoint(source, folder, 32)
    return folder


def base_bundle(work: Path, name: str, draft: Path) -> Path:
    """Export a checkpoint with the auxiliary hidden states of a draft."""
    bundle = work / f"{draft.name}-{name}-bundle"
    options = ExportOptions("fp32", draft_model_dir=str(draft))
    export_llm(open_checkpoint(str(checkpoint(work, name))), bundle, options)
    return bundle


def engine(work: Path, name: str, draft: Path, threads: int) -> Path:
    """Build an engine of `ENGINES` with a draft; reuse all except the draft."""
    folder, (stored, precision) = work / f"{draft.name}-{name}-{threads}", ENGINES[name]
    if not folder.exists():
        plan = Plan(1024, 2048, threads, "auto", precision, max_verify_tree_size=TREE_SIZE)
        build_engine("llm", base_bundle(work, stored, draft), folder, plan, "onnxruntime", _silent)
    plan = Plan(1024, 2048, threads, "auto", max_draft_tree_size=TREE_SIZE)
    build_engine("draft", draft_bundle(work, draft), folder, plan, "onnxruntime", _silent)
    return folder


def draft_bundle(work: Path, draft: Path) -> Path:
    """Export a draft of SmolLM2."""
    bundle = work / f"{draft.name}-draft-bundle"
    base = open_checkpoint(str(checkpoint(work, "fp32")), tokenizer=False)
    export_draft(open_draft(str(draft)), base, bundle, DraftOptions("fp32"))
    return bundle


def _silent(_: str) -> None:
    """Ignore the progress of builds."""


def measure(
    models: dict[str, LLM], questions: list[str], tokens: int, temperature: float
) -> tuple[dict[str, Tally], int]:
    """Run every prompt with every method; return sums, and the number of differing outputs."""
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
            tallies[name].add(answer, plain_ms)
    return tallies, differing


def opened(
    work: Path, name: str, methods: list[str], drafts: dict[str, Path], threads: int
) -> dict[str, LLM]:
    """Open a model for each method of an engine."""
    needed = {METHODS[method].draft for method in methods}
    folders = {draft: engine(work, name, drafts[draft], threads) for draft in sorted(needed)}
    models = {}
    for method in methods:
        spec, folder = METHODS[method].spec, folders[METHODS[method].draft]
        if method == "model":
            drafting = engine(work, DRAFT_MODEL, drafts["eagle3"], threads)
            spec = SpecOptions(network="draft", draft_engine_dir=drafting)
        models[method] = LLM(folder, spec=spec)
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    for draft in DRAFTS:
        default = EAGLE3 if draft == "eagle3" else None
        parser.add_argument(f"--{draft}", type=Path, default=default, help="folder of the draft")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--prompts", type=int, default=None, help="prompts of each set; default: all"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--sets", nargs="+", choices=prompts.NAMES, default=list(prompts.NAMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the figures to this file"
    )
    arguments = parser.parse_args()
    drafts = {draft: getattr(arguments, draft) for draft in DRAFTS}
    asked = ["plain", *(method for method in arguments.methods if method != "plain")]
    methods = [method for method in asked if drafts[METHODS[method].draft] is not None]
    if missing := [method for method in asked if method not in methods]:
        print(f"left out, for want of their drafts: {', '.join(missing)}")
    figures = []
    for name in arguments.engines:
        own = [method for method in methods if (method, name) != ("model", DRAFT_MODEL)]
        models = opened(arguments.work, name, own, drafts, arguments.threads)
        for temperature in arguments.temperatures:
            for questions in arguments.sets:
                loaded = prompts.load(questions)[: arguments.prompts]
                tallies, differing = measure(models, loaded, arguments.tokens, temperature)
                where = {"engine": name, "set": questions, "temperature": temperature}
                figures += _report(where, tallies)
                print(f"       {len(loaded)} prompts, {differing} with different answers\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


def _report(where: dict[str, object], tallies: dict[str, Tally]) -> list[dict[str, object]]:
    """Print the figures of a set, and the ratio of "auto" to the best fixed method."""
    print(
        f"{where['engine']}, {where['set']}, temperature {where['temperature']}\n"
        f"{'method':14} {'tok/s':>7} {'x plain':>8} {'median':>7} {'length':>7} {'nodes':>6}"
    )
    figures = []
    for method, tally in tallies.items():
        ratio, median = tally.rate / tallies["plain"].rate, statistics.median(tally.ratios)
        nodes = tally.nodes / tally.rounds if tally.rounds else 1.0
        figures.append({
            **where, "method": method, "tokens_per_s": tally.rate, "ratio": ratio,
            "median_ratio": median, "acceptance_length": tally.length, "verified_nodes": nodes,
        })  # fmt: skip
        print(
            f"{method:14} {tally.rate:7.1f} {ratio:8.2f} {median:7.2f} {tally.length:7.2f} "
            f"{nodes:6.1f}",
            flush=True,
        )
    if "auto" in tallies and len(tallies) > 2:
        rates = {method: tally.rate for method, tally in tallies.items() if method != "auto"}
        best = max(rates, key=rates.__getitem__)
        print(f"auto / {best}, the best fixed choice: {tallies['auto'].rate / rates[best]:.3f}")
    return figures


if __name__ == "__main__":
    main()
