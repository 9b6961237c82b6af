"""MiniCPM-V 4.6 and 4.7: an image, and slices of it in a higher resolution.

The grid of slices has the aspect ratio nearest to the image's (LLaVA-UHD, arXiv 2403.11703;
rounding as in transformers). Images of a prompt are numbered. In 4.7 their tokens have positions on
a canvas. Frames of a video are such images, one a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.canvas_positions import Tags, canvas_positions
from edgellm.multimodal.positions import RotaryPositions
from edgellm.multimodal.processors import Prepared, PreparedFilm
from edgellm.multimodal.processors.pixels import HALF, PixelRules, merged_patches, require_class
from edgellm.multimodal.processors.settings import Checkpoint, Settings
from edgellm.multimodal.video import Film, Resize

_MERGES = {"16x": 4, "4x": 2}  # patches of a token along each side, by `downsample_mode`
Grid = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an image becomes passes of the encoder, in rows and columns."""

    whole: Grid  # of the image's tokens
    slices: Grid = (0, 0)
    slice_tokens: Grid = (0, 0)  # of each slice

    @property
    def num_tokens(self) -> int:
        return math.prod(self.whole) + math.prod(self.slices) * math.prod(self.slice_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How images, or frames of a video, are resized and cut into slices."""

    rules: PixelRules = field(compare=False)
    patch_size: int
    merge_size: int  # patches of a token along each side
    resolution: int  # side in pixels of a square with the area of a whole image, or of a slice
    max_slices: int  # 1: images are not cut

    @classmethod
    def read(cls, settings: Settings, model: Settings) -> Cutting:
        """Read settings of images or videos; raises `UnsupportedModelError`."""
        vision = model.section("vision_config")
        max_slices = settings.positive("max_slice_nums", 9)
        cuts = settings.read("slice_mode", bool, True)
        return cls(
            rules=PixelRules.read(settings, HALF, HALF, Image.Resampling.BICUBIC),
            patch_size=settings.agree("patch_size", vision.side("patch_size", 14)),
            merge_size=_merge_size(settings, model),
            resolution=settings.positive("scale_resolution", 448),
            max_slices=max_slices if cuts else 1,
        )

    @property
    def side(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge_size

    def plan(self, width: int, height: int, max_tokens: int | None) -> _Plan:
        """The checkpoint's plan, or the largest one within `max_tokens`."""
        for maximum in range(self.max_slices, 0, -1):
            plan = self._plan_for(width, height, maximum)
            if max_tokens is None or plan.num_tokens <= max_tokens:
                return plan
        assert max_tokens is not None
        if max_tokens < 1:
            raise LimitError(
                f"an image has at least 1 token, and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        return _Plan(self._shrunk(width, height, max_tokens))

    def resized(self, image: Image.Image, tokens: Grid) -> Image.Image:
        """The image with this grid of tokens."""
        rows, columns = tokens
        return self.rules.resized(image, columns * self.side, rows * self.side)

    def patches(self, part: Image.Image) -> NDArray[np.float32]:
        """Patches of the whole image or a slice."""
        planes = self.rules.normalized(part)[None]
        return merged_patches(planes, self.patch_size, self.merge_size)

    def grid(self, part: Image.Image) -> Grid:
        """Rows and columns of these patches."""
        return part.height // self.patch_size, part.width // self.patch_size

    def _plan_for(self, width: int, height: int, max_slices: int) -> _Plan:
        """The plan with a number of slices that is limited by `max_slices`."""
        whole = self._filling(width, height, self.resolution)
        slices = _slices(width, height, self.resolution, max_slices)
        if slices is None:
            return _Plan(whole)
        rows, columns = slices
        wide, high = _nearest(width, columns) / columns, _nearest(height, rows) / rows
        return _Plan(whole, slices, self._filling(wide, high, self.resolution))

    def _filling(self, width: float, height: float, resolution: float) -> Grid:
        """Rows and columns of tokens with an area of about `resolution` squared."""
        # Rounded to pixels first, because transformers does so
        ratio = width / height
        high = int(resolution / math.sqrt(ratio))
        wide = int(high * ratio)
        return _nearest(high, self.side) // self.side, _nearest(wide, self.side) // self.side

    def _shrunk(self, width: int, height: int, max_tokens: int) -> Grid:
        """Rows and columns of the whole image within `max_tokens`."""
        rows, columns = 1, 1
        for area in range(max_tokens, 0, -1):
            rows, columns = self._filling(width, height, self.side * math.sqrt(area))
            if rows * columns <= max_tokens:
                break
        # A narrow strip is one token wide; limit its length
        return min(rows, max_tokens), min(columns, max_tokens)


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Resizes an image to one that has the whole image, and the canvas of its slices below."""

    cutting: Cutting
    plan: _Plan

    def __call__(self, image: Image.Image) -> Image.Image:
        whole = self.cutting.resized(image, self.plan.whole)
        if not self.plan.slices[0]:
            return whole
        (rows, columns), (high, wide) = self.plan.slices, self.plan.slice_tokens
        canvas = self.cutting.resized(image, (rows * high, columns * wide))
        size = max(whole.width, canvas.width), whole.height + canvas.height
        sheet = Image.new("RGB", size)
        sheet.paste(whole, (0, 0))
        sheet.paste(canvas, (0, whole.height))
        return sheet

    def parts(self, sheet: Image.Image) -> list[Image.Image]:
        """The whole image and its slices, row by row."""
        side, (rows, columns) = self.cutting.side, self.plan.slices
        top, right = (tokens * side for tokens in self.plan.whole)
        height, width = (tokens * side for tokens in self.plan.slice_tokens)
        corners = ((x * width, top + y * height) for y in range(rows) for x in range(columns))
        slices = [sheet.crop((x, y, x + width, y + height)) for x, y in corners]
        return [sheet.crop((0, 0, right, top)), *slices]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmRules:
    """Video settings of a checkpoint."""

    cutting: Cutting  # of frames
    max_frames: int
    placeholder: str

    frame_rate = 1.0
    is_text = False  # templates write the placeholder

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> FilmRules | None:
        """Read the video settings, or those of images if there are none.

        Returns:
            None if frames are stacked.

        Raises:
            UnsupportedModelError: unsupported settings.
        """
        has_file = not checkpoint.video.is_empty
        settings = checkpoint.video if has_file else checkpoint.image
        if has_file:
            settings.expect("video_processor_type", "MiniCPMV4_6VideoProcessor")
        for key in ("do_sample_frames", "return_metadata", "use_image_id", "fps"):
            settings.read(key, object, None)  # sampled always; others are unused
        is_stacked = settings.positive("stack_frames", 1) > 1
        found = cls(
            cutting=Cutting.read(settings, checkpoint.model),
            max_frames=settings.positive("max_num_frames", 128),
            placeholder=checkpoint.tokens.read("video_token", str, "<|video_pad|>"),
        )
        if has_file:
            settings.finish()
        return None if is_stacked else found

    def pick(self, total: int, rate: float, maximum: int) -> list[int]:
        """Sample at most `maximum` frame indices from `total` frames at `rate` per second."""
        seconds, count = total / rate, min(self.max_frames, max(maximum, 1))
        if seconds > count:
            times = [round(0.1 * place, 1) for place in range(int(seconds / 0.1))]
            found = [min(int(time * rate), total - 1) for time in times]
            if len(found) > count:
                found = [found[at] for at in np.linspace(0, len(found) - 1, count, dtype=int)]
        else:
            found = [int(second * rate) for second in range(math.ceil(seconds))]
        return sorted({*found})


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*p*p] of all passes: the whole image, then its slices row by row."""

    cutting: Cutting
    image_token: str
    start_token: str
    end_token: str
    slice_start_token: str
    slice_end_token: str
    number_tokens: tuple[str, str] | None  # around an image's number; None: not numbered
    tags: Tags | None  # ids of the tags above on a canvas; None: positions as in text
    film: FilmRules | None  # None: no video support

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, tokens = checkpoint.image, checkpoint.tokens
        require_class(settings, "MiniCPMV4_6ImageProcessor")
        cutting = Cutting.read(settings, checkpoint.model)
        is_numbered = settings.read("use_image_id", bool, True)
        is_numbered = checkpoint.processor.read("use_image_id", bool, is_numbered)
        film = FilmRules.read(checkpoint)
        settings.finish()
        checkpoint.processor.finish()
        numbers = (
            tokens.read("image_id_start_token", str, "<image_id>"),
            tokens.read("image_id_end_token", str, "</image_id>"),
        )
        return cls(
            cutting=cutting,
            image_token=tokens.read("image_token", str, "<|image_pad|>"),
            start_token=tokens.read("image_start_token", str, "<image>"),
            end_token=tokens.read("image_end_token", str, "</image>"),
            slice_start_token=tokens.read("slice_start_token", str, "<slice>"),
            slice_end_token=tokens.read("slice_end_token", str, "</slice>"),
            number_tokens=numbers if is_numbered else None,
            tags=_tags(checkpoint.model) if checkpoint.model_type == "minicpmv4_7" else None,
            film=film,
        )

    @property
    def rules(self) -> PixelRules:
        """Resizing and normalization of images."""
        return self.cutting.rules

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.cutting.patch_size

    @property
    def merge_size(self) -> int:
        """Patches of a token along each side."""
        return self.cutting.merge_size

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        return self.cutting.plan(*size, max_tokens).num_tokens

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`.

        With fewer tokens than the checkpoint allows, an image has fewer slices or is not cut.
        """
        plan = self.cutting.plan(image.width, image.height, max_tokens)
        sheet = _Sheet(self.cutting, plan)
        parts = sheet.parts(sheet(image))
        grids = tuple(map(self.cutting.grid, parts))
        return Prepared(
            pixels=np.concatenate([self.cutting.patches(part) for part in parts]),
            grid=grids[0],
            num_tokens=plan.num_tokens,
            prompt=self._prompt(plan),
            passes=grids,
            number_tokens=self.number_tokens,
        )

    def merged(self, grid: Grid) -> Grid:
        """Rows and columns of tokens of a grid of patches; see `PlacesImages`."""
        return grid[0] // self.merge_size, grid[1] // self.merge_size

    def positions(
        self, token_ids: ArrayLike, image_token_id: int, grids: Sequence[Grid]
    ) -> RotaryPositions:
        """M-RoPE positions of a prompt; see `PlacesImages`."""
        assert self.tags is not None
        return canvas_positions(token_ids, image_token_id, grids, self.tags)

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Frame indices, see `FilmProcessor`; many frames have fewer tokens each."""
        assert self.film is not None
        return self.film.pick(total, rate, maximum)

    def fit_frames(
        self, size: tuple[int, int], count: int, maximum: int, max_per_pass: int
    ) -> Resize:
        """How frames are resized and cut; see `FilmProcessor`."""
        assert self.film is not None
        if maximum < count:
            raise LimitError(
                f"a video of {count} frames has at least {count} tokens; {maximum} are allowed",
                hint="show fewer frames, or build with a larger --maxImageTokens",
            )
        cutting = self.film.cutting
        return _Sheet(cutting, cutting.plan(*size, min(max_per_pass, maximum // count)))

    def prepare_film(self, film: Film) -> PreparedFilm:
        """The passes of the encoder over frames and their slices; see `FilmProcessor`."""
        assert self.film is not None
        sheet, count = film.resize, len(film.frames)
        assert isinstance(sheet, _Sheet)
        parts = [part for frame in film.frames for part in sheet.parts(frame)]
        grids = tuple(map(sheet.cutting.grid, parts))
        whole = Prepared(
            pixels=np.zeros(0, np.float32),
            grid=grids[0],
            num_tokens=sheet.plan.num_tokens * count,
            prompt=self._prompt(sheet.plan) * count,
            placeholder=self.film.placeholder,
            passes=grids,
            number_tokens=self.number_tokens if self.tags is None else None,
        )
        passes = tuple(map(sheet.cutting.patches, parts))
        return PreparedFilm(whole, passes, tuple(map(self.merged, grids)))

    def _prompt(self, plan: _Plan) -> str:
        whole = f"{self.start_token}{self.image_token * math.prod(plan.whole)}{self.end_token}"
        tokens = self.image_token * math.prod(plan.slice_tokens)
        part = f"{self.slice_start_token}{tokens}{self.slice_end_token}"
        rows, columns = plan.slices
        return whole + "\n".join([part * columns] * rows)


def _merge_size(settings: Settings, model: Settings) -> int:
    """Patches of a token along each side; raises `UnsupportedModelError` for unknown modes."""
    model.expect("downsample_mode", *_MERGES)
    wanted = model.read("downsample_mode", str, "16x")
    found = settings.read("downsample_mode", str, "16x")
    if found != wanted:
        raise settings.fault("downsample_mode", found, f"should be {wanted!r}, as in config.json")
    return _MERGES[found]


def _tags(model: Settings) -> Tags:
    """Ids of the tags; raises `UnsupportedModelError` if config.json lacks one."""
    return Tags(
        image_start=model.read("image_start_id", int),
        image_end=model.read("image_end_id", int),
        slice_start=model.read("slice_start_id", int),
        slice_end=model.read("slice_end_id", int),
        newline=model.read("newline_id", int),
    )


def _nearest(length: float, divisor: int) -> int:
    """The nearest positive multiple of `divisor`."""
    return max(round(length / divisor) * divisor, divisor)


def _slices(width: int, height: int, resolution: int, maximum: int) -> Grid | None:
    """Rows and columns of slices; None: the image is not cut.

    A slice has about `resolution` squared pixels of the image. Grids of one slice more or less are
    allowed, if they have the image's aspect ratio more nearly.
    """
    wanted = min(math.ceil(width * height / (resolution * resolution)), maximum)
    if wanted <= 1:
        return None
    ratio, best, best_distance = math.log(width / height), (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if not 1 < count <= maximum:
            continue
        for rows in (each for each in range(1, count + 1) if count % each == 0):
            grid = rows, count // rows
            distance = abs(ratio - math.log(grid[1] / rows))
            # Of equal distances that with more rows
            if distance < best_distance or (distance == best_distance and rows > best[0]):
                best, best_distance = grid, distance
    return best
