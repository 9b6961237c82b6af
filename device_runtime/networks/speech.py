"""Passes of a speech model: a window of audio, then the tokens of its text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import AUDIO_ENCODER
from edgellm.core.manifest import Engine
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import F32, I64
from edgellm.device_runtime.networks.decoder import DecoderNetwork, network
from edgellm.device_runtime.runners.runner import Runner


class SpeechNetwork:
    """A loaded encoder of audio and its decoder, for one window at a time."""

    def __init__(self, encoder: Runner, decoder: DecoderNetwork) -> None:
        self._encoder, self._decoder, self._length = encoder, decoder, 0

    def listen(self, features: F32) -> None:
        """Encode a window, log-mel features float32 [mel bins, F], and begin its text."""
        self._decoder.listen(dict(self._encoder.run({graph_io.INPUT_FEATURES: features[None]})))
        self.restart()

    def restart(self) -> None:
        """Begin the text of the same window again."""
        self._decoder.kv.free()
        self._length = 0

    def logits(self, token_ids: I64, rows: I64) -> F32:
        """Append tokens int64 [S] to the text; logits [R, V] after those at `rows` int64 [R].

        The array is valid until the next call.
        """
        found = self._decoder.run(token_ids, self._length, rows)
        self._length += len(token_ids)
        return found.logits

    def next_logits(self, token_ids: I64) -> F32:
        """As `logits`, after the last token alone: [V]."""
        return self.logits(token_ids, np.array([len(token_ids) - 1]))[0]


def open_speech(folder: Path, engine: Engine) -> SpeechNetwork:
    """Load an engine of a speech model.

    Raises:
        EdgeLLMError: it has a language model, or as `runners.Backend.open_engine`.
    """
    spec = engine.decoder
    if spec.audio is None:
        raise EdgeLLMError(
            f"{folder} has a language model ({spec.model_type}), not a speech model",
            hint="give a speech model, such as openai/whisper-tiny",
        )
    opened = runners.find(engine.backend).open_engine(folder, engine)
    decoder = network(opened, spec, engine.max_kv_cache_capacity)
    return SpeechNetwork(opened[AUDIO_ENCODER], decoder)
