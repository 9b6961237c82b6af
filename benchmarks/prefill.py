"""Time of forward passes by their tokens, and after long contexts.

    pip install -e '.[dev]'
    python benchmarks/prefill.py tokens             # SmolLM2 in float32, int8 and int4
    python benchmarks/prefill.py tokens --engine DIR DIR
    python benchmarks/prefill.py context --threads 1
    python benchmarks/prefill.py context --shape qwen2.5-0.5b --contexts 16384 --caches int8 int4

v(M) is the time of a forward pass of M tokens over that of one, after 512 tokens: it decides which
token trees pay. `context` compares types of the KV cache. Engines alternate. With one thread, times
are processor time, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from harness import command
from harness.models import engines, random_weights
from harness.models.checkpoints import smollm2_folder, with_cache_scales
from harness.results import Report
from harness.timing import alternating, clock_of, elapsed_ms, speedup

from edgellm.device_runtime.networks.decoder import DecoderNetwork

TOKENS, CONTEXT, CHUNK, REPEATS = (1, 2, 4, 8, 16, 32, 64), 512, 128, 8
CONTEXTS, CACHES = (100, 1000, 3500), ("float", "float16")
CAPACITY = 4096


def show_tokens(given: argparse.Namespace, report: Report) -> None:
    """Measure v(M)."""
    context = (given.contexts or [CONTEXT])[0]
    if given.engine:
        folders = {path.name: path for path in given.engine}
    elif given.quick:
        checkpoint = engines.random_checkpoint(given.work, "small")
        plan = engines.plan_of(given.threads, "int4")
        folders = {"small": engines.plain_engine(checkpoint, f"int4-{given.threads}", plan)}
    else:
        folders = {
            f"SmolLM2 {name}": engines.smollm2_engine(given.work, name, given.threads)
            for name in engines.PRECISIONS
        }
    opened = {name: engines.open_engine(path) for name, path in folders.items()}
    clock = clock_of(given.threads)
    prefill = alternating(
        {name: partial(prefill_ms, each, context, clock) for name, each in opened.items()},
        given.rounds,
    )
    passes: dict[int, dict[str, list[float]]] = {}
    for count in TOKENS:
        calls = {
            name: partial(pass_ms, each, count, context, clock) for name, each in opened.items()
        }
        passes[count] = alternating(calls, given.rounds)
    rows = []
    for name in opened:
        step = statistics.median(passes[1][name])
        rate = context / statistics.median(prefill[name]) * 1e3
        speeds = [f"{1e3 / step:.1f}", f"{rate:.0f}"]
        ratios = [speedup(passes[1][name], passes[count][name]) for count in TOKENS[1:]]
        rows.append([name, *speeds, *(f"{ratio:.2f}" for ratio in ratios)])
    heads = [f"v({count})" for count in TOKENS[1:]]
    report.add("pass-tokens", ("engine", "decode tokens/s", "prefill tokens/s", *heads), rows)


def pass_ms(session: DecoderNetwork, count: int, context: int, clock: Callable[[], float]) -> float:
    """Return the median milliseconds of forward passes of `count` tokens after a context."""
    ids, logits = np.arange(count) + 100, np.arange(count)
    return statistics.median(
        elapsed_ms(lambda: session.run(ids, context, logits), clock) for _ in range(REPEATS)
    )


def prefill_ms(session: DecoderNetwork, tokens: int, clock: Callable[[], float]) -> float:
    """Return the milliseconds of a prefill in chunks."""

    def run() -> None:
        for begin in range(0, tokens, CHUNK):
            session.run(np.arange(CHUNK) % 1000 + begin % 1000, begin, np.array([CHUNK - 1]))

    return elapsed_ms(run, clock)


def show_context(given: argparse.Namespace, report: Report) -> None:
    """Measure a token after contexts of several lengths, by the type of the KV cache."""
    rows, clock = [], clock_of(given.threads)
    contexts = given.contexts or CONTEXTS
    contexts = contexts[:1] if given.quick else contexts
    capacity = max(CAPACITY, CHUNK + max(contexts))
    shape = "small" if given.quick else given.shape
    for precision in ("int4",) if shape else ("int4", "int8"):
        if shape:
            checkpoint = engines.random_checkpoint(given.work, shape)
        else:
            checkpoint = smollm2_folder(given.work, engines.PRECISIONS[precision][0])
        opened = {}
        for cache in given.caches:
            plan = engines.plan_of(given.threads, "int4" if shape else "auto", "edgellm")
            plan = replace(plan, kv_cache=cache, kv_capacity=capacity)
            if precision == "int8":
                plan = replace(plan, quantize="int8")
            of_capacity = "" if capacity == CAPACITY else f"-{capacity}"
            name = f"{precision}-{cache}-{given.threads}{of_capacity}"
            source = with_cache_scales(checkpoint) if cache == "int8" else checkpoint
            opened[cache] = engines.open_engine(engines.plain_engine(source, name, plan))
        for context in contexts:
            length = -(-context // CHUNK) * CHUNK
            read = [length / prefill_ms(each, length, clock) * 1e3 for each in opened.values()]
            calls = {
                name: partial(pass_ms, each, 1, context, clock) for name, each in opened.items()
            }
            times = alternating(calls, given.rounds)
            row = [f"{statistics.median(ms):.2f}" for ms in times.values()]
            row += [f"{rate:.0f}" for rate in read]
            rows.append([precision, str(context), *row])
    names = ["float32" if cache == "float" else cache for cache in given.caches]
    columns = ["engine", "cached positions", *(f"{name}, ms" for name in names)]
    columns += [f"prefill with {names[0]}, tokens/s", *(f"with {name}" for name in names[1:])]
    report.add("context-cache", columns, rows)


MODES = {"tokens": show_tokens, "context": show_context}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=5)
    parser.add_argument("--engine", type=Path, nargs="+", help="engines of `tokens`")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        help=f"cached positions; default: {CONTEXTS} in `context`, {CONTEXT} in `tokens`, which "
        "takes the first",
    )
    parser.add_argument(
        "--shape",
        choices=random_weights.SHAPES,
        help="random weights of this shape in `context`; default: SmolLM2",
    )
    parser.add_argument(
        "--caches", nargs="+", default=CACHES, help="types of the KV cache of `context`"
    )
    command.run(parser, MODES)


if __name__ == "__main__":
    main()
