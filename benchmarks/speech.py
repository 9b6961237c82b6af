"""Speech to text with Whisper tiny.en in edgellm, faster-whisper and whisper.cpp.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    pip install --no-deps silero-vad
    python benchmarks/speech.py --rounds 5

One minute of English speech by eSpeak NG, and the same weights in every library: greedy decoding
with timestamps, batch 1, the same number of threads. Libraries alternate, each in its own process;
reading the file and loading are not timed. The word error rate is against the text that was spoken,
without case and punctuation. Memory is the most that the process had resident.

`live` gives three sentences to a transcript in chunks of 0.1 s, in real time. Times are from the
first loud sample until the first words, and from the last loud sample until the end of the text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import command
from harness.models import whisper_ggml
from harness.models.engines import silent
from harness.processes import speech_process
from harness.processes.pass_process import Process
from harness.results import Report
from harness.timing import alternating, speedup

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.multimodal.audio import SAMPLE_RATE, read_audio
from edgellm.scripts.whisper_tiny import fetch

TEXT = """
The old lighthouse stood at the end of a narrow road. Every evening the keeper climbed two hundred
steps to light the lamp. He carried a bag of tools, a bottle of water and a small radio. From the
top he could see the harbor, the market and the green hills behind the town. Ships came from many
countries, and their captains knew the light well. One winter night the wind was so strong that the
windows began to shake. The keeper called his daughter and asked her to bring more oil. She walked
through the rain with a lantern in her hand. Together they kept the lamp burning until the morning.
When the storm was over, seven boats lay safely in the bay. The sailors brought bread, fruit and
fresh fish to thank them. Since that day the people of the town celebrate the first of December.
They sing songs, tell stories and light a candle in every window. Children learn how a simple light
can save many lives.
"""
PRECISIONS = ("none", "int8", "int4")
LIVE_SENTENCES = 3
CHUNK = SAMPLE_RATE // 10
LOUD = 0.02  # of a sample of speech, from 0 to 1


def show_speech(given: argparse.Namespace, report: Report) -> None:
    """Measure seconds of a minute of speech."""
    samples = _spoken(given.work / "speech.npy", TEXT)
    ours = {f"edgellm {_name(each)}": ("edgellm", _engine(given, each)) for each in PRECISIONS}
    models = ours if given.quick else {**ours, **_peers(given)}
    running = {
        label: Process(
            sys.executable if label in ours else given.peers_python,
            name,
            path,
            given.threads,
            speech_process.__file__,
        )
        for label, (name, path) in models.items()
    }
    replies = {label: process.ask(str(samples)) for label, process in running.items()}  # warms up

    def ms(label: str) -> float:
        replies[label] = running[label].ask(str(samples))
        return replies[label][0]

    times = alternating({label: lambda label=label: ms(label) for label in running}, given.rounds)
    for process in running.values():
        process.close()
    seconds = len(np.load(samples, mmap_mode="r")) / SAMPLE_RATE
    peers = [label for label in models if label not in ours]
    best = min(peers, key=lambda label: statistics.median(times[label]), default=None)
    rows = []
    for label, found in times.items():
        taken = statistics.median(found) / 1e3
        ratio = "" if best is None else f"{speedup(found, times[best]):.2f} x"
        _, memory, text = replies[label]
        speed, errors = f"{seconds / taken:.0f} x", _word_errors(text, TEXT)
        rows.append([label, f"{taken:.2f}", speed, ratio, f"{memory / 1e6:.0f}", errors])
    columns = ("library", "s", "of real time", "of the best peer", "memory, MB", "word errors")
    report.add("speech", columns, rows)


def show_live(given: argparse.Namespace, report: Report) -> None:
    """Measure when words come while speech is recorded in real time."""
    if not command.has_package("silero_vad"):
        return
    text = ".".join(TEXT.split(".")[:LIVE_SENTENCES])
    speech = np.load(_spoken(given.work / "live.npy", text))
    pause = 0.001 * np.random.default_rng(0).standard_normal(SAMPLE_RATE).astype(np.float32)
    samples = np.concatenate([pause, speech, pause])
    begin_s, *_, end_s = np.flatnonzero(np.abs(samples) > LOUD) / SAMPLE_RATE
    rows = []
    for quantize in PRECISIONS:
        with Transcriber(_engine(given, quantize)) as model:
            model.transcribe(speech).whole()  # warms up
            for way in ("words", "lines"):
                runs = [_live(model, samples, way) for _ in range(given.rounds)]
                first, last = (statistics.median(each[at] for each in runs) for at in (0, 1))
                figures = f"{first - begin_s:.2f}", f"{last - end_s:.2f}"
                errors = _word_errors(runs[0][2], text)
                rows.append([f"edgellm {_name(quantize)}", way, *figures, errors])
    report.add("live", ("library", "shows", "first words, s", "end, s", "word errors"), rows)


def _live(model: Transcriber, samples: np.ndarray, way: str) -> tuple[float, float, str]:
    """Return seconds until the first and the last words, and the text."""
    start, shown, lines = time.perf_counter(), list[float](), list[str]()

    def note(_: str) -> None:
        shown.append(time.perf_counter() - start)

    chunks = _in_real_time(samples, start)
    for each in model.transcribe_stream(chunks, on_words=note if way == "words" else None):
        note(each.text)
        lines.append(each.text)
    return shown[0], shown[-1], " ".join(lines)


def _in_real_time(samples: np.ndarray, start: float) -> Iterator[np.ndarray]:
    """Yield chunks as a microphone gives them from a time of `perf_counter` on."""
    for end in range(CHUNK, len(samples) + 1, CHUNK):
        time.sleep(max(start + end / SAMPLE_RATE - time.perf_counter(), 0))
        yield samples[end - CHUNK : end]


def _name(quantize: str) -> str:
    return "float16" if quantize == "none" else quantize


def _spoken(path: Path, text: str) -> Path:
    """Return the samples of a text, made if missing."""
    if not path.exists():
        np.save(path, read_audio(fetch.say(" ".join(text.split()), path.with_suffix(".wav"))))
    return path


def _engine(given: argparse.Namespace, quantize: str) -> Path:
    folder = given.work / f"whisper-tiny.en-engine-{quantize}-{given.threads}"
    if not folder.exists():
        bundle = given.work / "whisper-tiny.en-three-graphs"
        if not bundle.exists():
            export_llm(open_checkpoint(str(fetch.model())), bundle, ExportOptions(dtype="fp16"))
        plan = Plan(
            max_input_len=448,
            kv_capacity=448,
            threads=given.threads,
            prefill="auto",
            quantize=quantize,
            options=CpuOptions(),
        )
        build_engine("llm", bundle, folder, plan, "onnxruntime", silent)
    return folder


def _peers(given: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """Return installed libraries with their models, made if missing."""
    found: dict[str, tuple[str, Path]] = {}
    if command.has_package("faster_whisper", given.peers_python):
        for precision in ("int8", "float32"):
            name = f"faster-whisper {precision}"
            found[name] = name, fetch.ctranslate2_model()
    if command.has_package("pywhispercpp", given.peers_python):
        for kind in (whisper_ggml.F16, whisper_ggml.Q8_0):
            path = given.work / f"whisper-tiny.en-{kind.name}.bin"
            found[f"whisper.cpp {kind.name}"] = (
                "whisper.cpp",
                whisper_ggml.write(fetch.model(), path, kind),
            )
    return found


def _word_errors(text: str, reference: str) -> str:
    """Return the edits between the words of two texts, as a share of the words spoken."""
    spoken, written = _words(reference), _words(text)
    costs = np.arange(len(written) + 1)
    for row, word in enumerate(spoken, 1):
        before, costs[0] = costs.copy(), row
        for at, other in enumerate(written, 1):
            costs[at] = min(before[at - 1] + (word != other), before[at] + 1, costs[at - 1] + 1)
    return f"{100 * costs[-1] / len(spoken):.1f} %"


def _words(text: str) -> list[str]:
    kept = "".join(each if each.isalnum() or each == " " else " " for each in text.lower())
    return " ".join(kept.split()).split()


MODES = {"speech": show_speech, "live": show_live}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=5)
    parser.add_argument(
        "--peers_python", default=sys.executable, help="a python with faster-whisper, pywhispercpp"
    )
    command.run(parser, MODES)


if __name__ == "__main__":
    main()
