"""Images of a request: encoder features, placeholder tokens of the prompt, M-RoPE positions."""

from __future__ import annotations

import logging
from collections import OrderedDict
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
from edgellm.core.manifest import VISUAL_ENGINE, Engine, load_engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.arrays import (
    F32,
    I64,
    ImageRows,
    RowKey,
)
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.networks.encoder import open_encoder
from edgellm.multimodal import processors
from edgellm.multimodal.images import content_hash, open_image
from edgellm.multimodal.media import Source, Video
from edgellm.multimodal.patch_grid import grid_inputs
from edgellm.multimodal.positions import Grid
from edgellm.multimodal.processors import FilmProcessor, FilmRules, PlacesImages, Prepared
from edgellm.multimodal.video import open_film

_ENCODER_HASH = "bundle_encoder_sha256"  # in the provenance of engines
CACHE_BYTES = 256 << 20  # of features cached for later requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImages:
    """An encoded image, as input of the language model."""

    content: str  # `content_hash` of the image
    prepared: Prepared  # without its pixels
    runs: tuple[Grid, ...]  # grids of its tokens, for M-RoPE
    embeds: F32  # [N, H]
    deepstack: F32  # [L, N, H]

    @property
    def num_bytes(self) -> int:
        """Size of the features."""
        return self.embeds.nbytes + self.deepstack.nbytes


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
        self.warnings = _contradictions(folder, manifest, encoder_hash)
        assert decoder.images is not None
        self.manifest = manifest
        with FileCheck(folder, manifest.files, verify):
            self.processor = processors.load(folder)
            self._network = open_encoder(folder, manifest)
        self._decoder, self._token_id = decoder, decoder.images.token_id
        self._is_bidirectional = decoder.images.bidirectional_tokens > 0
        self._kept: OrderedDict[str, EncodedImages] = OrderedDict()
        self._room = cache_bytes

    @property
    def film_text(self) -> str:
        """Placeholder of a video in messages; "": written by the chat template, or no videos."""
        rules = self._film_rules
        return rules.placeholder if rules is not None and rules.is_text else ""

    @property
    def _film_rules(self) -> FilmRules | None:
        return getattr(self.processor, "film", None)

    def see(self, sources: Sequence[Source], folder: Path) -> list[EncodedImages]:
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

    def _see(self, source: Source, folder: Path, room: int) -> EncodedImages:
        if isinstance(source, Video):
            return self._watch(source, folder, room)
        image = open_image(source, folder)
        key = content_hash(image)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
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
        self._keep(
            EncodedImages(
                content=key, prepared=small, runs=grids, embeds=embeds, deepstack=deepstack
            )
        )
        return self._kept[key]

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
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
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
        self._keep(
            EncodedImages(
                content=key,
                prepared=prepared.whole,
                runs=prepared.runs,
                embeds=embeds,
                deepstack=deepstack,
            )
        )
        return self._kept[key]

    def _keep(self, seen: EncodedImages) -> None:
        """Add to the cache, and evict the oldest until it fits; the newest always stays."""
        self._kept[seen.content] = seen
        used = sum(kept.num_bytes for kept in self._kept.values())
        while used > self._room and len(self._kept) > 1:
            used -= self._kept.popitem(last=False)[1].num_bytes

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
        ids = np.asarray(token_ids, np.int64)
        places = np.flatnonzero(ids == self._token_id)
        count = sum(len(one.embeds) for one in seen)
        if len(places) != count:
            raise RequestError(
                f"the prompt has {len(places)} image tokens, its images have {count}",
                hint="the text must not contain image tokens",
            )
        if not seen:
            return Prompt(token_ids)
        vocab_size, positions = self._decoder.vocab_size, None
        contents = [one.content for one in seen for _ in one.embeds]
        keys: dict[int, RowKey] = dict(enumerate(contents, vocab_size))
        if self._decoder.position_axes == 3:
            assert isinstance(self.processor, PlacesImages)
            grids = [run for one in seen for run in one.runs]
            found = self.processor.positions(ids, self._token_id, grids)
            positions = found.prompt
            # Without images these tokens have other positions
            keys |= {token: f"{token} before an image" for token in found.forward_ids}
        ids[places] = vocab_size + np.arange(count)
        rows = ImageRows(
            embeds=np.concatenate([one.embeds for one in seen]),
            deepstack=np.concatenate([one.deepstack for one in seen], axis=1),
            positions=positions,
            keys=keys,
            spans=_runs(places) if self._is_bidirectional else (),
        )
        return Prompt(ids.tolist(), rows)


def _joined(found: Sequence[tuple[F32, F32]]) -> tuple[F32, F32]:
    """Features of several passes, one after the other."""
    if len(found) == 1:
        return found[0]
    embeds = np.concatenate([embeds for embeds, _ in found])
    return embeds, np.concatenate([levels for _, levels in found], axis=1)


def _runs(places: I64) -> tuple[tuple[int, int], ...]:
    """First and after the last of each run of consecutive numbers, ascending."""
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def open_images(folder: Path, base: Engine, *, verify: bool | None) -> ImageReader:
    """Load a visual engine for a decoder; as `ImageReader`."""
    own = base.provenance.get(_ENCODER_HASH)
    return ImageReader(folder=folder, decoder=base.decoder, verify=verify, encoder_hash=own)


def _contradictions(folder: Path, visual: Engine, encoder_hash: str | None) -> list[str]:
    """Warn of an encoder of another checkpoint, which may be intended."""
    own = visual.provenance.get(_ENCODER_HASH)
    if own is None or encoder_hash in (None, own):  # engines of older bundles have no hash
        return []
    line = (
        f"{folder} was exported from another encoder than that of the engine's checkpoint: images "
        "may be misread; export both from one checkpoint, unless the two are to be combined"
    )
    logging.getLogger(__name__).warning("warning: %s", line)
    return [line]


def _require_match(folder: Path, manifest: Engine, decoder: DecoderSpec) -> None:
    vision, images = manifest.vision, decoder.images
    if images is None:
        raise BrokenArtifactError(
            "the engine takes text only: it was not exported from a vision-language model",
            hint="remove --multimodalEngineDir, or give the engine of the whole model",
        )
    for what, of_decoder, of_encoder in (
        ("model", images.model_type, vision.model_type),
        ("hidden size", decoder.hidden_size, vision.hidden_size),
        ("number of deepstack levels", images.num_deepstack, vision.num_deepstack),
    ):
        if of_decoder != of_encoder:
            raise BrokenArtifactError(
                f"{folder} is the encoder of another model: {what} {of_encoder}, the engine "
                f"has {of_decoder}",
                hint="give the visual engine that was exported from the same checkpoint",
            )
