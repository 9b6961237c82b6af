"""Time to the first token and to `--help` of a new process, and Python time of one step.

    pip install -e '.[dev]'
    python benchmarks/cold_start.py

The time to the first token is that of a whole `llm_inference` process with a 32-token prompt and
one generated token, with the INT4 engine of SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from harness import checkpoints

from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.scripts import smollm2

COMMANDS = ("edgellm-export", "llm_build", "llm_inference")


def engine_folder(work: Path) -> Path:
    """Return an INT4 engine; build it if missing."""
    from edgellm.build.engine import build_engine
    from edgellm.build.plan import Plan
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.resolve import open_checkpoint

    engine = work / "cold-start-engine"
    if not engine.exists():
        with tempfile.TemporaryDirectory(dir=work) as folder:
            checkpoint, bundle = Path(folder) / "int4", Path(folder) / "bundle"
            checkpoints.round_checkpoint(str(smollm2.fetch()), checkpoint, 32)
            export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype="fp32"))
            build_engine(
                "llm",
                bundle,
                engine,
                Plan(max_input_len=1024, kv_capacity=2048, threads=0, prefill="auto"),
                "auto",
                lambda _: None,
            )
    return engine


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
    manifest = load_engine(engine, LLM_ENGINE)
    session = open_decoder(engine, manifest)
    session.run(np.arange(512), 0, np.array([511]))
    session.run(np.array([5]), 512, np.array([0]))
    inside: list[float] = []
    for bound in session._runner._bound.values():
        bound._session = _Timed(bound._session, inside)
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

    def run_with_iobinding(self, binding: ort.IOBinding) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self._seconds.append(time.perf_counter() - start)


def _script(name: str) -> Path:
    return Path(sys.executable).parent / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    engine = engine_folder(arguments.work)
    print(f"{os.cpu_count()} cores")
    print(f"first token, 32-token prompt: {first_token_s(engine, arguments.rounds):.2f} s")
    for name in COMMANDS:
        seconds = wall_s(_script(name), "--help", rounds=arguments.rounds)
        print(f"{name} --help: {seconds:.2f} s")
    print(f"Python time per decode step: {python_time_per_step_ms(engine):.3f} ms")


if __name__ == "__main__":
    main()
