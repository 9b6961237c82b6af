"""Quality of each precision: KL divergence, perplexity, changed greedy outputs.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/quality.py quality --off_grid --windows 2 --draft
    python benchmarks/quality.py caches --window 2048 --windows 2

Perplexity, KL divergence, top-1 agreement and changed greedy outputs, measured as in the
quantizer's report (`quantize/metrics/divergence.py`); with `--draft` also acceptance lengths of the
draft of examples/. SmolLM2-135M-Instruct runs through `edgellm-quantize`, `edgellm-export` and
`llm_build`. It is compared with llama.cpp's formats, the same files in edgellm's engines, and
onnxruntime-genai's default int4. All run on the same windows of code, sums and prose, with the
kernels' own quantization of activations. Schemes for GPUs appear a second time, with inputs
quantized as on GPUs. Megabytes are those of a bundle (of the engine if the build quantizes), a GGUF
file or genai's model. The weights of the file are on a 4-bit grid (`--off_grid`:
`harness/models/off_grid.py`), and a model of 135 M parameters loses more by quantization than one
of 8 B: compare rows, but do not transfer figures to other models.

`caches` compares types of the KV cache under float32 weights with float16, in the same way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from harness import command, prompts
from harness.models import checkpoints, off_grid
from harness.models.engines import EAGLE3, open_engine, plain_engine, plan_of
from harness.models.quantized import (
    LLAMA_CPP,
    OFF_GRID,
    RECIPES,
    bundle_of,
    engine_of,
    engine_with_draft,
    gguf_of,
    quantized,
    quantized_draft,
)
from harness.results import Report
from harness.timing import folder_bytes
from speculation import METHODS
from tokenizers import Tokenizer

from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.export.checkpoints.checkpoint import Safetensors
from edgellm.quantize.evaluation.layer_errors import QuantizedLayer
from edgellm.quantize.formats.schemes import Recipe, choose_scheme
from edgellm.quantize.formats.tensors import read_below, read_tensor
from edgellm.quantize.metrics.divergence import (
    Changes,
    GreedyOutput,
    Quality,
    Score,
    count_changes,
)
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.models.lm_head import float_head
from edgellm.quantize.models.one_layer_model import quiet_transformers, run_layer
from edgellm.scripts import smollm2

Logits = Callable[[np.ndarray], np.ndarray]  # int64 [S] -> float32 [S, V]
Opens = Callable[[], tuple[int, Logits]]  # bytes of the model, and its logits
PIECE = 64  # tokens of a prefill chunk
SETS = ("humaneval", "gsm8k")  # prompts of greedy outputs
OF_GPUS = ("fp8", "nvfp4", "nvfp4_awq")  # GPUs also quantize inputs
TABLE = (
    "int8, rounded at build",
    "int8_sq",
    "fp8",
    *(f"mixed, {bits} bits" for bits in ("7", "5.7", "4.7")),
    "nvfp4",
    "nvfp4, gptq",
    "int4_awq, gptq, block 32",
)  # rows of docs/benchmarks.md
_GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    megabytes: float
    quality: Quality
    changes: Changes
    acceptance: float | None = None  # acceptance length of the draft of examples/


def edgellm(engine: Path) -> Logits:
    """Return the logits of an engine of edgellm."""
    session = open_engine(engine)

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

    path = gguf_of(work, kind)
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

    return folder_bytes(folder, "*.data"), logits


def as_on_gpus(source: Path, folder: Path, flags: Sequence[str]) -> Logits:
    """Return logits of a checkpoint whose linear layers have inputs quantized by their scheme.

    FP8 and INT8 have a calibrated scale, FP4 has dynamic E4M3 scales of blocks of 16;
    all else is in float32, in torch.

    Args:
        source: the float checkpoint.
        folder: the result of `edgellm-quantize`, with a float head.
        flags: of `edgellm-quantize`.
    """
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    scheme = choose_scheme(given["--quantization"], given.get("--algo"))
    quiet_transformers()
    subject = LanguageModel.open(str(source), ())
    recipe = Recipe(scheme=scheme, block_size=0, alpha_step=1.0)
    exported = Safetensors(sorted(folder.glob("*.safetensors")))
    layers = [_layer(subject, index, exported, recipe) for index in range(len(subject.layers))]
    norm = subject.norm_model(None, _CPU)
    head = float_head(read_tensor(subject.tensors, subject.head_name), _CPU, subject.finish)

    def logits(ids: np.ndarray) -> np.ndarray:
        states = next(subject.embedded(ids[None], 1))
        for layer in layers:
            states = layer(states)
        return head(run_layer(norm, states)[0]).numpy()

    return logits


def _layer(
    subject: LanguageModel, index: int, exported: Safetensors, recipe: Recipe
) -> QuantizedLayer:
    prefix, family = subject.layers[index], subject.family
    source = {name: tensor.floats() for name, tensor in subject.layer_source(index).items()}
    tensors = {
        family.canonical(name): tensor for name, tensor in read_below(exported, prefix).items()
    }
    return QuantizedLayer(
        name=prefix,
        source=source,
        exported=tensors,
        recipe=recipe,
        make_model=lambda values: subject.layer_model(index, values, _CPU),
        device=_CPU,
        family=family,
        head_dim=subject.config.head_dim,
    )


def show_quality(given: argparse.Namespace, report: Report) -> None:
    """Compare all precisions with the float model."""
    if given.off_grid:
        given.work /= "off-grid"
        given.work.mkdir(exist_ok=True)
        if not (given.work / OFF_GRID).exists():
            off_grid.write(smollm2.fetch(), given.work / OFF_GRID)
    sets = (prompts.OWN,) if given.quick else SETS
    windows = _windows(given)
    asked = ask(engine_of(given.work, "fp32", given.threads), sets, given.answers, given.tokens)
    references: list[np.ndarray] = []
    rows: dict[str, Row] = {}
    for name, opened in _engines(given):
        print(name, file=sys.stderr, flush=True)
        size, engine = opened()
        quality = measure(engine, windows, references)
        rows[name] = Row(size / 1e6, quality, changes(engine, asked))
        del engine
    for name in ("fp32", *given.recipes) if given.draft else ():
        length = acceptance_length(given, name, sets)
        rows[f"edgellm {name}"] = replace(rows[f"edgellm {name}"], acceptance=length)
    report.add("quality", *_table(rows, is_drafted=given.draft))


def _table(rows: dict[str, Row], *, is_drafted: bool) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, the largest model first."""
    kinds = list(next(iter(rows.values())).quality.kinds)
    heads = ["", "MB", "perplexity", "KL", *(f"KL {kind}" for kind in kinds), "top-1"]
    heads += ["changed outputs", "equal tokens"]
    found = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1].megabytes):
        quality, changed = row.quality, row.changes
        found.append([
            name.removeprefix("edgellm "),
            f"{row.megabytes:.1f}",
            f"{quality.perplexity_quantized / quality.perplexity_float:.3f}",
            *(f"{each.kl_divergence:.4f}" for each in (quality, *quality.kinds.values())),
            f"{quality.top1_agreement * 100:.1f} %",
            f"{changed.changed} of {changed.answers}",
            f"{changed.kept:.0f}",
        ])  # fmt: skip
        if is_drafted:
            found[-1].append("" if row.acceptance is None else f"{row.acceptance:.2f}")
    return [*heads, *["acceptance length"] * is_drafted], found


def _engines(given: argparse.Namespace) -> Iterator[tuple[str, Opens]]:
    """Yield names and openers of engines; the first is the reference."""
    work, threads = given.work, given.threads
    for name in ("fp32", *(name for name in given.recipes if name != "fp32")):
        yield f"edgellm {name}", lambda name=name: _opened(work, name, threads)
        if any(precision in RECIPES[name][0] for precision in OF_GPUS):
            yield f"GPUs, {name}", lambda name=name: _simulated(work, name)
    has_llama = bool(given.gguf) and command.has_package("llama_cpp")
    for kind in given.gguf if has_llama else ():
        yield f"llama.cpp {kind}", lambda kind=kind: llama_cpp(work, kind, threads)
    if given.gguf and command.has_package("onnxruntime_genai"):
        yield "onnxruntime-genai int4", lambda: genai(work)
    for kind in given.gguf if has_llama else ():
        yield f"edgellm, {kind}.gguf", lambda kind=kind: _opened(work, kind, threads)


def _opened(work: Path, name: str, threads: int) -> tuple[int, Logits]:
    engine = engine_of(work, name, threads)
    if RECIPES.get(name, ([], "none"))[1] != "none":
        return folder_bytes(engine, "*.data"), edgellm(engine)
    return folder_bytes(bundle_of(work, name), "*.weights"), edgellm(engine)


def _simulated(work: Path, name: str) -> tuple[int, Logits]:
    logits = as_on_gpus(work / "fp32", quantized(work, name), RECIPES[name][0])
    return folder_bytes(bundle_of(work, name), "*.weights"), logits


def _windows(given: argparse.Namespace) -> list[tuple[str, np.ndarray]]:
    """Return token ids [length] with the kind of their text."""
    folder, length = quantized(given.work, "fp32"), given.window
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for kind, text in prompts.kinds(quick=given.quick).items():
        ids = np.array(tokenizer.encode(text).ids, np.int64)
        fit = min(given.windows, len(ids) // length)
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


def ask(engine: Path, sets: Sequence[str], count: int, tokens: int) -> list[GreedyOutput]:
    """Return an engine's greedy outputs for the first prompts of every set."""
    with LLM(engine) as model:
        return [
            GreedyOutput(name, tuple(answer.prompt.token_ids), tuple(answer.token_ids))
            for name in sets
            for question in prompts.load(name)[:count]
            for answer in [_answer(model, question, tokens)]
        ]


def changes(logits: Logits, asked: Sequence[GreedyOutput]) -> Changes:
    """Count the outputs that a model changes."""
    found = [logits(np.array(each.input_ids, np.int64))[each.start :].argmax(-1) for each in asked]
    return count_changes(asked, found)


def acceptance_length(given: argparse.Namespace, name: str, sets: Sequence[str]) -> float:
    """Return the acceptance length over outputs of every set, with fixed trees of 16 nodes."""
    draft = quantized_draft(given.work, EAGLE3, "float")
    engine = engine_with_draft(given.work, name, given.threads, draft)
    rounds = []
    with LLM(engine, spec=METHODS["eagle3-fixed"].spec) as model:
        for questions in sets:
            for question in prompts.load(questions)[: max(1, given.answers // 4)]:
                rounds += _answer(model, question, given.tokens).profile.rounds
    return sum(one.emitted for one in rounds) / len(rounds)


def _answer(model: LLM, question: str, tokens: int) -> RequestOutput:
    message = {"role": "user", "content": question}
    answer = model.generate([message], sampling=_GREEDY, max_generate_length=tokens)
    for _ in answer:
        pass
    return answer


def show_caches(given: argparse.Namespace, report: Report) -> None:
    """Compare types of the KV cache with float16."""
    windows = _windows(given)
    references: list[np.ndarray] = []
    rows = []
    for cache in ("float16", "bfloat16", "int4"):
        plan = plan_of(given.threads, "none", "edgellm", kv_capacity=given.window + PIECE)
        name = f"fp32-{cache}-{given.threads}-{given.window}"
        folder = checkpoints.smollm2_folder(given.work, "fp32")
        engine = plain_engine(folder, name, replace(plan, kv_cache=cache))
        quality = measure(edgellm(engine), windows, references)
        kinds = quality.kinds.values()
        ratios = [each.perplexity_quantized / each.perplexity_float for each in (quality, *kinds)]
        agreement = f"{quality.top1_agreement * 100:.1f} %"
        shown = *(f"{ratio:.4f}" for ratio in ratios), f"{quality.kl_divergence:.4f}", agreement
        rows.append([cache, str(given.window), *shown])
    heads = ["KV cache", "tokens of a window", "perplexity", *quality.kinds, "KL", "top-1"]
    report.add("quality-caches", heads, rows)


MODES = {"quality": show_quality, "caches": show_caches}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=1)
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
    quick = {"windows": 1, "window": 32, "answers": 1, "tokens": 8, "gguf": []}
    command.run(parser, MODES, {**quick, "recipes": ["int4, rounded at build"]})


if __name__ == "__main__":
    main()
