"""Time of a forward pass by number of tokens in every precision: decoding, verification of trees.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/precisions.py

SmolLM2-135M-Instruct at a context of 512 tokens, alternating engines of quality.py's recipes, or
given ones (`--engine DIR DIR`). "v(M)" is the time of a forward pass of M tokens over that of one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np
from quality import RECIPES, open_engine

from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.scripts import smollm2

ROWS, CONTEXT, REPEATS = (1, 2, 4, 8, 16, 32, 64), 512, 8


def pass_ms(session: DecoderNetwork, rows: int) -> float:
    """Return the median milliseconds of forward passes after the context, which are truncated."""
    ids, logits = np.arange(rows) + 100, np.arange(rows)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        session.run(ids, CONTEXT, logits)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def prefill_ms(session: DecoderNetwork) -> float:
    """Return milliseconds of the prefill in chunks of 128 tokens."""
    start = time.perf_counter()
    for begin in range(0, CONTEXT, 128):
        session.run(np.arange(128) + begin, begin, np.array([127]))
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument(
        "--engine", type=Path, nargs="+", help="folders of engines, instead of recipes"
    )
    arguments = parser.parse_args()
    if arguments.engine:
        sessions = {
            at.name: open_decoder(at, load_engine(at, LLM_ENGINE)) for at in arguments.engine
        }
    else:
        sessions = {
            name: open_engine(arguments.work, name, arguments.threads) for name in arguments.recipes
        }
    costs: dict[str, list[list[float]]] = {name: [] for name in sessions}
    prefill: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(arguments.rounds):
        for name, session in sessions.items():
            prefill[name].append(prefill_ms(session))
            costs[name].append([pass_ms(session, rows) for rows in ROWS])
    heads = "".join(f"{f'v({rows})':>7}" for rows in ROWS[1:])
    print(f"{'precision':24} {'decode tok/s':>12} {'prefill tok/s':>13} {heads}")
    for name, rounds in costs.items():
        ratios = np.median([np.array(row) / row[0] for row in rounds], axis=0)
        step = statistics.median(row[0] for row in rounds)
        prompt = CONTEXT / statistics.median(prefill[name]) * 1e3
        shown = "".join(f"{ratio:7.2f}" for ratio in ratios[1:])
        print(f"{name:24} {1e3 / step:12.1f} {prompt:13.0f} {shown}")


if __name__ == "__main__":
    main()
