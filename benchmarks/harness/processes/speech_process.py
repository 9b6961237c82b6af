"""Speech recognition with the public interface of each library, each in its own process.

`python speech_process.py NAME PATH THREADS` reads paths of samples, float32 at 16 kHz in a .npy
file. It writes `[milliseconds, most resident bytes, text]` for each: greedy, with timestamps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Transcribe = Callable[[np.ndarray], str]


def edgellm(path: str, threads: int) -> Transcribe:
    """Return edgellm's; the engine has its threads."""
    from edgellm.core.manifest import LLM_ENGINE, load_engine
    from edgellm.device_runtime.transcription.options import TranscriptionOptions
    from edgellm.device_runtime.transcription.transcriber import Transcriber

    assert load_engine(Path(path), LLM_ENGINE).options["threads"] == threads
    model = Transcriber(Path(path))
    options = TranscriptionOptions(
        timestamps="segment", temperatures=(0.0,), condition_on_prev_tokens=False
    )
    return lambda samples: "".join(each.text for each in model.transcribe(samples, options))


def faster_whisper(path: str, threads: int, precision: str) -> Transcribe:
    """Return faster-whisper's, one beam, without other temperatures."""
    import faster_whisper as library

    model = library.WhisperModel(path, device="cpu", compute_type=precision, cpu_threads=threads)

    def transcribe(samples: np.ndarray) -> str:
        segments, _ = model.transcribe(
            samples, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        return "".join(each.text for each in segments)

    return transcribe


def whisper_cpp(path: str, threads: int) -> Transcribe:
    """Return whisper.cpp's, greedy, without other temperatures."""
    from pywhispercpp.model import Model

    greedy = {"greedy": {"best_of": 1}, "temperature_inc": 0.0, "no_context": True}
    quiet = {"print_progress": False, "print_realtime": False, "redirect_whispercpp_logs_to": None}
    model = Model(path, n_threads=threads, language="en", **greedy, **quiet)
    return lambda samples: " ".join(each.text for each in model.transcribe(samples))


LIBRARIES: dict[str, Callable[[str, int], Transcribe]] = {
    "edgellm": edgellm,
    "faster-whisper int8": lambda path, threads: faster_whisper(path, threads, "int8"),
    "faster-whisper float32": lambda path, threads: faster_whisper(path, threads, "float32"),
    "whisper.cpp": whisper_cpp,
}


def _most_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    name, path, threads = sys.argv[1:]
    transcribe = LIBRARIES[name](path, int(threads))
    print("[]", flush=True)
    for line in sys.stdin:
        samples = np.load(line.strip())
        start = time.perf_counter()
        text = transcribe(samples)
        ms = (time.perf_counter() - start) * 1e3
        print(json.dumps([ms, _most_bytes(), text]), flush=True)


if __name__ == "__main__":
    main()
