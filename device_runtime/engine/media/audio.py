"""Audio of a request: encoder features, placeholder tokens of the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import BrokenArtifactError, RequestError
from edgellm.core.manifest import AUDIO_ENGINE, ENCODER_HASH, Engine, load_engine
from edgellm.device_runtime.engine.media.encoded import (
    CACHE_BYTES,
    EncodedCache,
    EncodedItem,
    contradictions,
    require_match,
)
from edgellm.device_runtime.networks.encoder import open_encoder
from edgellm.multimodal.audio import SAMPLE_RATE, open_audio
from edgellm.multimodal.audio_features import prepare
from edgellm.multimodal.media import Audio


@dataclass(frozen=True, slots=True)
class AudioTexts:
    """Texts of tokens of audio in a rendered prompt."""

    token: str  # the placeholder in templates, and of each row
    begin: str = ""  # before the tokens of a clip, unless the template writes it
    end: str = ""

    def of(self, num_tokens: int) -> str:
        """The text of a clip."""
        return self.begin + self.token * num_tokens + self.end


class AudioReader:
    """An audio engine with a cache of features."""

    def __init__(
        self, *, folder: Path, base: Engine, texts: AudioTexts, verify: bool | None
    ) -> None:
        """Load an audio engine for a decoder.

        Logs a warning if the encoder's hash differs from that in the decoder's checkpoint.

        Args:
            folder: made by audio_build.
            base: the decoder's engine.
            texts: of the decoder's audio tokens.
            verify: as for `FileCheck`.

        Raises:
            BrokenArtifactError: files are damaged, or of another model than the decoder.
        """
        self.manifest = load_engine(folder, AUDIO_ENGINE)
        require_match(folder, self.manifest, base.decoder)
        self.warnings = contradictions(folder, self.manifest, base.provenance.get(ENCODER_HASH))
        with FileCheck(folder, self.manifest.files, verify):
            self._network = open_encoder(folder, self.manifest)
        self.texts = texts
        self._cache = EncodedCache[EncodedItem](CACHE_BYTES)

    def hear(self, clips: Sequence[Audio], folder: Path) -> list[EncodedItem]:
        """Features of clips, from the cache or the encoder; `folder`: base of relative paths.

        Raises:
            RequestError: a clip cannot be read, or is too long.
        """
        return [self._hear(clip, folder) for clip in clips]

    def _hear(self, clip: Audio, folder: Path) -> EncodedItem:
        samples = open_audio(clip.source, folder)
        seconds, longest = len(samples) / SAMPLE_RATE, self.manifest.max_audio_s
        if seconds > longest:
            fits = not 0 < self.manifest.audio_encoder.max_s < seconds
            wider = f", or build with --maxAudioSeconds {int(seconds) + 1}" if fits else ""
            raise RequestError(
                f"an audio clip has {seconds:.1f} s, the engine takes {longest}",
                hint="send a part of it" + wider,
            )
        key = hashlib.sha256(b"audio:" + samples.tobytes()).hexdigest()
        if (found := self._cache.find(key)) is not None:
            return found
        prepared = prepare(samples, self.manifest.audio_encoder)
        embeds, _ = self._network.encode(prepared.inputs)
        embeds = embeds[: prepared.num_tokens].copy()
        deepstack = np.zeros((0, *embeds.shape), np.float32)
        return self._cache.keep(EncodedItem(content=key, embeds=embeds, deepstack=deepstack))

    def expand(self, text: str, heard: Sequence[EncodedItem]) -> str:
        """A rendered prompt with each placeholder repeated for the tokens of its clip.

        Raises:
            RequestError: the numbers of placeholders and clips differ.
        """
        texts = self.texts
        first, *others = text.split(texts.token)
        if len(others) != len(heard):
            raise RequestError(
                f"the prompt has {len(others)} places for audio, but {len(heard)} clips came "
                "with it",
                hint=f"{texts.token} must not stand in the text",
            )
        pairs = zip(heard, others, strict=True)
        return first + "".join(texts.of(len(one.embeds)) + rest for one, rest in pairs)


def require_audio_decoder(base: Engine) -> tuple[int, ...]:
    """Token ids of a decoder's audio: placeholder; before and after a clip, if there are any.

    Raises:
        BrokenArtifactError: it takes none.
    """
    images = base.decoder.images
    if images is None or images.audio_token_id is None:
        raise BrokenArtifactError(
            f"the engine takes {'text only' if images is None else 'no audio'}: it was not "
            "exported from a model with an audio encoder",
            hint="remove --audioEngineDir, or give the engine of the whole model",
        )
    return images.audio_token_id, *images.audio_ends
