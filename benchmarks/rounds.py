"""Time of drafted rounds by stage, and their limits at given prices.

    python benchmarks/rounds.py --prompts 5                    # milliseconds of a round by stage
    python benchmarks/rounds.py --prompts 5 --threads 1 --cpu  # the same on a busy machine
    python benchmarks/rounds.py --prompts 6 --priced           # real acceptance at given prices
    python benchmarks/rounds.py --prompts 6 --priced --temperature 1

With `--priced` every forward pass costs its `PRICES`, measured on an idle machine, so that figures
do not depend on other programs. Trees are chosen by these prices, and the base accepts their
tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import methods
from harness import prompts

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine import profile
from edgellm.device_runtime.engine.profile import GENERATION, SPECULATION, Profile
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.drafters import eagle
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.spec_budget import TextLookupShare
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.text_lookup import TextDrafts
from edgellm.scripts import smollm2

# SmolLM2 and its draft in INT4, two threads of an AMD EPYC (Zen 5); milliseconds by tokens.
PASSES = {"1": 2.40, "2": 2.58, "4": 2.95, "8": 4.05, "16": 6.8, "32": 12.5, "64": 25.0}
STEPS = {"1": 0.17, "2": 0.21, "4": 0.26, "8": 0.45, "16": 0.8, "64": 3.2}
EXTENSIONS = {"1": 0.31, "2": 0.33, "4": 0.37, "8": 0.50, "16": 0.75, "64": 2.0}
HOST_MS = 0.25, 0.1  # of a network call, and of a tree, beyond plain decoding
LOOKED_MS = 0.03  # of a lookup in the text
FREE = {"1": 0.001, "64": 0.002}
PRICES = {
    "as it is": Costs.of(PASSES, STEPS, EXTENSIONS, *HOST_MS),
    "a host that costs nothing": Costs.of(PASSES, STEPS, EXTENSIONS),
    "drafts that cost nothing": Costs.of(PASSES, FREE, FREE),
}


def answered(llm: LLM, questions: list[str], tokens: int, temperature: float) -> Profile:
    """Run all prompts, one after the other; return the profile."""
    total = Profile()
    for seed, question in enumerate(questions):
        answer = llm.generate(
            [{"role": "user", "content": question}],
            sampling=SamplingParams(temperature, top_p=1.0, top_k=0, seed=seed),
            max_generate_length=tokens,
        )
        for _ in answer:
            pass
        total.add(answer.profile)
    return total


def print_stages(where: str, total: Profile) -> None:
    """Print means of a round, and medians of a stage's runs."""
    stages = [name for name in (GENERATION, *SPECULATION) if name in total.stages_ms]
    count = len(total.rounds) or len(total.stages_ms[GENERATION])
    tokens, ms = total.decoded_tokens(), total.decode_ms()
    rates = f"{tokens / count:.2f} tokens a round, {tokens / ms * 1e3:.1f}/s"
    print(f"{where}: {ms / count:.3f} ms, {rates}")
    for name in stages:
        samples = total.stages_ms[name]
        print(f"    {name:30} {sum(samples) / count:7.3f}  median {statistics.median(samples):.3f}")


def priced(
    folder: Path, method: str, sets: Sequence[list[str]], answer: Callable[..., Profile], name: str
) -> str:
    """Describe each set's speed-up over plain decoding at some `PRICES`, and tokens of a round."""
    prices = PRICES[name]
    booked: list[tuple[int, float]] = []
    found: list[str] = []
    end_round, observe_plain = SpecGate.end_round, SpecGate.observe_plain

    def book(
        self: SpecGate, emitted: int, drafted_ms: float, rows: int, *, networked: bool,
        read_ms: float = 0.0, text: TextLookupShare | None = None,
    ) -> None:  # fmt: skip
        host_ms = prices.host_ms * networked + prices.tree_ms * (rows > 1)
        looked_ms = 0.0 if text is None else text.looked_ms
        ms = drafted_ms + host_ms + read_ms + looked_ms + float(prices.verify[rows])
        booked.append((emitted, ms))
        end_round(self, emitted, drafted_ms, rows, networked=networked, read_ms=read_ms, text=text)

    def book_plain(self: SpecGate, foresight: TextDrafts) -> None:
        looked_ms = LOOKED_MS if foresight.looked_s else 0.0
        booked.append((1, looked_ms + PASSES["1"]))
        observe_plain(self, foresight)

    eagle.Costs = SimpleNamespace(of=lambda *_: prices)
    SpecGate.end_round, SpecGate.observe_plain = book, book_plain
    try:
        with LLM(folder, spec=methods.METHODS[method].spec) as llm:
            for questions in sets:  # acceptance rates learned on earlier sets stay
                booked.clear()
                answer(llm, questions)
                emitted, ms = (sum(values) for values in zip(*booked, strict=True))
                rate = emitted / ms * PASSES["1"]
                found.append(f"{rate:.3f} ({emitted / len(booked):.2f})")
    finally:
        eagle.Costs, SpecGate.end_round, SpecGate.observe_plain = Costs, end_round, observe_plain
    return "  ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--engine", choices=methods.ENGINES, default="int4")
    parser.add_argument("--methods", nargs="+", default=["plain", "eagle3", "eagle3+suffix"])
    parser.add_argument("--cpu", action="store_true", help="measure CPU time of the calling thread")
    parser.add_argument(
        "--priced", action="store_true", help="count `PRICES` instead of measured times"
    )
    arguments = parser.parse_args()
    if arguments.cpu:
        profile.time = SimpleNamespace(perf_counter=time.thread_time)
    folder = methods.engine(arguments.work, arguments.engine, methods.EAGLE3, arguments.threads)
    answer = partial(answered, tokens=arguments.tokens, temperature=arguments.temperature)
    sets = {name: prompts.load(name)[: arguments.prompts] for name in prompts.NAMES}
    for method in arguments.methods:
        if arguments.priced and method != "plain":
            for name in PRICES:
                found = priced(folder, method, [*sets.values()], answer, name)
                print(f"{method:14} {name:26} {found}", flush=True)
        elif not arguments.priced:
            with LLM(folder, spec=methods.METHODS[method].spec) as llm:
                for name, questions in sets.items():
                    print_stages(f"{method}, {name}", answer(llm, questions))


if __name__ == "__main__":
    main()
