"""Time to the first token and to `--help` of a new process, and Python time of one step.

    pip install -e '.[dev]'
    python benchmarks/cold_start.py

The time to the first token is that of a whole `llm_inference` process with a 32-token prompt and
one generated token, with the INT4 engine of SmolLM2.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from harness import command
from harness.models import checkpoints, engines
from harness.results import Report

from edgellm.device_runtime.text.tokenizer import ChatTokenizer

COMMANDS = ("edgellm-export", "llm_build", "llm_inference")


def wall_s(*command: object, rounds: int) -> float:
    """Return the median seconds of a whole process, without the first run."""
    samples = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def first_token_s(engine: Path, rounds: int) -> float:
    """Return the median seconds of an `llm_inference` run that generates one token."""
    text = ChatTokenizer(engine)
    prompt = text.decode(
        text.encode("one two three four five six " * 9, add_special_tokens=False)[:32]
    )
    request = {"messages": [{"role": "user", "content": prompt}]}
    content = {
        "temperature": 0,
        "apply_chat_template": False,
        "max_generate_length": 1,
        "requests": [request],
    }
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.json", Path(folder) / "out.json"
        source.write_text(json.dumps(content))
        seconds = wall_s(
            _script("llm_inference"), "--engineDir", engine, "--inputFile", source,
            "--outputFile", output, rounds=rounds,
        )  # fmt: skip
        answer = json.loads(output.read_text())["responses"][0]
    assert (answer["prompt_token_count"], answer["generated_token_count"]) == (32, 1)
    return seconds


def python_time_per_step_ms(engine: Path) -> float:
    """Return the median milliseconds of a decode step outside ONNX Runtime's run call."""
    session = engines.open_engine(engine)
    inside: list[float] = []
    runner: Any = session._runner
    graph_of = runner._graph
    timed = functools.cache(lambda found: _Timed(found, inside))
    runner._graph = lambda inputs: timed(graph_of(inputs))
    session.run(np.arange(512), 0, np.array([511]))
    inside.clear()
    whole = []
    for position in range(512, 712):
        start = time.perf_counter()
        int(session.run(np.array([5]), position, np.array([0])).token_ids[0])
        whole.append(time.perf_counter() - start)
    return statistics.median(w - i for w, i in zip(whole, inside, strict=True)) * 1e3


class _Timed:
    """An ONNX Runtime session that records the seconds of its runs."""

    def __init__(self, session: ort.InferenceSession, seconds: list[float]) -> None:
        self._session, self._seconds = session, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: ort.IOBinding) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self._seconds.append(time.perf_counter() - start)


def _script(name: str) -> Path:
    return Path(sys.executable).parent / name


def show_cold_start(given: argparse.Namespace, report: Report) -> None:
    """Measure a new process."""
    if given.quick:
        checkpoint = engines.random_checkpoint(given.work, "small")
        plan = engines.plan_of(given.threads, "int4")
    else:
        checkpoint = checkpoints.smollm2_folder(given.work, "int4")
        plan = engines.plan_of(given.threads)
    engine = engines.plain_engine(checkpoint, f"int4-{given.threads}", plan)
    seconds = first_token_s(engine, given.rounds)
    rows = [["first token of a 32-token prompt, after process start", f"{seconds:.2f} s"]]
    for name in COMMANDS[-1:] if given.quick else COMMANDS:
        seconds = wall_s(_script(name), "--help", rounds=given.rounds)
        rows.append([f"`{name} --help`", f"{seconds:.2f} s"])
    ms = python_time_per_step_ms(engine)
    rows.append(["Python time of a decode step", f"{ms:.2f} ms"])
    report.add("cold-start", ("", ""), rows)


MODES = {"cold_start": show_cold_start}


def main() -> None:
    command.run(command.parser(__doc__, MODES, rounds=7), MODES)


if __name__ == "__main__":
    main()
