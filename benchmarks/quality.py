"""Quality of each precision, as the table of docs/benchmarks.md.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/quality.py --off_grid --windows 2 --draft

Perplexity, KL divergence, top-1 agreement and changed greedy outputs, measured as in the
quantizer's report (`quantize/metrics/divergence.py`); with `--draft` also acceptance lengths of the
draft of examples/. SmolLM2-135M-Instruct runs through `edgellm-quantize`, `edgellm-export` and
`llm_build`. It is compared with llama.cpp's formats, the same files in edgellm's engines, and
onnxruntime-genai's default int4. All run on the same windows of code, sums and prose, with the
kernels' own quantization of activations. Schemes for GPUs appear a second time, with inputs
quantized as on GPUs (`simulated.py`). Megabytes are those of a bundle (of the engine if the build
quantizes), a GGUF file or genai's model. With `--max_kl` the command fails (exit code 2) if an
engine of edgellm exceeds it. The weights of the file are on a 4-bit grid (`--off_grid`:
`off_grid.py`), and a model of 135 M parameters loses more by quantization than one of 8 B: compare
rows, but do not transfer figures to other models.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import greedy_answers
import numpy as np
import torch
from harness import checkpoints, off_grid, prompts
from quality_table import Row, keep_rows, read_rows, table
from simulated import simulated
from tokenizers import Tokenizer

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.quantize.metrics.divergence import Quality, Score
from edgellm.scripts import smollm2

Logits = Callable[[np.ndarray], np.ndarray]  # int64 [S] -> float32 [S, V]
Opens = Callable[[], tuple[int, Logits]]  # bytes of the model, and its logits
_SETTINGS = ("off_grid", "windows", "window", "answers", "tokens")
PIECE = 64  # tokens of a prefill chunk
LLAMA_CPP = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0")
OF_GPUS = ("fp8", "nvfp4", "nvfp4_awq")  # GPUs also quantize inputs
TIED = ("--lm_head_quantization", "int8_tied")  # close to llama.cpp's files
OFF_GRID = "off-grid.gguf"
# Name -> (quantize flags, llm_build --quantize)
RECIPES: dict[str, tuple[list[str], str]] = {
    "fp32": ([], "none"),
    "int8, rounded at build": ([], "int8"),
    "int4, rounded at build": ([], "int4"),
    "fp8": (["--quantization", "fp8"], "none"),
    "int8_sq": (["--quantization", "int8_sq"], "none"),
    "int8_sq, 8 rows": (["--quantization", "int8_sq", "--num_samples", "8"], "none"),
    "int4_awq": (["--quantization", "int4_awq"], "none"),
    "int4_awq, block 32": (
        ["--quantization", "int4_awq", "--block_size", "32", *TIED],
        "none",
    ),
    "int4_awq, gptq, block 32": (
        ["--quantization", "int4_awq", "--algo", "gptq", "--block_size", "32", *TIED],
        "none",
    ),
    "fp8, gptq": (["--quantization", "fp8", "--algo", "gptq"], "none"),
    "nvfp4": (["--quantization", "nvfp4"], "none"),
    "nvfp4, gptq": (["--quantization", "nvfp4", "--algo", "gptq"], "none"),
    "int4_awq, autoround": (["--quantization", "int4_awq", "--algo", "autoround"], "none"),
    "int4_awq, autoround, block 32": (
        ["--quantization", "int4_awq", "--algo", "autoround", "--block_size", "32"],
        "none",
    ),
    **{
        f"mixed, {bits} bits": (["--quantization", "mixed", "--target_bits", bits, *TIED], "none")
        for bits in ("4.7", "5.2", "5.7", "6.2", "7", "8")
    },
    "nvfp4_awq": (["--quantization", "nvfp4_awq"], "none"),
    "int8_sq, int8 cache": (
        ["--quantization", "int8_sq", "--kv_cache_quantization", "int8"],
        "none",
    ),
}


TABLE = (
    "int8, rounded at build",
    "int8_sq",
    "int8_sq, 8 rows",
    "fp8",
    "fp8, gptq",
    "mixed, 8 bits",
    "mixed, 7 bits",
    "mixed, 6.2 bits",
    "mixed, 5.7 bits",
    "mixed, 5.2 bits",
    "mixed, 4.7 bits",
    "nvfp4",
    "nvfp4, gptq",
    "int4_awq, gptq, block 32",
)  # rows of docs/benchmarks.md


def checkpoint(work: Path, name: str) -> Path:
    """Return SmolLM2 in that precision; quantize it if missing."""
    flags, source = RECIPES[name][0], work / "fp32"
    if not source.exists():
        checkpoints.float_checkpoint(str(_source(work)), source)
    if not flags:
        return source
    folder = work / f"quality-{_slug(name)}"
    if not folder.exists():
        command = [sys.executable, "-m", "edgellm.quantize", "llm", "--model_dir", str(source)]
        subprocess.run([*command, "--output_dir", str(folder), *flags], check=True)
    return folder


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _bundle(work: Path, name: str) -> Path:
    """Return the bundle of a recipe, or of llama.cpp's file of that name."""
    bundle = work / f"quality-{_slug(name)}-bundle"
    if not bundle.exists():
        source = _gguf(work, name) if name in LLAMA_CPP else checkpoint(work, name)
        is_float = RECIPES.get(name, (["of llama.cpp"], ""))[0] == []
        options = ExportOptions("fp32" if is_float else "fp16")
        export_llm(open_checkpoint(str(source)), bundle, options)
    return bundle


def _gguf(work: Path, kind: str) -> Path:
    return checkpoints.gguf(_source(work), work, kind, sys.executable, mixed=True)


def _source(work: Path) -> Path:
    """Return the float checkpoint of all recipes."""
    changed = work / OFF_GRID
    return changed if changed.exists() else smollm2.fetch()


def engine_folder(work: Path, name: str, threads: int) -> Path:
    """Return edgellm's engine in that precision; build it if missing."""
    engine = work / f"quality-{_slug(name)}-engine"
    if not engine.exists():
        plan = Plan(1024, 2048, threads, "auto", RECIPES.get(name, ([], "auto"))[1])
        build_engine("llm", _bundle(work, name), engine, plan, "onnxruntime", lambda _: None)
    return engine


def open_engine(work: Path, name: str, threads: int) -> DecoderNetwork:
    """Open the engine of `engine_folder`."""
    folder = engine_folder(work, name, threads)
    return open_decoder(folder, load_engine(folder, LLM_ENGINE))


def edgellm(work: Path, name: str, threads: int) -> Logits:
    """Return the logits of edgellm's engine."""
    session = open_engine(work, name, threads)

    def logits(ids: np.ndarray) -> np.ndarray:
        pieces = []
        for begin in range(0, len(ids), PIECE):
            piece = ids[begin : begin + PIECE]
            pieces.append(session.run(piece, begin, np.arange(len(piece))).logits.copy())
        return np.concatenate(pieces)

    return logits


def llama_cpp(work: Path, kind: str, threads: int) -> tuple[int, Logits]:
    """Return llama.cpp's logits with its own quantization of the same weights."""
    import llama_cpp as api

    path = _gguf(work, kind)
    model = api.Llama(
        str(path), n_ctx=1024, n_batch=1024, n_threads=threads, verbose=False, logits_all=True
    )

    def logits(ids: np.ndarray) -> np.ndarray:
        model.reset()
        model.eval(ids.tolist())
        return np.array(model.scores[: len(ids)])

    return path.stat().st_size, logits


def genai(work: Path) -> tuple[int, Logits]:
    """Return onnxruntime-genai's logits with its default int4 on the CPU."""
    import onnxruntime_genai as og

    folder = checkpoints.genai(work / "fp32", work / "genai", sys.executable)
    model = og.Model(str(folder))

    def logits(ids: np.ndarray) -> np.ndarray:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + 1, do_sample=False)
        generator, rows = og.Generator(model, params), []
        for token_id in ids:
            generator.append_tokens(np.array([token_id], np.int32))
            rows.append(np.array(generator.get_logits()).reshape(-1))
        return np.stack(rows)

    return _bytes(folder, "*.data"), logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--windows", type=int, default=5, help="windows of each kind of text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--answers", type=int, default=20, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an output")
    parser.add_argument("--draft", action="store_true", help="measure acceptance lengths too")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(TABLE))
    parser.add_argument("--gguf", nargs="*", default=list(LLAMA_CPP), help="formats of llama.cpp")
    parser.add_argument(
        "--off_grid", action="store_true", help="equivalent weights off the 4-bit grid"
    )
    parser.add_argument("--no_peers", action="store_true")
    parser.add_argument("--max_kl", type=float, default=float("inf"))
    parser.add_argument(
        "--json", type=Path, help="file of rows; existing ones are not measured again"
    )
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.off_grid:
        arguments.work /= "off-grid"
        arguments.work.mkdir(exist_ok=True)
        if not (arguments.work / OFF_GRID).exists():
            off_grid.write(smollm2.fetch(), arguments.work / OFF_GRID)
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    rows = read_rows(arguments.json, settings)
    windows = _windows(arguments.work, arguments.windows, arguments.window)
    floats = engine_folder(arguments.work, "fp32", arguments.threads)
    asked = greedy_answers.ask(floats, arguments.answers, arguments.tokens)
    references: list[np.ndarray] = []
    for name, opened in _engines(arguments):
        if name in rows and references:
            continue
        print(name, file=sys.stderr, flush=True)
        size, engine = opened()
        quality = measure(engine, windows, references)
        rows[name] = Row(size / 1e6, quality, greedy_answers.changes(engine, asked))
        del engine
        keep_rows(arguments.json, settings, rows)
    if arguments.draft:
        for name, length in _acceptance(arguments, rows):
            rows[name] = replace(rows[name], acceptance=length)
            keep_rows(arguments.json, settings, rows)
    print("\n".join(table(rows)))
    _refuse_far(rows, arguments.max_kl)


def _acceptance(arguments: argparse.Namespace, rows: dict[str, Row]) -> Iterator[tuple[str, float]]:
    """Names of our rows that lack a length, and the length with each."""
    work = arguments.work
    with tempfile.TemporaryDirectory(dir=work) as place:
        draft = greedy_answers.draft_bundle(work / "fp32", Path(place) / "draft")
        for name in ("fp32", *arguments.recipes):
            if rows[label := f"edgellm {name}"].acceptance is not None:
                continue
            folder = Path(place) / "base"
            folder.mkdir()
            count = max(1, arguments.answers // 4)
            length = greedy_answers.acceptance_length(
                checkpoint(work, name), draft, folder, RECIPES[name][1], arguments.threads, count
            )
            shutil.rmtree(folder)
            yield label, length


def _engines(arguments: argparse.Namespace) -> Iterator[tuple[str, Opens]]:
    """Return names and openers of engines; the first is the reference."""
    work, threads = arguments.work, arguments.threads
    for name in ("fp32", *(name for name in arguments.recipes if name != "fp32")):
        yield f"edgellm {name}", lambda name=name: _opened(work, name, threads)
        if any(precision in RECIPES[name][0] for precision in OF_GPUS):
            yield f"GPUs, {name}", lambda name=name: _simulated(work, name)
    for kind in () if arguments.no_peers else arguments.gguf:
        yield f"llama.cpp {kind}", lambda kind=kind: llama_cpp(work, kind, threads)
    if importlib.util.find_spec("onnxruntime_genai") is None:
        print("onnxruntime-genai is not installed: left out", file=sys.stderr)
    elif not arguments.no_peers:
        yield "onnxruntime-genai int4", lambda: genai(work)
    for kind in arguments.gguf:
        yield f"edgellm, {kind}.gguf", lambda kind=kind: _opened(work, kind, threads)


def _opened(work: Path, name: str, threads: int) -> tuple[int, Logits]:
    logits = edgellm(work, name, threads)
    if RECIPES.get(name, ([], "none"))[1] != "none":
        return _bytes(work / f"quality-{_slug(name)}-engine", "*.data"), logits
    return _bytes(_bundle(work, name), "*.weights"), logits


def _simulated(work: Path, name: str) -> tuple[int, Logits]:
    logits = simulated(work / "fp32", checkpoint(work, name), RECIPES[name][0])
    return _bytes(_bundle(work, name), "*.weights"), logits


def _bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def _windows(work: Path, count: int, length: int) -> list[tuple[str, np.ndarray]]:
    """Return token ids [length] with the kind of their text."""
    checkpoint(work, "fp32")
    tokenizer = Tokenizer.from_file(str(work / "fp32" / "tokenizer.json"))
    found = []
    for kind, text in prompts.kinds().items():
        ids = np.array(tokenizer.encode(text).ids, np.int64)
        fit = min(count, len(ids) // length)
        found += [(kind, ids[at * length : (at + 1) * length]) for at in range(fit)]
    return found


def measure(
    engine: Logits, windows: list[tuple[str, np.ndarray]], references: list[np.ndarray]
) -> Quality:
    """Measure all engines against the first, whose logits are the reference."""
    names = list(dict.fromkeys(kind for kind, _ in windows))
    score = Score(names)
    for index, (kind, ids) in enumerate(windows):
        found = np.asarray(engine(ids), np.float32)
        if len(references) <= index:
            references.append(found)
        following = torch.from_numpy(np.append(ids[1:], -1))
        floats, rounded = torch.from_numpy(references[index]), torch.from_numpy(found)
        score.add(floats, rounded, following, np.full(len(ids), names.index(kind)))
    return score.quality()


def _refuse_far(rows: dict[str, Row], max_kl: float) -> None:
    far = [
        f"{name} ({row.quality.kl_divergence:.4f})"
        for name, row in rows.items()
        if name.startswith("edgellm") and not row.quality.kl_divergence <= max_kl
    ]
    if far:
        print(f"error: a KL divergence above --max_kl {max_kl}: {', '.join(far)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
