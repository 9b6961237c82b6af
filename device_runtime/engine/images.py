"""Images of a request: encoder features, placeholder tokens of the prompt, M-RoPE positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import (
    BrokenArtifactError,
    RequestError,
)
from edgellm.core.graph_io import PIXEL_VALUES
from edgellm.core.manifest import ENCODER_HASH, VISUAL_ENGINE, Engine, load_engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.engine.media.encoded import (
    CACHE_BYTES,
    EncodedCache,
    EncodedItem,
    contradictions,
    other_model,
    placed_prompt,
    require_match,
)
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.networks.encoder import open_encoder
from edgellm.multimodal import processors
from edgellm.multimodal.images import content_hash, open_image
from edgellm.multimodal.media import Picture, Video
from edgellm.multimodal.patch_grid import grid_inputs
from edgellm.multimodal.positions import Grid
from edgellm.multimodal.processors import FilmProcessor, FilmRules, PlacesImages, Prepared
from edgellm.multimodal.video import open_film


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImages(EncodedItem):
    """An encoded image or video, as input of the language model."""

    prepared: Prepared  # without its pixels


class ImageReader:
    """A visual engine with its image processor and a cache of features."""

    def __init__(
        self,
        *,
        folder: Path,
        decoder: DecoderSpec,
        verify: bool | None,
        cache_bytes: int = CACHE_BYTES,
        encoder_hash: str | None = None,
    ) -> None:
        """Load a visual engine for a decoder; `verify` as for `FileCheck`.

        Logs a warning if the encoder's hash differs from that in the decoder's checkpoint.

        Raises:
            BrokenArtifactError: files are damaged, or of another model than the decoder.
        """
        manifest = load_engine(folder, VISUAL_ENGINE)
        _require_match(folder, manifest, decoder)
        self.warnings = contradictions(folder, manifest, encoder_hash)
        self.manifest = manifest
        with FileCheck(folder, manifest.files, verify):
            self.processor = processors.load(folder)
            self._network = open_encoder(folder, manifest)
        self._decoder = decoder
        self._cache = EncodedCache[EncodedImages](cache_bytes)

    @property
    def film_text(self) -> str:
        """Placeholder of a video in messages; "": written by the chat template, or no videos."""
        rules = self._film_rules
        return rules.placeholder if rules is not None and rules.is_text else ""

    @property
    def placing(self) -> PlacesImages | None:
        """The processor, if it places images for M-RoPE."""
        return self.processor if isinstance(self.processor, PlacesImages) else None

    @property
    def _film_rules(self) -> FilmRules | None:
        return getattr(self.processor, "film", None)

    def see(self, sources: Sequence[Picture], folder: Path) -> list[EncodedImages]:
        """Features of images and videos, from the cache or the encoder.

        Args:
            sources: paths, `file://` or `data:` URIs, or videos.
            folder: base of relative paths.

        Raises:
            RequestError: a source cannot be read, or all have too many tokens.
        """
        total, maximum = 0, self.manifest.max_image_tokens
        found = []
        for source in sources:
            found.append(self._see(source, folder, maximum - total))
            total += found[-1].prepared.num_tokens
            if total > maximum:
                raise RequestError(
                    f"{len(found)} of {len(sources)} images have {total} tokens, the engine takes "
                    f"{maximum} in a request",
                    hint=f"send fewer or smaller images, or build with --maxImageTokens {total}",
                )
        return found

    def _see(self, source: Picture, folder: Path, room: int) -> EncodedImages:
        if isinstance(source, Video):
            return self._watch(source, folder, room)
        image = open_image(source, folder)
        key = content_hash(image)
        if (kept := self._cache.find(key)) is not None:
            return kept
        prepared = self.processor.prepare(image, self.manifest.max_image_tokens_per_image)
        least = self.manifest.min_image_tokens
        if prepared.num_tokens < least:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels has {prepared.num_tokens} "
                f"tokens, the engine was built for {least} and more",
                hint=f"enlarge it, or build with --minImageTokens {prepared.num_tokens}",
            )
        embeds, deepstack = self._encode(prepared)
        small = replace(prepared, pixels=np.zeros(0, np.float32), num_tokens=len(embeds))
        grids: tuple[Grid, ...] = ()
        if self._decoder.position_axes == 3:
            assert isinstance(self.processor, PlacesImages)
            passes = prepared.passes or (prepared.grid,)
            grids = tuple(self.processor.merged(grid) for grid in passes)
        return self._cache.keep(
            EncodedImages(
                content=key, prepared=small, runs=grids, embeds=embeds, deepstack=deepstack
            )
        )

    def _encode(self, prepared: Prepared) -> tuple[F32, F32]:
        """Features of an image, of all its passes."""
        grids, begin, found = prepared.passes or (prepared.grid,), 0, list[tuple[F32, F32]]()
        for rows, columns in grids:
            end = begin + rows * columns if len(grids) > 1 else len(prepared.pixels)
            inputs = {PIXEL_VALUES: prepared.pixels[begin:end]}
            inputs |= grid_inputs(rows, columns, self.manifest.vision)
            found.append(self._network.encode(inputs))
            begin = end
        return _joined(found)

    def _watch(self, source: Video, folder: Path, room: int) -> EncodedImages:
        """Encode a video, one frame, or temporal patch, at a time."""
        rules = self._film_rules
        if rules is None:
            raise RequestError(
                f"{self.manifest.vision.model_type} does not support video here",
                hint="Qwen2.5-VL and later, Gemma 4, MiniCPM-V, SmolVLM2 do; or send images",
            )
        processor = cast(FilmProcessor, self.processor)
        maximum = self.manifest.max_image_tokens_per_image
        film = open_film(
            source,
            folder,
            lambda total, rate: processor.pick_frames(total, rate, room),
            rules.frame_rate,
            lambda size, count: processor.fit_frames(size, count, room, maximum),
        )
        key = f"{film.content()} in {room}"  # a later video in a request has less space
        if (kept := self._cache.find(key)) is not None:
            return kept
        prepared = processor.prepare_film(film)
        least = prepared.whole.num_tokens // len(prepared.passes)
        if least < self.manifest.min_image_tokens:
            raise RequestError(
                f"a frame of the video has {least} tokens, the engine was built for "
                f"{self.manifest.min_image_tokens} and more",
                hint=f"send a shorter part of it, or build with --minImageTokens {least}",
            )
        grids = prepared.whole.passes or (prepared.whole.grid,) * len(prepared.passes)
        fixed = {grid: grid_inputs(*grid, self.manifest.vision) for grid in {*grids}}
        found = [
            self._network.encode({PIXEL_VALUES: one} | fixed[grid])
            for grid, one in zip(grids, prepared.passes, strict=True)
        ]
        embeds, deepstack = _joined(found)
        return self._cache.keep(
            EncodedImages(
                content=key,
                prepared=prepared.whole,
                runs=prepared.runs,
                embeds=embeds,
                deepstack=deepstack,
            )
        )

    def expand(self, text: str, seen: Sequence[EncodedImages]) -> str:
        """A rendered prompt with each placeholder repeated for the tokens of its image.

        Raises:
            RequestError: the numbers of placeholders and images differ.
        """
        return processors.expand(text, self.processor.image_token, [s.prepared for s in seen])

    def prompt(self, token_ids: list[int], seen: Sequence[EncodedImages]) -> Prompt:
        """The prompt with token ids and images for a network.

        Raises:
            RequestError: the image tokens do not match the images.
        """
        return placed_prompt(token_ids, self._decoder, images=seen, placing=self.placing)


def _joined(found: Sequence[tuple[F32, F32]]) -> tuple[F32, F32]:
    """Features of several passes, one after the other."""
    if len(found) == 1:
        return found[0]
    embeds = np.concatenate([embeds for embeds, _ in found])
    return embeds, np.concatenate([levels for _, levels in found], axis=1)


def open_images(folder: Path, base: Engine, *, verify: bool | None) -> ImageReader:
    """Load a visual engine for a decoder; as `ImageReader`."""
    own = base.provenance.get(ENCODER_HASH)
    return ImageReader(folder=folder, decoder=base.decoder, verify=verify, encoder_hash=own)


def _require_match(folder: Path, manifest: Engine, decoder: DecoderSpec) -> None:
    images = decoder.images
    if images is None or images.token_id is None:
        raise BrokenArtifactError(
            f"the engine takes {'text only' if images is None else 'no images'}: it was not "
            "exported from a vision-language model",
            hint="remove --multimodalEngineDir, or give the engine of the whole model",
        )
    require_match(folder, manifest, decoder)
    levels = manifest.vision.num_deepstack
    if images.num_deepstack != levels:
        raise other_model(folder, "number of deepstack levels", levels, images.num_deepstack)
