"""Video files: frames as a player shows them, with orientation and times."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgellm.core.errors import RequestError
from edgellm.multimodal.media import Video
from edgellm.multimodal.video import Film, open_film

av = pytest.importorskip("av", reason="films are read by PyAV: pip install '.[video]'")

SIZE = WIDTH, HEIGHT = 64, 48
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
NAMES = {"R": RED, "G": GREEN, "B": BLUE, "W": WHITE}
# Coefficients a, b, c and d of a display matrix, the corners of a picture whose corners were RG
# over BW, and PIL's name: x and y go to a x + c y and b x + d y (ISO/IEC 14496-12, 8.3.2).
MATRICES = {
    (1, 0, 0, 1): "RGBW",
    (0, 1, -1, 0): "BRWG",  # a phone held upright
    (-1, 0, 0, -1): "WBGR",
    (0, -1, 1, 0): "GWRB",
    (-1, 0, 0, 1): "GRWB",  # a phone's front camera
    (1, 0, 0, -1): "BWRG",
    (0, 1, 1, 0): "RBGW",
    (0, -1, -1, 0): "WGBR",
}


def corner_picture() -> Image.Image:
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[: HEIGHT // 2, : WIDTH // 2], pixels[: HEIGHT // 2, WIDTH // 2 :] = RED, GREEN
    pixels[HEIGHT // 2 :, : WIDTH // 2], pixels[HEIGHT // 2 :, WIDTH // 2 :] = BLUE, WHITE
    return Image.fromarray(pixels)


def corners(image: Image.Image) -> str:
    pixels = np.asarray(image).astype(int)
    height, width = pixels.shape[:2]
    found = ""
    for y in (height // 4, 3 * height // 4):
        for x in (width // 4, 3 * width // 4):
            found += min(NAMES, key=lambda name: np.abs(pixels[y, x] - NAMES[name]).sum())
    return found


def gray(level: int) -> Image.Image:
    return Image.new("RGB", SIZE, (level,) * 3)


def write(path: Path, pictures: Sequence[Image.Image], times: Sequence[int] | None = None) -> Path:
    """A film of ten frames in a second, or at `times` in hundredths of one."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.bit_rate, stream.codec_context.time_base = 4_000_000, Fraction(1, 100)
        for place, picture in enumerate(pictures):
            frame = av.VideoFrame.from_image(picture)
            frame.pts = 10 * place if times is None else times[place]
            frame.time_base = Fraction(1, 100)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def every(step: int):
    def pick(total: int, _: float) -> list[int]:
        return list(range(0, total, step))

    return pick


def read(path: Path, step: int = 1) -> Film:
    return open_film(Video.of(str(path)), Path(), every(step), 2.0)


def levels(film: Film) -> list[int]:
    return [round(float(np.asarray(frame).mean()) / 20) for frame in film.frames]


def turned(path: Path, matrix: Sequence[float]) -> None:
    """Write a display matrix into the track header of an MP4."""
    data = path.read_bytes()
    at = data.index(b"tkhd") + 44
    a, b, c, d = (round(value * 65536) for value in matrix)
    path.write_bytes(
        data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]
    )


def edited(path: Path, *edits: tuple[float, float]) -> None:
    """Show parts of an MP4's track: the seconds of each, and where it begins (-1: nothing)."""
    data = path.read_bytes()
    header = data.index(b"mvhd")
    movie = struct.unpack(">I", data[header + 16 : header + 20])[0]
    media_header = data.index(b"mdhd")
    media = struct.unpack(">I", data[media_header + 16 : media_header + 20])[0]
    body = struct.pack(">II", 0, len(edits))
    for length, start in edits:
        begin = -1 if start < 0 else round(start * media)
        body += struct.pack(">Iii", round(length * movie), begin, 1 << 16)
    box = struct.pack(">I4s", len(body) + 8, b"elst") + body
    box = struct.pack(">I4s", len(box) + 8, b"edts") + box
    old = data.find(b"edts") - 4
    removed = struct.unpack(">I", data[old : old + 4])[0] if old > 0 else 0
    at = old if removed else data.index(b"mdia") - 4
    changed = bytearray(data[:at] + box + data[at + removed :])
    for name in (b"moov", b"trak"):
        place = changed.index(name) - 4
        size = struct.unpack(">I", changed[place : place + 4])[0] + len(box) - removed
        changed[place : place + 4] = struct.pack(">I", size)
    path.write_bytes(changed)


@pytest.mark.parametrize(("matrix", "expected"), MATRICES.items())
def test_frames_are_oriented_as_in_a_player(tmp_path, matrix, expected):
    path = write(tmp_path / "a.mp4", [corner_picture()] * 3)
    turned(path, matrix)
    film = read(path)
    assert [corners(frame) for frame in film.frames] == [expected] * 3
    assert film.frames[0].size == (SIZE if matrix[0] else SIZE[::-1])


def test_an_odd_angle_is_the_nearest_right_one(tmp_path):
    path = write(tmp_path / "a.mp4", [corner_picture()])
    turned(path, (0.17, 0.98, -0.98, 0.17))  # 80 degrees
    assert corners(read(path).frames[0]) == "BRWG"


@pytest.mark.parametrize("ending", ["mp4", "mkv", "mov", "avi", "ts"])
def test_a_constant_rate_is_exact(tmp_path, ending):
    """Containers round times to their own ticks; transformers gives place / rate."""
    from transformers.video_utils import VideoMetadata

    pictures = [gray(20 * place) for place in range(12)]
    film = read(write(tmp_path / f"a.{ending}", pictures), 3)
    theirs = VideoMetadata(total_num_frames=12, fps=10.0, frames_indices=[0, 3, 6, 9])
    assert levels(film) == [0, 3, 6, 9]
    assert film.seconds == pytest.approx(theirs.timestamps, abs=1e-9)
    assert film.frame_rate == pytest.approx(theirs.sampled_fps)
    assert film.duration == pytest.approx(1.2)


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
@pytest.mark.parametrize("start", [0, 700])
def test_a_variable_rate_has_the_times_of_its_frames(tmp_path, ending, start):
    """If a video starts later, its first frame is at zero."""
    times = [0, 10, 20, 500, 510, 900]
    path = tmp_path / f"a.{ending}"
    write(path, [gray(20 * place) for place in range(6)], [start + time for time in times])
    film = read(path)
    assert levels(film) == [0, 1, 2, 3, 4, 5]
    assert film.seconds == pytest.approx([time / 100 for time in times], abs=2e-3)
    assert film.duration >= 9
    assert read(path, 3).seconds == pytest.approx((0, 5), abs=2e-3)


@pytest.mark.parametrize(
    ("edits", "shown"),
    [
        ([(0.5, 0.3)], [3, 4, 5, 6, 7]),
        ([(1.0, 0.2)], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ([(0.4, 0.0)], [0, 1, 2, 3]),
        ([(0.5, -1), (0.3, 0.4)], [4, 5, 6]),  # an empty edit of half a second
    ],
)
def test_an_edit_list_hides_frames(tmp_path, edits, shown):
    """Videos are trimmed like this without encoding them again."""
    path = write(tmp_path / "a.mp4", [gray(20 * place) for place in range(12)])
    edited(path, *edits)
    film = read(path)
    assert levels(film) == shown
    assert film.seconds == pytest.approx([place / 10 for place in range(len(shown))])
    assert film.frame_rate == pytest.approx(10)
    assert film.duration == pytest.approx(len(shown) / 10)


def test_hidden_and_truncated_videos_are_rejected(tmp_path):
    path = write(tmp_path / "a.mp4", [corner_picture()] * 12)
    data = path.read_bytes()
    edited(path, (0.5, 9.0))
    with pytest.raises(RequestError, match="no moving picture"):
        read(path)
    # The header first, as files for the web have it, and half of the pictures
    with av.open(str(tmp_path / "b.mp4"), "w", options={"movflags": "faststart"}) as container:
        (tmp_path / "a.mp4").write_bytes(data)
        with av.open(str(tmp_path / "a.mp4")) as source:
            stream = container.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(source.streams.video[0]):
                if packet.size:
                    packet.stream = stream
                    container.mux(packet)
    whole = (tmp_path / "b.mp4").read_bytes()
    assert len(read(tmp_path / "b.mp4").frames) == 12
    (tmp_path / "b.mp4").write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(RequestError, match=r"ends early: \d of 12 frames") as caught:
        read(tmp_path / "b.mp4")
    assert "copy" in caught.value.hint


def test_packets_without_frames_are_not_counted(tmp_path):
    """Matroska counts no frames: if it has more packets than frames, the decoder counts."""
    path = write(tmp_path / "a.mkv", [gray(20 * place) for place in range(12)])
    with av.open(str(path)) as source, av.open(str(tmp_path / "b.mkv"), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        last = None
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                last = bytes(packet), packet.pts
                packet.stream = stream
                container.mux(packet)
        assert last is not None
        empty = av.Packet(b"\x00\x00\x01\xb6\x40")  # a picture of MPEG-4 that is not coded
        empty.stream, empty.time_base = stream, stream.time_base
        empty.pts = empty.dts = last[1] + 100
        container.mux(empty)
    assert levels(read(tmp_path / "b.mkv", 1))[:12] == list(range(12))


def test_unknown_codec_is_rejected(tmp_path):
    path = write(tmp_path / "a.mkv", [corner_picture()] * 2)
    data = path.read_bytes()
    assert b"V_MPEG4/ISO/ASP" in data
    path.write_bytes(data.replace(b"V_MPEG4/ISO/ASP", b"V_UNHEARD/OF/XX"))
    with pytest.raises(RequestError, match="no moving picture") as caught:
        read(path)
    assert caught.value.hint


def test_times_that_go_back_are_rejected(tmp_path):
    """A block of Matroska has a time relative to its cluster: two bytes after 0x81."""
    path = write(tmp_path / "a.mkv", [gray(20 * place) for place in range(12)])
    data = bytearray(path.read_bytes())
    block = data.index(b"\x81" + (500).to_bytes(2, "big"))
    data[block + 1 : block + 3] = (150).to_bytes(2, "big")
    path.write_bytes(data)
    with pytest.raises(RequestError, match="the times of its frames do not ascend") as caught:
        read(path)
    assert "copy" in caught.value.hint


def test_texts_that_are_not_utf8_do_not_matter(tmp_path):
    path = write(tmp_path / "a.mkv", [corner_picture()] * 3)
    data = path.read_bytes()
    assert data.count(b"Lavf") > 1
    path.write_bytes(data.replace(b"Lavf", b"La\xff\xc7"))
    assert len(read(path).frames) == 3


_PEAK = """
import resource, sys
from pathlib import Path
from edgellm.multimodal.media import Video
from edgellm.multimodal.video import open_film
fit = lambda size, count: lambda frame: frame.resize((28, 28))
source = sys.argv[1] if sys.argv[2] == "file" else [sys.argv[1]] * int(sys.argv[3])
film = open_film(Video.of(source), Path(), lambda total, _: range(int(sys.argv[3])), 2.0, fit)
assert [frame.size for frame in film.frames] == [(28, 28)] * int(sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.each_change("file")
@pytest.mark.parametrize("kind", ["file", "list"])
def test_frames_are_resized_while_they_are_decoded(tmp_path, kind):
    """80 frames of 1080p have 500 MB; their peak is near that of four."""
    picture = Image.new("RGB", (1920, 1080), "red")
    path = tmp_path / ("a.mp4" if kind == "file" else "a.png")
    if kind == "list":
        picture.save(path)
    else:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = *picture.size, "yuv420p"
            frame = av.VideoFrame.from_image(picture)
            for place in range(80):
                frame.pts = place
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    peaks = []
    for count in (4, 80):
        command = [sys.executable, "-c", _PEAK, str(path), kind, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 100  # MB


def test_the_first_frame_decides_how_frames_are_resized(tmp_path):
    """After the display matrix, with the number of frames that are shown."""
    path = write(tmp_path / "a.mp4", [corner_picture()] * 6)
    turned(path, (0, 1, -1, 0))
    asked = []

    def fit(size, count):
        asked.append((size, count))
        return lambda frame: frame.resize((12, 16))

    film = open_film(Video.of(str(path)), Path(), every(2), 2.0, fit)
    assert asked == [((HEIGHT, WIDTH), 3)]
    assert [corners(frame) for frame in film.frames] == ["BRWG"] * 3
