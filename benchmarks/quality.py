"""What each precision costs in quality: perplexity, KL and top-1 agreement on held-out text.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/quality.py

SmolLM2-135M-Instruct through `edgellm-quantize`, `edgellm-export` and `llm_build`, against
llama.cpp's Q4_0 and Q8_0 and onnxruntime-genai's default int4, all on the same windows of text
and all as engines run: with the kernels' own rounding of activations. Its weights were on a 4-bit
grid before anybody here touched them, and a model of 135 M parameters suffers more from rounding
than one of 8 B: compare rows, do not carry figures over to other models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import prompts
import weights
from tokenizers import Tokenizer

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.contract import EngineManifest, load_manifest
from edgellm.device_runtime import runners
from edgellm.device_runtime.session import Session
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint
from edgellm.tools import smollm2

Logits = Callable[[np.ndarray], np.ndarray]  # int64 [S] -> float32 [S, V]
PIECE = 64  # rows of a pass when prompts are read
# Name -> (quantize flags, llm_build --quantize)
RECIPES: dict[str, tuple[list[str], str]] = {
    "fp32": ([], "none"),
    "int8, rounded at build": ([], "int8"),
    "int4, rounded at build": ([], "int4"),
    "fp8": (["--quantization", "fp8"], "none"),
    "int8_sq": (["--quantization", "int8_sq"], "none"),
    "int4_awq": (["--quantization", "int4_awq"], "none"),
    "nvfp4": (["--quantization", "nvfp4"], "none"),
    "int4_awq, autoround": (["--quantization", "int4_awq", "--algo", "autoround"], "none"),
    "int4_awq, autoround, block 32": (
        ["--quantization", "int4_awq", "--algo", "autoround", "--block_size", "32"], "none"
    ),
    "nvfp4_awq": (["--quantization", "nvfp4_awq"], "none"),
    "int8_sq, int8 cache": (
        ["--quantization", "int8_sq", "--kv_cache_quantization", "int8"], "none"
    ),
}  # fmt: skip


def checkpoint(work: Path, name: str) -> Path:
    """SmolLM2 in that precision; made unless it is there."""
    flags, source = RECIPES[name][0], work / "fp32"
    if not source.exists():
        weights.float_checkpoint(str(smollm2.fetch()), source)
    if not flags:
        return source
    folder = work / f"quality-{_slug(name)}"
    if not folder.exists():
        command = [sys.executable, "-m", "edgellm.quantize", "llm", "--model_dir", str(source)]
        subprocess.run([*command, "--output_dir", str(folder), *flags], check=True)
    return folder


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def open_engine(work: Path, name: str, threads: int) -> Session:
    """An engine of ours in that precision; built unless it is there."""
    bundle, engine = (work / f"quality-{_slug(name)}-{kind}" for kind in ("bundle", "engine"))
    if not bundle.exists():
        source = open_checkpoint(str(checkpoint(work, name)))
        export_llm(source, bundle, ExportOptions("fp32"))
    if not engine.exists():
        plan = Plan(1024, 2048, threads, "auto", RECIPES[name][1])
        build_engine(bundle, engine, plan, "onnxruntime", lambda _: None)
    manifest = load_manifest(engine, EngineManifest)
    return runners.find(manifest.backend).open_session(engine, manifest)


def edgellm(work: Path, name: str, threads: int, *, single_rows: bool) -> Logits:
    """An engine of ours; `single_rows`: through the graph that decodes, one row at a time."""
    session = open_engine(work, name, threads)
    rows = 1 if single_rows else PIECE

    def logits(ids: np.ndarray) -> np.ndarray:
        pieces = []
        for begin in range(0, len(ids), rows):
            piece = ids[begin : begin + rows]
            pieces.append(session.run(piece, begin, np.arange(len(piece))).logits.copy())
        return np.concatenate(pieces)

    return logits


def llama_cpp(work: Path, kind: str, threads: int) -> Logits:
    """llama.cpp over its own re-quantization of the same weights."""
    import llama_cpp as api

    path = weights.gguf(smollm2.fetch(), work, kind, sys.executable)
    model = api.Llama(
        str(path), n_ctx=1024, n_batch=1024, n_threads=threads, verbose=False, logits_all=True
    )

    def logits(ids: np.ndarray) -> np.ndarray:
        model.reset()
        model.eval(ids.tolist())
        return np.array(model.scores[: len(ids)])

    return logits


def genai(work: Path, threads: int) -> Logits:
    """onnxruntime-genai's builder with its defaults for int4 on the CPU."""
    import onnxruntime_genai as og

    del threads
    folder = weights.genai(work / "fp32", work / "genai", sys.executable)
    model = og.Model(str(folder))

    def logits(ids: np.ndarray) -> np.ndarray:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + 1, do_sample=False)
        generator, rows = og.Generator(model, params), []
        for token_id in ids:
            generator.append_tokens(np.array([token_id], np.int32))
            rows.append(np.array(generator.get_logits()).reshape(-1))
        return np.stack(rows)

    return logits


class Score:
    """Sums over windows."""

    def __init__(self) -> None:
        self.loss = self.divergence = self.agreement = 0.0
        self.count = 0

    def add(self, found: np.ndarray, reference: np.ndarray, ids: np.ndarray) -> None:
        """Log-probabilities [S, V] of one window."""
        rows = np.arange(len(ids) - 1)
        self.loss -= float(found[rows, ids[1:]].sum())
        self.divergence += float((np.exp(reference) * (reference - found)).sum())
        self.agreement += float((found.argmax(-1) == reference.argmax(-1)).mean())
        self.count += 1

    def report(self, window: int) -> dict[str, float]:
        return {
            "perplexity": float(np.exp(self.loss / (self.count * (window - 1)))),
            "kl": self.divergence / (self.count * window),
            "top1": self.agreement / self.count,
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float32) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--no_peers", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    recipes = ["fp32", *(name for name in arguments.recipes if name != "fp32")]
    engines: dict[str, Logits] = {}
    for name in recipes:
        for single in (False, True):
            label = f"edgellm {name}" + (", decoding" if single else "")
            engines[label] = edgellm(arguments.work, name, arguments.threads, single_rows=single)
    if not arguments.no_peers:
        for kind in ("Q8_0", "Q4_0"):
            engines[f"llama.cpp {kind}"] = llama_cpp(arguments.work, kind, arguments.threads)
        engines["onnxruntime-genai int4"] = genai(arguments.work, arguments.threads)
    scores = measure(engines, arguments.work, arguments.windows, arguments.window)
    show(scores)
    if arguments.json:
        arguments.json.write_text(json.dumps(scores, indent=2) + "\n")


def measure(
    engines: dict[str, Logits], work: Path, windows: int, window: int
) -> dict[str, dict[str, float]]:
    tokenizer = Tokenizer.from_file(str(work / "fp32" / "tokenizer.json"))
    ids = np.array(tokenizer.encode(prompts.text()).ids, np.int64)
    scores = {name: Score() for name in engines}
    for index in range(min(windows, len(ids) // window)):
        part = ids[index * window : (index + 1) * window]
        reference = log_softmax(engines["edgellm fp32"](part))
        for name, engine in engines.items():
            scores[name].add(log_softmax(engine(part)), reference, part)
    return {name: score.report(window) for name, score in scores.items()}


def show(scores: dict[str, dict[str, float]]) -> None:
    floor = scores["edgellm fp32"]["perplexity"]
    print(f"{'engine':44} {'perplexity':>10} {'x fp32':>8} {'KL':>8} {'top-1':>7}")
    for name, score in scores.items():
        print(
            f"{name:44} {score['perplexity']:10.3f} {score['perplexity'] / floor:8.4f} "
            f"{score['kl']:8.4f} {score['top1']:7.1%}"
        )


if __name__ == "__main__":
    main()
