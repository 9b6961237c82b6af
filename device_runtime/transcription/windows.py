"""Windows of a part of a recording: what the encoder takes at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.transcription.parts import Part
from edgellm.device_runtime.transcription.segments import FRAME_S
from edgellm.multimodal.log_mel import HOP, log_mel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A window of a part, from frame `begin` on."""

    features: F32  # log-mel, [mel bins, F]; zeros after the part
    draft_features: F32  # with the mel bins of a draft
    part: Part
    begin: int
    num_frames: int  # of the part and its padding
    num_positions: int  # of its audio, 20 ms each, at least 1
    is_of_several: bool  # windows of the part

    @property
    def seek(self) -> int:
        """Its first frame in the recording."""
        return round(self.time_s(0, ends=False) / FRAME_S)

    def time_s(self, seconds: float, *, ends: bool) -> float:
        """The time in the recording of a time in the window, as `Part.time_s`."""
        return self.part.time_s(self.begin * FRAME_S + seconds, ends=ends)


class PartWindows:
    """Iterator of a part's windows; each begins where `advance` says."""

    def __init__(self, part: Part, spec: AudioSpec, draft_bins: int) -> None:
        """Compute the features of a part, with zeros up to a window.

        Args:
            part: of a recording.
            spec: of the model.
            draft_bins: mel bins of its draft's features; 0: those of the model.
        """
        missing = max(spec.num_frames * HOP - len(part.samples), 0)
        padded = np.pad(part.samples, (0, missing))
        self._features = self._of_draft = log_mel(padded, spec.num_mel_bins)
        if draft_bins not in (0, spec.num_mel_bins):
            self._of_draft = log_mel(padded, draft_bins)
        self._part, self._size, self._begin = part, spec.num_frames, 0

    def __iter__(self) -> Iterator[Window]:
        """Windows until the end of the part."""
        count = self._features.shape[1]
        num_audio = min(-(-len(self._part.samples) // HOP), count)
        while self._begin < count:
            num_frames = min(count - self._begin, self._size)
            yield Window(
                features=self._cut(self._features),
                draft_features=self._cut(self._of_draft),
                part=self._part,
                begin=self._begin,
                num_frames=num_frames,
                num_positions=max(min(num_audio - self._begin, self._size) // 2, 1),
                is_of_several=count > self._size,
            )

    def _cut(self, features: F32) -> F32:
        found = features[:, self._begin : self._begin + self._size]
        return np.pad(found, ((0, 0), (0, self._size - found.shape[1])))

    def advance(self, num_frames: int) -> None:
        """Begin the next window a number of frames later."""
        self._begin += num_frames
