"""Passes of a speech model: a window of audio, then the tokens of its text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgellm.core import graph_io
from edgellm.core.errors import BrokenArtifactError, EdgeLLMError
from edgellm.core.graph_roles import AUDIO_ENCODER, CROSS_KV
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import AudioSpec
from edgellm.core.resources import trim
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import F32, I64
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart, network
from edgellm.device_runtime.networks.shared_passes import SharedPasses
from edgellm.device_runtime.runners.runner import Runner


class SpeechNetwork:
    """A loaded encoder of audio and its decoder, for the text of one window at a time.

    `beside` gives further ones of the same engine, for threads of their own: their tokens share
    passes. The bits of a text do not depend on the others.
    """

    def __init__(
        self,
        *,
        encoder: Runner | None,
        cross_kv: Runner,
        decoder: DecoderNetwork,
        audio: AudioSpec,
    ) -> None:
        """`encoder`: None: another network's encodes the windows."""
        self._encoder, self._cross_kv, self._decoder = encoder, cross_kv, decoder
        self._audio, self._length, self._kv = audio, 0, decoder.new_kv()
        self._passes = SharedPasses(decoder)
        self._keys: dict[int, F32] = {}  # of audio, of layers with alignment heads
        self._queries: list[F32] | None = None  # by token; None: not recorded

    def beside(self) -> list[SpeechNetwork]:
        """Networks for the other windows of a batch, which share all memory but the text's."""
        found: list[SpeechNetwork] = []
        for place in range(1, self._decoder.num_windows):
            found.append(copy(self))
            found[-1]._kv = self._decoder.new_kv()
            found[-1]._kv.window = place
        return found

    @property
    def _heads(self) -> tuple[tuple[int, int], ...]:
        return self._audio.alignment_heads

    @property
    def num_mel_bins(self) -> int:
        """Of the features that its encoder takes; 0: it has none."""
        return 0 if self._encoder is None else self._audio.num_mel_bins

    def encode(self, features: F32) -> F32:
        """Hidden states float32 [1, A, H] of a window, valid until the next one.

        Args:
            features: log-mel, float32 [mel bins, F].
        """
        assert self._encoder is not None
        found = self._encoder.run({graph_io.INPUT_FEATURES: features[None]})
        hidden = found[graph_io.ENCODER_HIDDEN]
        trim()  # the encoder's intermediates, 60 MB of a small model
        return hidden

    def listen(self, hidden: F32) -> None:
        """Begin the text of a window with these hidden states, as `encode` gives them.

        Threads must not `encode` or `listen` at the same time.
        """
        cross = dict(self._cross_kv.run({graph_io.ENCODER_HIDDEN: hidden}))
        self._decoder.listen(cross, self._kv.window)
        keys = {layer: cross[graph_io.cross_name(layer, "key")] for layer, _ in self._heads}
        is_alone = self._decoder.num_windows == 1  # others overwrite the outputs
        self._keys = keys if is_alone else {layer: each.copy() for layer, each in keys.items()}
        self.restart()

    def restart(self, *, records_queries: bool = False) -> None:
        """Begin the text of the same window again.

        Args:
            records_queries: for `attention_to_audio`.
        """
        with self._passes.alone():
            self._kv.free()
        self._length, self._queries = 0, [] if records_queries else None

    def decoding(self) -> AbstractContextManager[None]:
        """While this thread computes `logits`; see `SharedPasses.decoding`."""
        return self._passes.decoding()

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return self._length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the text."""
        self._kv.truncate(length)
        self._length = length

    def logits(self, token_ids: I64, rows: I64) -> F32:
        """Append tokens int64 [S] to the text; logits [R, V] after those at `rows` int64 [R].

        The array is valid until the next call.
        """
        found = self._passes.run(SequencePart(self._kv, token_ids, self._length, rows))
        if self._queries is not None:
            self._queries[self._length :] = found.alignment_queries.copy()
        self._length += len(token_ids)
        return found.logits

    def attention_to_audio(self, tokens: slice, num_positions: int) -> F32:
        """Attention weights [N, S, num_positions] of the alignment heads.

        Args:
            tokens: S of the text, prompt included.
            num_positions: of the encoder, from the window's begin; weights of all sum to 1.
        """
        assert self._queries is not None
        heads = self._heads
        queries = np.stack(self._queries[tokens]).reshape(
            len(self._queries[tokens]), len(heads), -1
        )
        found = np.empty((len(heads), len(queries), num_positions), np.float32)
        for at, (layer, head) in enumerate(heads):
            pages = self._keys[layer][:, head]  # an engine may have positions in pages
            keys = pages.reshape(-1, pages.shape[-1])[: self._audio.num_positions]
            scores = queries[:, at] @ keys.T / np.float32(np.sqrt(keys.shape[1]))
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            found[at] = weights[:, :num_positions]
        return found

    def next_logits(self, token_ids: I64) -> F32:
        """As `logits`, after the last token alone: [V]."""
        return self.logits(token_ids, np.array([len(token_ids) - 1]))[0]


def open_speech(folder: Path, engine: Engine, *, has_encoder: bool = True) -> SpeechNetwork:
    """Load an engine of a speech model.

    Args:
        folder: of the engine.
        engine: its manifest.
        has_encoder: False: its encoder is not loaded.

    Raises:
        EdgeLLMError: it has a language model, or as `runners.Backend.open_engine`.
        BrokenArtifactError: its bundle is of an older edgellm.
    """
    spec = engine.decoder
    if spec.audio is None:
        raise EdgeLLMError(
            f"{folder} has a language model ({spec.model_type}), not a speech model",
            hint="give a speech model, such as openai/whisper-tiny",
        )
    if CROSS_KV not in engine.graphs:
        raise BrokenArtifactError(
            f"{folder} was made by an older edgellm, whose graphs of audio were others",
            hint="export the model again with edgellm-export llm, then run llm_build; a stored "
            "engine is removed by edgellm rm and made anew",
        )
    if not has_encoder:
        kept = {role: each for role, each in engine.graphs.items() if role != AUDIO_ENCODER}
        engine = replace(engine, graphs=kept)
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return SpeechNetwork(
        encoder=opened.get(AUDIO_ENCODER),
        cross_kv=opened[CROSS_KV],
        decoder=network(opened, spec, engine.max_kv_cache_capacity),
        audio=spec.audio,
    )
