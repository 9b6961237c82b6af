from __future__ import annotations

import base64
import contextlib
import io
import os
import struct
import zlib

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps

from edgellm.core.errors import RequestError
from edgellm.multimodal import images, source_files
from edgellm.multimodal.images import content_hash, open_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def noise(width=7, height=5, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def saved(folder, image, name="a.png", **options):
    image.save(folder / name, **options)
    return open_image(name, folder)


def encoded(image, form="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def colours(image):
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def data_uri(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def refused(source, folder, match):
    with pytest.raises(RequestError, match=match) as caught:
        open_image(source, folder)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


def png_header(width, height):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


# ------------------------------------------------------------------------------------ sources
def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    pixels = noise()
    path = tmp_path / "with space, # and ?.png"
    Image.fromarray(pixels).save(path)
    data = path.read_bytes()
    text = base64.encodebytes(data).decode()  # with line breaks
    sources = [
        path.name,
        str(path),
        path.as_uri(),
        path.as_uri().replace("file://", "FILE://localhost"),
        data_uri(data),
        "data:;base64," + text,
        data_uri(data, "image/jpeg"),  # the pixels count, not the label
    ]
    found = [open_image(source, tmp_path) for source in sources]
    assert all(image.mode == "RGB" for image in found)
    assert all(np.array_equal(np.asarray(image), pixels) for image in found)
    assert len({content_hash(image) for image in found}) == 1


def test_hash_depends_on_pixels_and_size():
    first = Image.fromarray(noise(6, 4))
    second = Image.frombytes("RGB", (4, 6), first.tobytes())
    third = Image.fromarray(noise(6, 4, seed=1))
    assert len({content_hash(image) for image in (first, second, third)}) == 3


# -------------------------------------------------------------------------------- conversions
@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation(tmp_path, form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(noise(8, 16))
    (tmp_path / "a").write_bytes(encoded(image, form, exif=exif))
    expected = ImageOps.exif_transpose(Image.open(tmp_path / "a")).convert("RGB")
    assert np.array_equal(np.asarray(open_image("a", tmp_path)), np.asarray(expected))
    assert expected.size == ((16, 8) if orientation in (5, 6, 7, 8) else (8, 16))


def test_damaged_orientation_is_ignored(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encoded(Image.new("RGB", (8, 16)), "JPEG", exif=b"Exif\0\0zz"))
    assert open_image("a.jpg", tmp_path).size == (8, 16)


def test_grey_and_one_bit(tmp_path):
    grey = noise(channels=1)
    assert np.array_equal(
        np.asarray(saved(tmp_path, Image.fromarray(grey))), np.stack([grey] * 3, -1)
    )
    bits = Image.fromarray(grey > 127)
    assert bits.mode == "1"
    assert np.array_equal(np.asarray(saved(tmp_path, bits))[..., 0], (grey > 127) * 255)


def test_transparency_is_composited_on_white(tmp_path):
    clear = Image.new("RGBA", (2, 1), (*RED, 0))
    clear.putpixel((1, 0), (*RED, 255))
    assert colours(saved(tmp_path, clear)) == [WHITE, RED]
    assert colours(saved(tmp_path, clear.convert("LA"))) == [WHITE, (76, 76, 76)]
    half = Image.new("RGBA", (1, 1), (*BLUE, 128))
    assert saved(tmp_path, half).getpixel((0, 0)) == (127, 127, 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB", "L", "1", "P"])
def test_transparency_is_that_of_transformers(tmp_path, mode):
    from transformers.image_transforms import convert_to_rgb

    image = Image.fromarray(noise(9, 9, 4)).convert(mode)
    options = {"transparency": (1, 2, 3) if mode == "RGB" else 1} if "A" not in mode else {}
    ours = saved(tmp_path, image, **options)
    theirs = convert_to_rgb(Image.open(tmp_path / "a.png"), return_numpy=True)
    assert np.array_equal(np.asarray(ours), theirs)


def test_palettes(tmp_path):
    palette = Image.new("P", (3, 1))
    palette.putpalette([*RED, *GREEN, *BLUE])
    palette.putdata([0, 1, 2])
    assert colours(saved(tmp_path, palette)) == [RED, GREEN, BLUE]
    one_clear = saved(tmp_path, palette, transparency=1)
    assert colours(one_clear) == [RED, WHITE, BLUE]
    some_clear = saved(tmp_path, palette, transparency=bytes([0, 255, 0]))
    assert colours(some_clear) == [WHITE, GREEN, WHITE]
    assert colours(saved(tmp_path, palette, "a.gif")) == [RED, GREEN, BLUE]


def test_cmyk(tmp_path):
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    colour = np.asarray(saved(tmp_path, ink, "a.jpg", quality=100))
    assert np.abs(colour.astype(int) - RED).max() < 4


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_are_scaled(tmp_path, name):
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    image = saved(tmp_path, Image.fromarray(values), name)
    assert [red for red, _, _ in colours(image)] == [0, 1, 128, 255]


def test_sixteen_bits_with_a_transparent_value(tmp_path):
    data = encoded(Image.fromarray(np.array([[0, 1000]], np.uint16)))
    at = data.index(b"IDAT") - 4
    chunk = b"tRNS" + struct.pack(">H", 1000)
    chunk = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "a.png").write_bytes(data[:at] + chunk + data[at:])
    assert colours(open_image("a.png", tmp_path)) == [(0, 0, 0), WHITE]


def packed(values, bits, order):
    """Unsigned integers as TIFF and PNG store a row of them."""
    if bits > 12:
        return np.array(values, f"{order}u{bits // 8}").tobytes()
    text = "".join(f"{value:0{bits}b}" for value in values)
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big")


def tiff(width, bits, photometric, row, *, samples=1, order="<", tags=()):
    """TIFF 6.0 of one row: a header, the row, and a directory of tags."""
    sizes = {3: "H", 4: "I"}
    said = [
        (256, 4, [width]),
        (257, 4, [1]),
        (258, 3, [bits] * samples),
        (259, 3, [1]),
        (262, 3, [photometric]),
        (273, 4, [8]),
        (277, 3, [samples]),
        (278, 4, [1]),
        (279, 4, [len(row)]),
        *tags,
    ]
    start = 8 + len(row) + len(row) % 2
    end = start + 2 + 12 * len(said) + 4
    body, tail = struct.pack(f"{order}H", len(said)), b""
    for tag, kind, values in sorted(said):
        raw = struct.pack(f"{order}{len(values)}{sizes[kind]}", *values)
        body += struct.pack(f"{order}HHI", tag, kind, len(values))
        body += struct.pack(f"{order}I", end + len(tail)) if len(raw) > 4 else raw.ljust(4, b"\0")
        tail += raw if len(raw) > 4 else b""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    picture = row.ljust(start - 8, b"\0")
    return magic + struct.pack(f"{order}I", start) + picture + body + bytes(4) + tail


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 10, 12, 14, 16])
@pytest.mark.parametrize("is_inverted", [False, True])
def test_gray_tiffs_are_scaled_by_their_bits(tmp_path, order, bits, is_inverted):
    """From black to white, or rejected: never scaled by another depth."""
    top = 2**bits - 1
    values = [0, top // 3, top // 2, top]
    stored = 16 if bits in (10, 14) else bits
    row = packed(values, stored, order)
    (tmp_path / "a.tif").write_bytes(tiff(4, bits, 0 if is_inverted else 1, row, order=order))
    unknown_to_pillow = {(">", 12, False), (">", 16, True)}
    if (
        bits in (10, 14)
        or (bits == 12 and is_inverted)
        or (order, bits, is_inverted) in (unknown_to_pillow)
    ):
        assert "of 8 or 16 bits" in refused("a.tif", tmp_path, "holds no picture").hint
        return
    expected = [(255 * value + top // 2) // top for value in values]
    if is_inverted:
        expected = [255 - value for value in expected]
    assert colours(open_image("a.tif", tmp_path)) == [(value,) * 3 for value in expected]


@pytest.mark.parametrize("bits", [8, 16])
def test_tiffs_of_several_samples(tmp_path, bits):
    """Transparency on white, premultiplied or not; inks; CIELAB."""
    top = 2**bits - 1
    half, clear = top // 2, 0

    def read(photometric, values, samples, tags=()):
        width = len(values) // samples
        row = packed(values, bits, "<")
        (tmp_path / "a.tif").write_bytes(
            tiff(width, bits, photometric, row, samples=samples, tags=tags)
        )
        return colours(open_image("a.tif", tmp_path))

    assert read(2, [top, 0, half], 3) == [(255, 0, 127)]
    assert read(2, [top, 0, 0, half, top, 0, 0, clear], 4, [(338, 3, [2])]) == [
        (255, 128, 128),
        WHITE,
    ]
    assert read(2, [half, 0, 0, half, 0, 0, 0, clear], 4, [(338, 3, [1])]) == [
        (255, 128, 128),
        WHITE,
    ]
    assert read(2, [top, 0, 0, clear], 4, [(338, 3, [0])]) == [RED]
    assert read(5, [0, top, top, 0, 0, 0, 0, top], 4) == [RED, (0, 0, 0)]
    if bits == 8:
        assert read(3, [1, 0], 1, [(320, 3, colour_map(bits))]) == [RED, GREEN]
        red = read(8, [136, 80, 67], 3)  # L* 53.3, a* 80, b* 67 are sRGB's red
        assert np.abs(np.array(red) - RED).max() < 16


def test_a_gray_tiff_with_premultiplied_transparency(tmp_path):
    row = bytes([100, 200, 0, 0])
    (tmp_path / "a.tif").write_bytes(tiff(2, 8, 1, row, samples=2, tags=[(338, 3, [1])]))
    if PIL.__version__ < "13":  # which rejects it
        assert refused("a.tif", tmp_path, "holds no picture").hint
    else:
        assert colours(open_image("a.tif", tmp_path)) == [(155,) * 3, WHITE]


def colour_map(bits):
    """Sixteen bits for each colour of a palette: 0 is green, 1 is red."""
    size = 2**bits
    found = [0] * (3 * size)
    found[1] = found[size] = 65535
    return found


@pytest.mark.parametrize(
    ("bits", "key"), [(1, 0), (1, 1), (2, 1), (4, 5), (8, 85), (16, 21845), (2, 3), (4, 15)]
)
def test_a_transparent_gray_has_the_depth_of_its_file(tmp_path, bits, key):
    """The chunk tRNS of PNG, in 11.3.2.1 of its specification."""
    top = 2**bits - 1
    values = [0, top // 3, top // 2, top]
    row = packed(values, bits, ">")
    (tmp_path / "a.png").write_bytes(png(4, bits, 0, row, struct.pack(">H", key)))
    expected = [255 if value == key else (255 * value + top // 2) // top for value in values]
    assert colours(open_image("a.png", tmp_path)) == [(value,) * 3 for value in expected]


@pytest.mark.parametrize("bits", [8, 16])
def test_a_transparent_colour_has_the_depth_of_its_file(tmp_path, bits):
    top = 2**bits - 1
    key = (top, top // 3, 0)
    row = packed([*key, top, 0, top // 3], bits, ">")
    (tmp_path / "a.png").write_bytes(png(2, bits, 2, row, struct.pack(">HHH", *key)))
    assert colours(open_image("a.png", tmp_path)) == [WHITE, (255, 0, 85)]


def png(width, bits, kind, row, transparent):
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, 1, bits, kind, 0, 0, 0)),
        (b"tRNS", transparent),
        (b"IDAT", zlib.compress(b"\0" + row)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


@pytest.mark.parametrize("top", [1, 100, 255, 1000, 4095, 65535])
def test_the_white_of_portable_graymaps(tmp_path, top):
    (tmp_path / "a.pgm").write_bytes(f"P2 3 1 {top}\n0 {top // 2} {top}\n".encode())
    expected = [0, round(255 * (top // 2) / top), 255]
    assert [red for red, _, _ in colours(open_image("a.pgm", tmp_path))] == expected


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_signed_values_are_rejected(tmp_path, bits):
    row = np.array([0, 1, -1], f"<i{bits // 8}").tobytes()
    (tmp_path / "a.tif").write_bytes(tiff(3, bits, 1, row, tags=[(339, 3, [2])]))
    refused("a.tif", tmp_path, "signed values")


@pytest.mark.parametrize("mode", ["I", "F"])
def test_thirty_two_bits_are_rejected(tmp_path, mode):
    Image.new(mode, (3, 3)).save(tmp_path / "a.tif")
    refused("a.tif", tmp_path, "32 bits per pixel")


# ----------------------------------------------------------------------------------- errors
def test_sources_without_an_image(tmp_path):
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    os.mkfifo(tmp_path / "pipe.png")
    missing = refused("missing.png", tmp_path, "cannot read missing.png: No such file")
    assert str(tmp_path) in missing.hint
    refused(".", tmp_path, "is a folder")
    refused("", tmp_path, "is a folder")
    refused("empty.png", tmp_path, "is empty")
    refused("pipe.png", tmp_path, "not a regular file")
    refused("a\0b.png", tmp_path, "is not a path")
    refused("text.png", tmp_path, "holds no picture")
    refused((tmp_path / "missing.png").as_uri(), tmp_path, "No such file")
    assert len(str(refused("iVBORw0KGgo" * 10_000, tmp_path, "File name too long"))) < 200


def test_addresses(tmp_path):
    refused("https://example.com/a.png", tmp_path, "not fetched")
    refused("HTTP://example.com/a.png", tmp_path, "not fetched")
    refused("s3://bucket/a.png", tmp_path, "s3:// is not supported")
    refused("file://machine/a.png", tmp_path, "names the machine machine")


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("data:image/png;base64", "must hold base64"),
        ("data:image/png,abc", "must hold base64"),
        ("data:image/png;base64,abc", "damaged base64"),
        ("data:image/png;base64,a*b=", "damaged base64"),
        ("data:image/png;base64,é", "damaged base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,YWJj", "holds no picture"),
    ],
)
def test_data_uris(tmp_path, uri, match):
    refused(uri, tmp_path, match)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000"])
def test_truncated_files(tmp_path, form):
    data = encoded(Image.fromarray(noise(64, 64)), form)
    for keep in (len(data) // 2, len(data) - len(data) // 10):
        refused(data_uri(data[:keep]), tmp_path, "damaged or truncated|holds no picture")


def test_damaged_files_are_rejected_or_decoded(tmp_path, recwarn):
    """A flipped byte causes no other exception and no warning."""
    generator = np.random.default_rng(0)
    image = Image.fromarray(noise(16, 16))
    for form in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"):
        whole = np.frombuffer(encoded(image, form), np.uint8)
        for _ in range(40):
            data = whole.copy()
            data[generator.integers(0, len(data), 3)] = generator.integers(0, 256, 3)
            with contextlib.suppress(RequestError):
                open_image(data_uri(data.tobytes()), tmp_path)
    assert not recwarn.list


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations(tmp_path, form):
    frames = [Image.fromarray(noise(8, 8, seed=seed)) for seed in range(3)]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    error = refused(data_uri(data), tmp_path, "3 frames: video and animations are not supported")
    assert "extract a frame" in error.hint


def test_the_preview_of_a_photograph_is_no_animation(tmp_path):
    photo = Image.fromarray(noise(16, 16))
    data = encoded(photo, "MPO", save_all=True, append_images=[photo.resize((8, 8))])
    assert open_image(data_uri(data), tmp_path).size == (16, 16)


def test_one_frame_of_an_animated_format(tmp_path):
    assert saved(tmp_path, Image.fromarray(noise()), "a.gif").size == (7, 5)


@pytest.mark.parametrize("size", [(20_000, 20_000), (9_000, 12_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_rejected_by_their_header(tmp_path, size, recwarn):
    (tmp_path / "a.png").write_bytes(png_header(*size))
    refused(
        "a.png", tmp_path, f"pixels, more than {images.MAX_PIXELS}|than {images.MAX_PIXELS} pix"
    )
    assert not recwarn.list


def test_large_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "MAX_FILE_BYTES", 10)
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    refused("a.png", tmp_path, "bytes, more than 10")


def test_no_pixels(tmp_path):
    gif = b"GIF89a" + struct.pack("<HHBBB", 0, 0, 0, 0, 0)
    gif += b"," + struct.pack("<HHHHB", 0, 0, 0, 0, 0) + b"\x02\x02D\x01\x00;"
    refused(data_uri(gif), tmp_path, "holds no picture")
    refused(data_uri(png_header(0, 4)), tmp_path, "holds no picture")


def test_nothing_is_printed(tmp_path, capfd, recwarn):
    palette = Image.fromarray(noise(9, 9)).quantize(4)
    saved(tmp_path, palette, transparency=bytes([0, 255, 0, 9]))
    exif = encoded(Image.new("RGB", (8, 8)), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    (tmp_path / "a.jpg").write_bytes(exif)
    open_image("a.jpg", tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


# -------------------------------------------------------------------------------- phones
def heic(*pictures: Image.Image, **options: object) -> bytes:
    """A HEIC file without loss, by libheif."""
    pillow_heif = pytest.importorskip("pillow_heif", reason="pip install '.[heic]'")
    made = pillow_heif.from_pillow(pictures[0])
    for picture in pictures[1:]:
        made.add_from_pillow(picture)
    buffer = io.BytesIO()
    made.save(buffer, quality=-1, chroma=444, matrix_coefficients=0, **options)
    return buffer.getvalue()


def test_heic_pictures_are_those_that_were_saved(tmp_path):
    """Also of a burst, whose primary picture counts."""
    first, second = (Image.fromarray(noise(64, 48, seed=seed)) for seed in (0, 1))
    (tmp_path / "a.heic").write_bytes(heic(first))
    assert np.array_equal(np.asarray(open_image("a.heic", tmp_path)), np.asarray(first))
    (tmp_path / "b.heic").write_bytes(heic(first, second, primary_index=1))
    assert np.array_equal(np.asarray(open_image("b.heic", tmp_path)), np.asarray(second))


def test_transparent_heic_is_composited_on_white(tmp_path):
    half = Image.new("RGBA", (64, 64), (*BLUE, 128))
    (tmp_path / "a.heic").write_bytes(heic(half))
    half.save(tmp_path / "a.png")
    expected = np.asarray(open_image("a.png", tmp_path))
    assert np.array_equal(np.asarray(open_image("a.heic", tmp_path)), expected)


def test_damaged_heic_is_rejected(tmp_path):
    data = heic(Image.fromarray(noise(64, 48)))
    for end in (30, 200, len(data) * 3 // 4):
        (tmp_path / "a.heic").write_bytes(data[:end])
        with pytest.raises(RequestError, match=r"a\.heic"):
            open_image("a.heic", tmp_path)


BOX = b"\0\0\0\x18ftyp%b\0\0\0\0mif1%b"  # the first box of such a file


def test_missing_packages_for_heic_and_avif_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.heic").write_bytes(BOX % (b"heic", b"heic"))
    (tmp_path / "a.avif").write_bytes(BOX % (b"avif", b"miaf"))
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"a\.heic is a HEIC .* needs pillow-heif") as caught:
        open_image("a.heic", tmp_path)
    assert "'edgellm[heic]'" in caught.value.hint
    Image.init()
    monkeypatch.delitem(Image.OPEN, "AVIF", raising=False)
    with pytest.raises(RequestError, match=r"a\.avif is an AVIF .* version 11\.3") as caught:
        open_image("a.avif", tmp_path)
    assert "pillow" in caught.value.hint
