"""Generation with SmolLM2 in edgellm and its peers, without and with speculation.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/peers.py --prompts 10

Greedy decoding of the same prompts with the same weights and number of threads, batch 1. Weights
are 4-bit (blocks of 32) in edgellm, llama.cpp, onnxruntime-genai and OpenVINO GenAI, float32 in
transformers and edgellm. Libraries alternate. Tokens per second include the prefill, so that no
library decides what counts. Transformers runs without an assistant model: there is none with this
tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import methods
from harness import checkpoints, output_process, prompts
from harness.pass_process import Process

from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.scripts import smollm2


@dataclass
class Tally:
    """Outputs of a peer for one set of prompts."""

    rates: list[float] = field(default_factory=list)  # tokens/s, prompt by prompt
    tokens: int = 0
    ms: float = 0.0

    def add(self, ms: float, ids: list[int]) -> None:
        self.rates.append(len(ids) / ms * 1e3)
        self.tokens, self.ms = self.tokens + len(ids), self.ms + ms


def prepare(work: Path, python: str, threads: int) -> dict[str, tuple[str, Path]]:
    """Make missing models: label -> (name of `answerers.ANSWERERS`, path)."""
    work.mkdir(parents=True, exist_ok=True)
    int4, fp32 = (methods.engine(work, name, methods.EAGLE3, threads) for name in ("int4", "fp32"))
    gguf = checkpoints.gguf(smollm2.fetch(), work, "Q4_0", python)
    genai = checkpoints.genai(work / "fp32", work / "genai", python)
    paths = {"llama.cpp": gguf, "OpenVINO GenAI": gguf, "onnxruntime-genai": genai}
    paths |= {"transformers": work / "fp32"}
    peers = {}
    for name in output_process.ANSWERERS:
        library = name.partition(",")[0]
        if library == "edgellm":
            peers |= {f"{name}, int4": (name, int4), f"{name}, fp32": (name, fp32)}
        else:
            peers[name] = (name, paths[library])
    return peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompts", type=int, default=10, help="number of prompts of each set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sets", nargs="+", choices=prompts.NAMES, default=list(prompts.NAMES))
    parser.add_argument("--python", default=sys.executable, help="a python with the peers")
    parser.add_argument("--only", nargs="+", help="prefixes of the labels to run")
    arguments = parser.parse_args()
    peers = prepare(arguments.work, arguments.python, arguments.threads)
    if arguments.only:
        peers = {label: peers[label] for label in peers if label.startswith(tuple(arguments.only))}
    script = output_process.__file__
    running = {
        label: Process(arguments.python, name, path, arguments.threads, script)
        for label, (name, path) in peers.items()
    }
    tokenizer = ChatTokenizer(peers["edgellm, int4"][1])
    tables = {name: _measure(running, tokenizer, name, arguments) for name in arguments.sets}
    for process in running.values():
        process.close()
    _print(tables)


def _measure(
    running: dict[str, Process], tokenizer: ChatTokenizer, name: str, arguments: argparse.Namespace
) -> dict[str, Tally]:
    """Run every prompt with all peers in alternating order; the first one twice, to warm up."""
    tallies, labels = {label: Tally() for label in running}, list(running)
    questions = prompts.load(name)[: arguments.prompts]
    for index, question in enumerate([questions[0], *questions]):
        text = tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        turn = index % len(labels)
        for label in labels[turn:] + labels[:turn]:
            ms, found = running[label].ask(json.dumps([text, list(ids), arguments.tokens]))
            if index:
                tallies[label].add(ms, found)
    return tallies


def _print(tables: dict[str, dict[str, Tally]]) -> None:
    """Print tokens/s, and the median ratio of edgellm's plain int4 decoding to it."""
    print(f"{'':34}" + "".join(f"{name:>22}" for name in tables))
    for label in next(iter(tables.values())):
        cells = []
        for tallies in tables.values():
            tally, ours = tallies[label], tallies["edgellm, int4"]
            ratio = statistics.median(
                theirs / own for theirs, own in zip(tally.rates, ours.rates, strict=True)
            )
            cells.append(f"{tally.tokens / tally.ms * 1e3:9.1f} tok/s{ratio:5.2f} x")
        print(f"{label:34}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
