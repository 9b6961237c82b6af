"""Video prompts: frames, times and positions; greedy token ids equal those of transformers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from eagle_reference import Layout
from image_checkpoints import (
    frames_first,
    gemma4_film,
    minicpm_film,
    picture,
    without_torchvision,
)
from PIL import Image
from vlm_engines import Engines, Reference, build_vlm

from edgellm.core.errors import (
    LimitError,
    RequestError,
)
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import start_request
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.multimodal import video as films
from edgellm.multimodal.media import Video
from edgellm.multimodal.video import Film, open_film

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0)
EAGLE3 = Layout({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40})
RATE = 2.0  # frames a second of a list


FAMILIES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "smolvlm",
    "muse_glimmer",
    "gemma4_unified",
    "minicpmv4_7",
]
FAMILIES += [pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma4", "minicpmv4_6")]


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request, tmp_path_factory) -> Engines:
    folder, limits = tmp_path_factory.mktemp(request.param), {}
    if request.param.startswith("gemma4"):  # five frames of 70 tokens, and an image
        limits = {"max_image_tokens": 440}
    return build_vlm(folder, request.param, draft=EAGLE3, **limits)


@pytest.fixture(scope="module")
def llm(engines) -> LLM:
    return LLM(engines.engine, multimodal_engine_dir=engines.visual_engine)


@pytest.fixture(scope="module")
def reference(engines) -> Reference:
    return Reference(engines.checkpoint)


@pytest.fixture(scope="module")
def frames(tmp_path_factory) -> list[str]:
    """Paths of five frames: two and a half temporal patches."""
    folder = tmp_path_factory.mktemp("frames")
    for index in range(5):
        picture(48, 32, seed=index).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in range(5)]


def _messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(items)}]


def _film(frames: Any) -> dict[str, Any]:
    return {"type": "video", "video": frames}


TEXT = {"type": "text", "text": "w1 w2"}


def _patches(
    paths: list[str], rows: int, columns: int, side: int, resample: Image.Resampling
) -> np.ndarray:
    """[temporal patches * P, 3 * 2 * p * p], from the definition, frame by frame."""
    last = len(paths) - 1
    planes = []
    for at in range(len(paths) + len(paths) % 2):
        size = columns * side, rows * side
        image = Image.open(paths[min(at, last)]).resize(size, resample)
        pixels = np.asarray(image, np.float64) / 255
        planes.append(pixels)
    found = []
    for first, second in zip(planes[0::2], planes[1::2], strict=True):
        for block_row in range(rows // 2):
            for block in range(columns // 2):
                for inner in range(4):
                    row, column = 2 * block_row + inner // 2, 2 * block + inner % 2
                    place = (
                        slice(row * side, (row + 1) * side),
                        slice(column * side, (column + 1) * side),
                    )
                    both = np.stack([first[place], second[place]])  # [2, p, p, 3]
                    found.append(both.transpose(3, 0, 1, 2))
    return np.stack(found)


def _tiles(checkpoint: Path, path: str) -> np.ndarray:
    """[1, 3, S, S]: a frame, as an image of transformers that is not split."""
    from transformers import AutoImageProcessor

    pictures = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    found = pictures(Image.open(path), do_image_splitting=False, return_tensors="np")
    return found["pixel_values"][0]


def _placed_frames(model_type: str, vision: Any, paths: list[str]) -> dict[str, Any]:
    """Inputs of Gemma 4's encoder by transformers' video processor."""
    frames, merged = [Image.open(path) for path in paths], vision.pooling_kernel_size
    found = gemma4_film(model_type, frames, vision.patch_size, merged)
    names = "pixel_values_videos", "video_position_ids", "num_frames_per_video"
    return {name: found[name] for name in names}


def _pixels(llm: LLM, paths: list[str], grid: tuple[int, int]) -> np.ndarray:
    rules = llm.images.processor.rules
    side = llm.images.processor.patch_size
    raw = _patches(paths, *grid, side, rules.resample)
    table = rules.table
    slope, start = table[:, 255] - table[:, 0], table[:, 0]
    scaled = raw * slope[:, None, None, None] + start[:, None, None, None]
    found = scaled.reshape(len(raw), -1).astype(np.float32)
    if llm.images.manifest.vision.model_type != "muse_glimmer":
        return found
    passes = np.split(found, len(found) // (grid[0] * grid[1]))
    return np.concatenate([frames_first(each, grid, 2) for each in passes])


@pytest.mark.parametrize("kind", ["film", "film_and_image", "spec"])
def test_outputs_equal_transformers(engines, llm, reference, frames, tmp_path, kind):
    items = [_film(frames), TEXT]
    image = tmp_path / "still.png"
    picture(40, 40, seed=9).save(image)
    if kind == "film_and_image":
        items = [{"type": "image", "image": str(image)}, TEXT, _film(frames), TEXT]
    is_tiles = engines.model_type == "smolvlm"
    used = llm
    if kind == "spec":
        used = LLM(
            engines.engine,
            spec=SpecOptions(top_k=4, steps=3, verify_size=12),
            multimodal_engine_dir=engines.visual_engine,
        )
    answer = used.generate(_messages(*items), sampling=GREEDY, max_generate_length=12)
    list(answer)
    if kind == "spec":
        assert answer.profile.rounds
    config, vocabulary = reference.model.config, llm.manifest.decoder.vocab_size
    seen = used.images.see([Video.of(frames)], Path())[0]
    grid = seen.prepared.grid
    stills = [used.images.processor.prepare(Image.open(image), 200)] if len(items) == 4 else []
    first = sum(one.num_tokens for one in stills)
    film_id = config.image_token_id if is_tiles else config.video_token_id
    ids = []
    for token in answer.prompt.token_ids:
        row = token - vocabulary
        ids.append(token if row < 0 else config.image_token_id if row < first else film_id)
    if is_tiles:
        tiles = [_tiles(engines.checkpoint, path) for path in frames]
        assert ids.count(film_id) == first + len(tiles) * len(seen.embeds) // len(frames)
        together = [*(one.pixels for one in stills), *tiles]
        assert answer.token_ids == reference.answer(ids, together, [], 12)
        return
    stills_of = [one.pixels for one in stills], [one.passes or one.grid for one in stills]
    if engines.model_type.startswith("minicpm"):
        shown = [Image.open(path) for path in frames]
        side = config.vision_config.patch_size
        found = minicpm_film(shown, None, side, 16 * side)
        names = "pixel_values_videos", "target_sizes_videos"
        film = {name: found[name] for name in names}
        assert answer.token_ids == reference.answer(ids, *stills_of, 12, **film)
        return
    if engines.model_type.startswith("gemma4"):
        film = _placed_frames(engines.model_type, config.vision_config, frames)
        merged = 1 if engines.model_type == "gemma4_unified" else 4
        assert ids.count(film_id) * merged == (film["video_position_ids"][..., 0] >= 0).sum()
        assert answer.token_ids == reference.answer(ids, *stills_of, 12, **film)
        return
    passes = (len(frames) + 1) // 2
    assert ids.count(config.video_token_id) == passes * grid[0] * grid[1] // 4
    film = {
        "pixel_values_videos": torch.from_numpy(_pixels(llm, frames, grid)),
        "video_grid_thw": torch.tensor([(passes, *grid)]),
    }
    if engines.model_type == "qwen2_5_vl":
        film["second_per_grid_ts"] = torch.tensor([2 / RATE])
    assert answer.token_ids == reference.answer(ids, *stills_of, 12, **film)


def test_features_are_cached_by_content(llm, frames, monkeypatch, tmp_path):
    before = llm.images.see([Video.of(frames)], Path())[0]
    copies = []
    for index, path in enumerate(frames):
        copies.append(str(tmp_path / f"copy{index}.bmp"))
        Image.open(path).save(copies[-1])
    monkeypatch.setattr(llm.images._network, "encode", None)
    assert llm.images.see([Video.of(copies)], Path())[0] is before
    monkeypatch.undo()
    other = llm.images.see([Video.of(frames[:4])], Path())[0]
    assert other is not before
    assert not np.array_equal(other.embeds[: len(before.embeds)], before.embeds)


def test_video_tokens_stay_within_the_limit(llm, tmp_path):
    """Many large frames become small ones, tiles do not; too many are rejected."""
    paths = []
    for index in range(40):
        paths.append(str(tmp_path / f"{index}.png"))
        Image.new("RGB", (240, 160), (index, 0, 0)).save(paths[-1])
    seen = llm.images.see([Video.of(paths)], Path())[0]
    least = 39 if llm.manifest.decoder.images.model_type == "smolvlm" else 200
    assert least < len(seen.embeds) <= llm.images.manifest.max_image_tokens
    message = r"more pairs of frames|840 frames has (at least )?\d+ tokens"
    with pytest.raises((LimitError, RequestError), match=message):
        llm.images.see([Video.of(paths * 21)], Path())


def test_a_request_of_a_file(llm, frames):
    raw = {"messages": _messages(_film(frames), TEXT), "temperature": 0, "max_generate_length": 4}
    started = start_request(llm, Options(), raw, 0)
    list(started.answer)
    direct = llm.generate(_messages(_film(frames), TEXT), sampling=GREEDY, max_generate_length=4)
    list(direct)
    assert started.answer.token_ids == direct.token_ids
    for wrong, message in (
        (_film([]), "no frames"), (_film(["nowhere.png"]), "cannot read"),
        ({"type": "video", "video": None}, "video item needs"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            start_request(llm, Options(), {"messages": _messages(wrong)}, 0)


def test_sampling_of_each_family(llm, engines):
    """From transformers' rules: 10 s at 25 frames a second, and shorter videos."""
    rules = llm.images.processor.film
    pick = llm.images.processor.pick_frames
    found = {total: pick(total, 25.0, 400) for total in (250, 30, 5, 1)}
    if engines.model_type == "smolvlm":
        from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
        from transformers.video_utils import VideoMetadata

        for total in (*found, 20000):
            film = VideoMetadata(total_num_frames=total, fps=25.0, duration=total / 25)
            for maximum in (400, 10):  # tokens, of which a tile has one
                own = SimpleNamespace(num_frames=min(rules.max_frames, maximum), fps=1)
                theirs = SmolVLMVideoProcessor.sample_frames(own, film)
                assert theirs.tolist() == pick(total, 25.0, maximum)
    elif engines.model_type == "muse_glimmer":
        from transformers.video_utils import VideoMetadata

        module = without_torchvision("muse_glimmer.video_processing_muse_glimmer")
        own = SimpleNamespace(num_frames=8, fps=2.0)
        for total in (*found, 20001):
            film = VideoMetadata(total_num_frames=total, fps=25.0)
            theirs = module.MuseGlimmerVideoProcessor.sample_frames(own, film, 2)
            assert theirs.tolist() == pick(total, 25.0, 400)
    elif engines.model_type.startswith("gemma4"):
        assert found[250] == [place * 250 // 32 for place in range(32)]
        assert found[30] == [*range(30)]
        assert found[5] == [*range(5)]
    elif engines.model_type.startswith("minicpm"):
        assert (found[250], found[30], found[5]) == ([*range(0, 250, 25)], [0, 25], [0])
    elif engines.model_type.startswith("qwen3"):
        assert (rules.min_pixels, rules.max_pixels) == (4096, 25165824)  # of its own file
        assert found[250] == np.linspace(0, 249, 20).round().astype(int).tolist()
        assert found[30] == [0, 10, 19, 29]
        assert found[5] == [0, 1, 3, 4]
    else:
        assert found[250] == [int(place) for place in np.arange(0, 250, 12.5)]
        assert found[30] == [0, 7, 15, 22]
        assert found[5] == [0, 1, 2, 3]
    assert found[1] == [0]


def test_video_files_need_pyav_and_are_checked(tmp_path, monkeypatch):
    video = Video.of(str(tmp_path / "film.mp4"))

    def shown(total: int, rate: float) -> list[int]:
        del rate
        return list(range(0, total, 2))

    with monkeypatch.context() as patch:
        patch.setattr(films.importlib.util, "find_spec", lambda _: None)
        with pytest.raises(RequestError, match="need PyAV"):
            open_film(video, Path(), shown, RATE)
    av = pytest.importorskip("av")
    with av.open(video.frames[0], "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for level in range(0, 240, 24):
            image = Image.new("RGB", (64, 48), (level, level, level))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    film = open_film(video, Path(), shown, RATE)
    assert isinstance(film, Film)
    assert [round(np.asarray(frame).mean() / 24) for frame in film.frames] == [0, 2, 4, 6, 8]
    assert film.seconds == pytest.approx((0, 0.2, 0.4, 0.6, 0.8))
    assert film.frame_rate == pytest.approx(5)
    (tmp_path / "film.mp4").write_bytes(b"no film at all")
    with pytest.raises(RequestError, match="no video that can be read"):
        open_film(video, Path(), shown, RATE)


def test_a_film_with_one_changed_bit_is_read_or_refused(tmp_path):
    """Of Matroska, whose header has no number of frames: some changes leave packets, no frames."""
    av = pytest.importorskip("av")
    path = tmp_path / "film.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for level in (0, 100):
            image = Image.new("RGB", (32, 24), (level,) * 3)
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    data = path.read_bytes()
    for place in range(data.index(b"V_MPEG4") - 32, data.index(b"V_MPEG4") + 160):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with contextlib.suppress(RequestError):
            film = open_film(Video.of(str(path)), Path(), lambda total, _: range(total), RATE)
            assert len(film.frames) == len(film.seconds) > 0, place
