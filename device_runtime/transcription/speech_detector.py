"""Voice activity detection by Silero VAD: regions of speech in audio, while it comes.

The network is that of the package silero-vad; its ONNX file is run without torch. The rules of
regions are those of its `get_speech_timestamps`.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgellm.core.errors import RequestError
from edgellm.device_runtime.arrays import F32
from edgellm.multimodal.audio import SAMPLE_RATE

FRAME = 512  # samples of a probability
_CONTEXT = 64  # samples of the frame before, which the network takes too
_SPEECH, _SILENCE = 0.5, 0.35  # probabilities at which speech begins, and below which it ends
_MIN_SPEECH = SAMPLE_RATE // 4
PAUSE = SAMPLE_RATE // 2  # silence that ends a region
PADDING = SAMPLE_RATE // 5  # of a region, at both ends; two have less than a pause
_SHORT_PAUSE = 98 * SAMPLE_RATE // 1000  # where a region that is too long may be cut


class Region(NamedTuple):
    """Samples of a recording."""

    begin: int
    end: int


class SpeechProbabilities:
    """Probabilities of speech in the frames of one recording."""

    def __init__(self) -> None:
        """Load the network; raises `RequestError` if silero-vad is not installed."""
        self._session = _session()
        self._state = np.zeros((2, 1, 128), np.float32)
        self._held = np.zeros(_CONTEXT, np.float32)  # context, and samples of no whole frame

    def push(self, samples: F32) -> list[float]:
        """Probabilities of the frames that these samples complete."""
        self._held = np.concatenate([self._held, samples])
        found: list[float] = []
        begin = 0
        while len(self._held) - begin >= _CONTEXT + FRAME:
            found.append(self._run(self._held[begin : begin + _CONTEXT + FRAME]))
            begin += FRAME
        self._held = self._held[begin:]
        return found

    def finish(self) -> list[float]:
        """The probability of the last frame, filled with zeros; [] if there is none."""
        missing = -(len(self._held) - _CONTEXT) % FRAME
        return self.push(np.zeros(missing, np.float32)) if missing else []

    def _run(self, samples: F32) -> float:
        rate = np.array(SAMPLE_RATE, np.int64)
        given = {"input": samples[None], "state": self._state, "sr": rate}
        probability, self._state = self._session.run(None, given)
        return float(probability[0, 0])


class SpeechDetector:
    """Regions of speech in one recording, while its samples come."""

    def __init__(self, max_size: int, *, cuts_back: bool = True) -> None:
        """Load the network.

        Args:
            max_size: samples of a region with its padding; speech that is longer is cut at its
                longest pause.
            cuts_back: False: `current` is never cut before its end. Speech of half the maximum
                ends at the next short pause, and longer speech without one at the maximum.

        Raises:
            RequestError: silero-vad is not installed.
        """
        self._probabilities, self._cuts_back = SpeechProbabilities(), cuts_back
        self._max_size = max_size - FRAME - 2 * PADDING
        self._frame = self._num_samples = 0
        self._begin: int | None = None  # of speech; None: there is none
        self._silent_from: int | None = None  # within speech
        self._pauses: list[Region] = []  # short ones within speech
        self._last_end = 0  # of the last region, with its padding
        self._found: list[Region] = []

    @property
    def kept_from(self) -> int:
        """The first sample that a later region may have."""
        return self._padded(self._frame * FRAME if self._begin is None else self._begin)

    @property
    def current(self) -> Region | None:
        """The region that the speech so far is; None if it has just begun, or there is none."""
        end = self._frame * FRAME
        spoken_to = end if self._silent_from is None else self._silent_from
        if self._begin is None or spoken_to - self._begin <= _MIN_SPEECH:
            return None
        return Region(self._padded(self._begin), min(end, spoken_to + PADDING))

    def push(self, samples: F32) -> list[Region]:
        """Regions that ended."""
        self._num_samples += len(samples)
        for probability in self._probabilities.push(samples):
            self._observe(probability)
        return self._taken()

    def finish(self) -> list[Region]:
        """The region that the end of the recording ends."""
        for probability in self._probabilities.finish():
            self._observe(probability)
        if self._begin is not None and self._num_samples - self._begin > _MIN_SPEECH:
            self._add(self._begin, self._num_samples, 0)
        self._begin = None
        return self._taken()

    def _taken(self) -> list[Region]:
        found, self._found = self._found, []
        return found

    def _observe(self, probability: float) -> None:
        """Account for the next frame."""
        at = self._frame * FRAME
        self._frame += 1
        if probability >= _SPEECH:
            silence, self._silent_from = self._silent_from, None
            if self._cuts_back and silence is not None and at - silence > _SHORT_PAUSE:
                self._pauses.append(Region(silence, at))
            if self._begin is None:
                self._begin = at
                return
        if self._begin is None:
            return
        if at - self._begin > self._max_size:
            self._cut(self._begin, at)
        if probability >= _SILENCE or self._begin is None:
            return
        self._silent_from = at if self._silent_from is None else self._silent_from
        silence = at - self._silent_from
        if silence >= self._pause(at - self._begin):
            if self._silent_from - self._begin > _MIN_SPEECH:
                self._add(self._begin, self._silent_from, min(PADDING, silence))
            self._end()

    def _pause(self, length: int) -> int:
        """The silence that ends speech of this length."""
        return PAUSE if self._cuts_back or 2 * length < self._max_size else _SHORT_PAUSE

    def _padded(self, begin: int) -> int:
        """The first sample of a region whose speech begins here."""
        return max(begin - PADDING, self._last_end, 0)

    def _cut(self, begin: int, at: int) -> None:
        """End a region that is too long, at its longest pause if it has one."""
        if not self._pauses:
            self._add(begin, at, 0)
            self._end()
            return
        pause = max(self._pauses, key=lambda each: each.end - each.begin)
        self._add(begin, pause.begin, min(PADDING, (pause.end - pause.begin) // 2))
        self._end()
        self._begin = pause.end

    def _end(self) -> None:
        self._begin = self._silent_from = None
        self._pauses = []

    def _add(self, begin: int, end: int, padding: int) -> None:
        first = self._padded(begin)
        self._last_end = min(end + padding, self._num_samples)
        self._found.append(Region(first, self._last_end))


@cache
def _session() -> Any:
    from edgellm.device_runtime.runners.onnxruntime_import import ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(network_file()), options, providers=["CPUExecutionProvider"])


def network_file() -> Path:
    """The network in the package silero-vad, which is not imported: it needs torch.

    Raises:
        RequestError: the package is not installed.
    """
    spec = importlib.util.find_spec("silero_vad")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (path := Path(folder, "data", "silero_vad.onnx")).is_file():
            return path
    raise RequestError(
        "voice activity detection needs the package silero-vad",
        hint="pip install --no-deps silero-vad; without --no-deps pip adds torch, which is unused",
    )
