"""Decodes image files to RGB pixels, from paths, `file://` and `data:` URIs, with strict checks."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from edgellm.core.commands.extras import remedy
from edgellm.core.errors import RequestError
from edgellm.multimodal.source_files import read_source

# Formats of cameras and browsers. Pillow supports more, some of them by external programs.
FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 100_000_000  # 300 MB of RGB

_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# TIFF tags and their values.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _SIGNED = 0, 2


def open_image(source: str, folder: Path) -> Image.Image:
    """Decode an image: upright, 8-bit RGB, transparency composited on white.

    The image processors of transformers 5 composite on white for all families.

    Args:
        source: a path, relative to `folder` or absolute, a `file://` URI, or a base64 `data:` URI.
        folder: the base of relative paths.

    Raises:
        RequestError: missing, not a readable still image, or too large. `MAX_PIXELS` is checked
            before the pixels are decoded.
    """
    name, data = read_source(source, folder)
    if not data:
        raise RequestError(f"{name} is empty", hint="write the picture again")
    with warnings.catch_warnings():
        # Pillow warns about odd metadata and sizes that are checked here
        warnings.simplefilter("ignore")
        return _decode(name, data)


def content_hash(image: Image.Image) -> str:
    """SHA-256 (hexadecimal) of an RGB image's size and pixels.

    Files that decode to equal pixels have equal hashes. The encoder's output also depends on the
    processor and its `max_tokens`, so a cache key must include them.
    """
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def _decode(name: str, data: bytes) -> Image.Image:
    Image.init()
    _open_heif(name, data)
    formats = [known for known in FORMATS if known in Image.OPEN]
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            _require_still_picture(name, image)
            samples = _Samples.of(image)
            image.load()
            turn = _TRANSPOSED.get(_orientation(image))
            rgb = _to_rgb(name, image, samples)
            return rgb if turn is None else rgb.transpose(turn)
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError(
            f"{name} holds no picture that can be read",
            hint=f"formats: {', '.join(formats)}, of 8 or 16 bits; no video",
        ) from None
    except Image.DecompressionBombError:
        raise RequestError(
            f"{name} has more than {MAX_PIXELS} pixels", hint="make the picture smaller"
        ) from None
    except Exception as error:  # noqa: BLE001 - damaged files make decoders raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(
            f"{name} is damaged or truncated: {reason}", hint="copy or save the picture again"
        ) from None


# Brands in the first box of a file (ISO/IEC 23008-12, annex B; AV1 Image File Format).
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF = (b"avif", b"avis")


def _open_heif(name: str, data: bytes) -> None:
    """Let Pillow open the formats of phones; raise an error for one that it cannot open."""
    size = int.from_bytes(data[:4], "big")
    if data[4:8] != b"ftyp":
        return
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, min(size, 256), 4))}
    if brands.intersection(_AVIF):
        if "AVIF" not in Image.OPEN:
            raise RequestError(
                f"{name} is an AVIF picture, which Pillow opens from version 11.3 on",
                hint="pip install -U pillow, or save the picture as JPEG or PNG",
            )
    elif brands.intersection(_HEIC):
        if importlib.util.find_spec("pillow_heif") is None:
            raise RequestError(
                f"{name} is a HEIC picture, which needs pillow-heif",
                hint=f"{remedy('pillow_heif')}; or save the picture as JPEG",
            )
        importlib.import_module("pillow_heif").register_heif_opener()  # an optional package


def _require_still_picture(name: str, image: Image.Image) -> None:
    """Check the header: size and number of frames."""
    if image.width * image.height > MAX_PIXELS:
        raise RequestError(
            f"{name} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}",
            hint="make the picture smaller",
        )
    # A photograph, perhaps followed by a preview, a gain map or more of a burst
    frames = 1 if image.format in ("MPO", "HEIF") else getattr(image, "n_frames", 1)
    if frames > 1:
        raise RequestError(
            f"{name} has {frames} frames: video and animations are not supported",
            hint="extract a frame, and give it as a picture",
        )


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - damaged metadata raises anything, and is ignored
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """The sample format of a file, read before Pillow decodes it."""

    white: int = 65535  # the value of white in 16-bit grayscale
    is_inverted: bool = False  # 16-bit grayscale whose zero is white
    is_signed: bool = False
    key_scale: float = 1  # from the stored transparent value to 8 bits

    @classmethod
    def of(cls, image: ImageFile.ImageFile) -> _Samples:
        """Read TIFF tags (baseline 6.0) and PNG's bit depth, which Pillow's modes lack.

        Pillow inverts and scales samples of up to 8 bits itself, but not PNG's tRNS chunk.
        """
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            bits = image.tag_v2.get(_BITS_PER_SAMPLE, (1,))[0]
            white = 2**bits - 1 if 8 < bits < 16 else 65535
            is_inverted = image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
            is_signed = _SIGNED in image.tag_v2.get(_SAMPLE_FORMAT, ())
            return cls(white=white, is_inverted=is_inverted, is_signed=is_signed)
        raw_mode = str(image.tile[0].args) if image.format == "PNG" and image.tile else ""
        key_scale = {"L;2": 255 / 3, "L;4": 255 / 15, "RGB;16B": 1 / 256}.get(raw_mode, 1)
        return cls(key_scale=key_scale)


def _to_rgb(name: str, image: Image.Image, samples: _Samples) -> Image.Image:
    is_gray16 = image.mode.startswith("I;16") or (
        image.mode == "I" and image.format in ("PNG", "PPM")
    )
    if samples.is_signed or (image.mode in ("I", "F") and not is_gray16):
        raise RequestError(
            f"{name} has 32 bits per pixel or signed values, and nothing says how bright they are",
            hint="save it with 8 or 16 bits, without a sign",
        )
    if is_gray16:
        return _gray16_to_rgb(image, samples)
    key = image.info.get("transparency")
    if samples.key_scale != 1 and key is not None:
        values = np.multiply(key, samples.key_scale).astype(int).tolist()
        image.info["transparency"] = tuple(values) if isinstance(values, list) else values
    if image.mode == "La":  # Pillow converts it only to LA
        image = image.convert("LA")
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or key is not None:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _gray16_to_rgb(image: Image.Image, samples: _Samples) -> Image.Image:
    values = np.asarray(image).astype(np.uint32)
    gray = ((values * 255 + samples.white // 2) // samples.white).astype(np.uint8)
    if samples.is_inverted:
        gray = 255 - gray
    gray[values == image.info.get("transparency", -1)] = 255
    return Image.fromarray(gray).convert("RGB")
