"""Pictures as transformers' processors on Pillow prepare them: the same floats and token ids."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from image_checkpoints import (
    FAMILIES,
    IDEFICS,
    INTERNVL,
    QWEN,
    byte_tokenizer,
    channels_last,
    frames_first,
    gemma4_film,
    minicpm_film,
    patches_of,
    picture,
    places_of,
    planes_of,
    planes_of_passes,
    strip_of,
    without_torchvision,
    write_processor,
)
from image_checkpoints import reference as transformers_processor
from PIL import Image

from edgellm.core.errors import (
    LimitError,
    RequestError,
    UnsupportedModelError,
)
from edgellm.multimodal import processors
from edgellm.multimodal.processors import expand
from edgellm.multimodal.processors.smolvlm_video import in_words
from edgellm.multimodal.video import Film

SIZES = [(1, 1), (28, 28), (1, 150), (199, 1), (31, 57), (333, 77), (64, 512), (640, 480)]
PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 30,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
LEAST = {  # tokens of an image
    "qwen2_5_vl": 1,
    "internvl": 1,
    "idefics3": 4,
    "gemma3": 4,
    "mistral3": 1,
    "lfm2_vl": 1,
    "gemma4": 1,
    "gemma4_unified": 1,
    "minicpmv4_6": 1,
    "muse_glimmer": 1,
    "minicpmv4_7": 1,
}
SIZE = st.tuples(st.integers(1, 300), st.integers(1, 300)).filter(
    lambda size: max(size) <= 200 * min(size)
)


def is_strip(size, edge=112):
    """Whether transformers' Pixtral processor fails: it rounds the short side to nothing."""
    return max(size) > edge and min(size) * edge < max(size)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Our processor and transformers', by model type and changed settings."""
    import transformers  # noqa: F401 -- here, lest Hypothesis search for why it is not there

    @functools.cache
    def pair(model_type, **changes):
        folder = write_processor(tmp_path_factory.mktemp(model_type), model_type, **changes)
        return processors.load(folder), transformers_processor(folder, model_type)

    return pair


def pixels_of(model_type, output):
    """Without the zero tiles that fill a batch."""
    pixels = np.asarray(output["pixel_values"])
    if model_type == "lfm2_vl":  # patches of all passes, without padding
        return np.concatenate([
            patches[: rows * columns].ravel()
            for patches, (rows, columns) in zip(pixels, output["spatial_shapes"], strict=True)
        ])  # fmt: skip
    if model_type.startswith("minicpm"):  # patches of all passes, one right of the other
        side = pixels.shape[2]
        return pixels.reshape(3, side, -1, side).transpose(2, 1, 3, 0).ravel()
    if model_type.startswith("gemma4"):
        places = np.asarray(output["image_position_ids"])
        return pixels[(places >= 0).all(axis=-1)].ravel()
    if model_type == "mistral3":  # images of their own sizes, without the padding of a batch
        sizes = zip(pixels, np.asarray(output["image_sizes"]), strict=True)
        return np.concatenate([image[:, :high, :wide].ravel() for image, (high, wide) in sizes])
    return pixels[0] if model_type in ("idefics3", "smolvlm") else pixels


def patches_by_row(ours, prepared):
    """Patches of images row by row, and their places."""
    planes = [planes_of(each.pixels, each.grid, ours.merge_size) for each in prepared]
    patches = [patches_of(each, ours.patch_size).ravel() for each in planes]
    return patches, [places_of(each.grid) for each in prepared]


def compare(model_type, ours, theirs, images, texts):
    """The whole of a prompt with its images, through both."""
    prompt = ours.image_token.join(texts)
    prepared = [ours.prepare(image) for image in images]
    output = theirs(images=images, text=[prompt], return_tensors="np")
    pixels = [item.pixels for item in prepared]
    if model_type.startswith("gemma4"):
        pixels, places = patches_by_row(ours, prepared)
        found = np.asarray(output["image_position_ids"])
        assert np.array_equal(found[(found >= 0).all(axis=-1)], np.concatenate(places))
    if model_type == "cosmos3_edge":
        pixels = [channels_last(each, ours.patch_size) for each in pixels]
    if model_type == "muse_glimmer":
        pixels = [frames_first(each.pixels, each.grid, ours.merge_size) for each in prepared]
    if model_type == "mistral3":
        pixels = [planes_of(each.pixels, each.grid, ours.merge_size).ravel() for each in prepared]
    if model_type.startswith(("lfm2_vl", "minicpm")):
        planes = [part for each in prepared for part in planes_of_passes(each, ours.merge_size)]
        pixels = [patches_of(each, ours.patch_size).ravel() for each in planes]
    found = np.concatenate(pixels)
    assert found.dtype == np.float32
    assert np.array_equal(found, pixels_of(model_type, output))
    tokenizer = theirs.tokenizer._tokenizer
    ids = tokenizer.encode(expand(prompt, ours.image_token, prepared)).ids
    assert ids == output["input_ids"][0].tolist()
    image_id = tokenizer.token_to_id(getattr(ours, "feature_token", ours.image_token))
    assert ids.count(image_id) == sum(item.num_tokens for item in prepared)
    for item, image in zip(prepared, images, strict=True):
        assert item.pixels.flags.c_contiguous
        assert ours.count(image.size) == item.num_tokens
    return prepared, output


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_sizes(pairs, model_type, size):
    if model_type == "mistral3" and is_strip(size):
        assert pairs(model_type)[0].prepare(picture(*size)).num_tokens == 8  # one token wide
        return
    compare(model_type, *pairs(model_type), [picture(*size)], ["a ", " b"])


@settings(max_examples=25)
@given(size=SIZE)
@pytest.mark.parametrize("model_type", sorted({*LEAST, "qwen3_vl", "cosmos3_edge"} - {"gemma3"}))
def test_many_sizes(pairs, model_type, size):
    assume(model_type != "mistral3" or not is_strip(size))
    if model_type == "lfm2_vl":
        # A thumbnail of a strip may have more than 80 patches, which transformers cannot stack
        *tiles, (rows, columns) = pairs(model_type)[0].prepare(picture(*size)).passes
        assume(not tiles or rows * columns <= 80)
    compare(model_type, *pairs(model_type), [picture(*size)], ["", ""])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_several_images(pairs, model_type):
    images = [picture(90, 40), picture(40, 90, 1), picture(33, 33, 2), picture(200, 60, 3)]
    texts = ["before ", "\nbetween: ", "", " and é ", "\n\nafter"]
    prepared, output = compare(model_type, *pairs(model_type), images, texts)
    if model_type.startswith(("qwen", "lfm3", "cosmos3", "muse")):
        grids = [(1, *item.grid) for item in prepared]
        assert np.array_equal(output["image_grid_thw"], grids)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2_vl", {"min_pixels": 3136, "max_pixels": 12845056}),
        ("qwen3_vl", {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
        ("qwen2_5_vl", {"resample": 2, "temporal_patch_size": 2, "rescale_factor": 0.005}),
        ("internvl", {"min_patches": 3, "max_patches": 6}),
        ("internvl", {"max_patches": 1}),
        ("idefics3", {"do_image_splitting": False}),
        ("idefics3", {"size": {"longest_edge": 5000}, "resample": 3}),
        ("smolvlm", {"size": {"longest_edge": 100}}),
        ("smolvlm", {"size": {"longest_edge": 20}}),
        ("lfm2_vl", {"do_image_splitting": False}),
        ("lfm2_vl", {"use_thumbnail": False, "max_tiles": 7}),
        ("lfm2_vl", {"min_tiles": 3, "min_image_tokens": 1, "tile_size": 48}),
        ("minicpmv4_6", {"slice_mode": False, "scale_resolution": 100}),
        ("minicpmv4_6", {"max_slice_nums": 9, "scale_resolution": 40, "use_image_id": False}),
        ("minicpmv4_6", {"scale_resolution": 30, "patch_size": 4, "max_slice_nums": 7}),
        ("gemma4", {"max_soft_tokens": 140, "image_seq_length": 140}),
        ("gemma4", {"do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.5] * 3}),
        ("gemma4", {"resample": 2, "rescale_factor": 0.005, "do_normalize": None}),
        ("mistral3", {"size": {"longest_edge": 1540}, "patch_size": 14}),
        ("mistral3", {"size": {"longest_edge": 30}, "patch_size": {"height": 14, "width": 14}}),
        ("mistral3", {"size": {"longest_edge": 9}, "resample": 2}),
        ("muse_glimmer", {"max_image_tokens": 4096, "rescale_factor": 0.005}),
        ("muse_glimmer", {"max_image_tokens": 3, "image_mean": [0.4, 0.5, 0.6], "resample": 3}),
        ("gemma3", {"do_pan_and_scan": True}),
        ("gemma3", {**PAN_AND_SCAN, "do_pan_and_scan": False}),
        ("gemma3", PAN_AND_SCAN),
        ("gemma3", {**PAN_AND_SCAN, "pan_and_scan_max_num_crops": 9}),
        ("gemma3", {**PAN_AND_SCAN, "pan_and_scan_min_crop_size": 7}),
    ],
    ids=str,
)
def test_settings(tmp_path, model_type, changes):
    folder = write_processor(tmp_path, model_type, **changes)
    theirs = transformers_processor(folder, model_type)
    for size in ((1000, 30), (42, 280)):
        if model_type == "mistral3" and is_strip(size, changes["size"]["longest_edge"]):
            continue
        compare(model_type, processors.load(folder), theirs, [picture(*size)], ["a", "b"])


def test_minicpms_tokens_may_have_fewer_patches(tmp_path):
    folder = write_processor(tmp_path, "minicpmv4_6", downsample_mode="4x")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "downsample_mode": "4x"}))
    ours, theirs = processors.load(folder), transformers_processor(folder, "minicpmv4_6")
    (prepared,), _ = compare("minicpmv4_6", ours, theirs, [picture(200, 90)], ["a", "b"])
    assert prepared.num_tokens == len(prepared.pixels) // 4


# ------------------------------------------------------------------------------------- limits
@settings(max_examples=60)
@given(size=SIZE, max_tokens=st.integers(1, 70))
@pytest.mark.parametrize("model_type", LEAST)
def test_limits_are_respected(pairs, model_type, size, max_tokens):
    ours, _ = pairs(model_type)
    least = LEAST[model_type]
    if max_tokens < least:
        with pytest.raises(LimitError, match=f"at least {least} token.*{max_tokens} are allowed"):
            ours.count(size, max_tokens)
        return
    count = ours.count(size, max_tokens)
    assert count <= max_tokens
    free = ours.count(size)
    assert count == free if free <= max_tokens else count < free
    image = picture(*size)
    prepared = ours.prepare(image, max_tokens)
    feature = getattr(ours, "feature_token", ours.image_token)
    assert prepared.num_tokens == count == prepared.prompt.count(feature)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_token_is_too_few(pairs, model_type):
    with pytest.raises(LimitError, match="and 0 are allowed"):
        pairs(model_type)[0].prepare(picture(50, 50), 0)


@given(size=SIZE, max_tokens=st.integers(10, 50))
@settings(max_examples=15)
def test_qwens_limit_is_a_smaller_area(pairs, size, max_tokens):
    """Where transformers' own rounding stays below the limit, the result is the same."""
    ours, theirs = pairs("qwen2_5_vl")
    area = {"shortest_edge": 4 * 28 * 28, "longest_edge": max_tokens * 28 * 28}
    image = picture(*size)
    output = theirs.image_processor(image, size=area, return_tensors="np")
    if output["image_grid_thw"].prod() // 4 <= max_tokens:
        assert np.array_equal(ours.prepare(image, max_tokens).pixels, output["pixel_values"])


@given(size=SIZE, max_tiles=st.integers(1, 11))
@settings(max_examples=15)
def test_internvls_limit_is_a_smaller_number_of_tiles(pairs, size, max_tiles):
    ours, theirs = pairs("internvl")
    image = picture(*size)
    output = theirs.image_processor(
        image, crop_to_patches=True, max_patches=max_tiles, return_tensors="np"
    )
    allowed = max_tiles + 1 if max_tiles > 1 else 1
    assert np.array_equal(ours.prepare(image, allowed).pixels, output["pixel_values"])


@settings(max_examples=40)
@given(size=SIZE, max_tokens=st.integers(4, 24))
def test_images_are_cut_as_by_pan_and_scan(pairs, size, max_tokens):
    """With too few tokens for the crops, the whole image is left."""
    ours, theirs = pairs("gemma3", **PAN_AND_SCAN)
    image = picture(*size)
    (prepared,), output = compare("gemma3", ours, theirs, [image], ["a", "b"])
    assert prepared.grid == (1, len(output["pixel_values"]))
    fitted = ours.prepare(image, max_tokens)
    wanted = prepared.pixels if len(prepared.pixels) * 4 <= max_tokens else prepared.pixels[:1]
    assert np.array_equal(fitted.pixels, wanted)
    assert fitted.prompt.count("<image_soft_token>") == 4 * len(wanted)


@settings(max_examples=30)
@given(size=SIZE, max_tokens=st.integers(2, 60))
def test_pixtrals_limit_is_a_shorter_edge(pairs, size, max_tokens):
    assume(not is_strip(size, 14))
    ours, theirs = pairs("mistral3")
    image = picture(*size)
    prepared = ours.prepare(image, max_tokens)
    edge = 14 * max(prepared.grid) // 2
    wanted = theirs.image_processor(image, size={"longest_edge": edge}, patch_size=14)
    whole = ours.prepare(image)
    if prepared.num_tokens == whole.num_tokens:
        wanted = theirs.image_processor(image, patch_size=14)
    found = planes_of(prepared.pixels, prepared.grid, 2)
    assert np.array_equal(found, wanted["pixel_values"][0])


@settings(max_examples=30)
@given(size=SIZE, max_tokens=st.integers(1, 60))
def test_gemma_4s_limit_is_a_smaller_budget(pairs, size, max_tokens):
    """Any number, whereas files have one of five; transformers rounds a single token to none."""
    from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs

    ours, (width, height) = pairs("gemma4")[0], size
    prepared = ours.prepare(picture(*size), max_tokens)
    budget = max_tokens if ours.count(size) > max_tokens else 70
    try:
        sides = theirs.get_aspect_ratio_preserving_size(height, width, 4, budget * 9, 3)
    except ValueError:
        assert budget == prepared.num_tokens == 1
    else:
        assert prepared.grid == (sides[0] // 4, sides[1] // 4)


def test_idefics_limit_is_a_shorter_edge(pairs):
    ours, theirs = pairs("idefics3")
    image = picture(300, 200)
    expected = theirs.image_processor(image, size={"longest_edge": 64}, return_tensors="np")
    prepared = ours.prepare(image, max_tokens=27)
    assert np.array_equal(prepared.pixels, expected["pixel_values"][0])
    assert prepared.grid == (2, 2)
    single = ours.prepare(image, max_tokens=19)
    assert (single.grid, single.num_tokens, len(single.pixels)) == ((1, 1), 4, 1)


def test_shapes_that_qwen_does_not_support(pairs):
    with pytest.raises(RequestError, match="201 x 1 pixels is longer than 200 times") as caught:
        pairs("qwen2_vl")[0].prepare(picture(201, 1))
    assert caught.value.hint


# ------------------------------------------------------------------------------------ prompts
def test_placeholders_and_images_must_match(pairs):
    ours, _ = pairs("qwen2_vl")
    one = ours.prepare(picture(56, 56))
    assert expand("a", ours.image_token, []) == "a"
    for prompt, images in (("a", [one]), (f"{ours.image_token}b{ours.image_token}", [one])):
        with pytest.raises(RequestError, match="places for images, but 1 images") as caught:
            expand(prompt, ours.image_token, images)
        assert ours.image_token in caught.value.hint


def test_prompts_by_hand(pairs):
    assert pairs("qwen2_vl")[0].prepare(picture(56, 56)).prompt == "<|image_pad|>" * 4
    internvl = pairs("internvl")[0].prepare(picture(56, 28))
    assert internvl.prompt == "<img>" + "<IMG_CONTEXT>" * 3 + "</img>"
    minicpm = pairs("minicpmv4_6")[0].prepare(picture(96, 64), max_tokens=48)
    assert minicpm.passes == ((12, 20), (20, 12), (20, 12))
    part = "<|image_pad|>" * 15
    assert minicpm.prompt == f"<image>{part}</image>" + f"<slice>{part}</slice>" * 2
    assert minicpm.numbered_prompt(7) == f"<image_id>7</image_id>{minicpm.prompt}"
    fence, features = "<fake_token_around_image>", "<image>" * 4
    idefics = pairs("idefics3")[0].prepare(picture(64, 32), max_tokens=12)
    assert idefics.grid == (1, 2)
    assert idefics.prompt == (
        f"{fence}<row_1_col_1>{features}{fence}<row_1_col_2>{features}\n\n"
        f"{fence}<global-img>{features}{fence}"
    )


def test_smolvlm_videos_have_an_introduction(pairs, monkeypatch):
    """The text about a video, and its frames as images that are not split."""
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.video_utils import VideoMetadata

    ours, theirs = pairs("smolvlm")
    monkeypatch.setattr(processing_smolvlm, "num2words", {3: "three"}.get)
    frames = tuple(picture(90, 40, seed) for seed in range(3))
    at = [25, 1600, 90005]
    metadata = VideoMetadata(100000, fps=25.0, duration=4000.0, frames_indices=at)
    seconds = tuple(place / 25 for place in at)
    tiles = tuple(map(ours.fit_frames(frames[0].size, 3, 100, 100), frames))
    found = ours.prepare_film(Film(frames=tiles, seconds=seconds, frame_rate=1.0, duration=4000.0))
    inputs = {"pixel_values": np.zeros((1, 3)), "video_metadata": [metadata]}
    assert found.whole.prompt == theirs.replace_video_token(inputs, 0)
    for frame, tile in zip(frames, found.passes, strict=True):
        alone = theirs.image_processor(frame, do_image_splitting=False, return_tensors="np")
        assert np.array_equal(tile, alone["pixel_values"][0])
    with pytest.raises(LimitError, match="3 frames has 12 tokens; 11 are allowed"):
        ours.fit_frames(frames[0].size, 3, 11, 100)


def test_muse_glimmers_videos_have_times(pairs):
    """Three frames are two temporal patches, the second with its frame twice."""
    import torch
    from transformers.video_utils import VideoMetadata

    ours, theirs = pairs("muse_glimmer")
    module = without_torchvision("muse_glimmer.video_processing_muse_glimmer")
    frames, at = tuple(picture(190, 120, seed) for seed in range(3)), [3, 77, 1605]
    film = Film(
        frames=tuple(map(ours.fit_frames(frames[0].size, 3, 100, 100), frames)),
        seconds=tuple(place / 25 for place in at),
        frame_rate=1.0,
        duration=70.0,
    )
    found, (height, width) = ours.prepare_film(film), module.smart_resize(120, 190, 28, 12)
    resized = [each.resize((width, height), Image.Resampling.LANCZOS) for each in frames]
    planes = np.stack([np.asarray(each).transpose(2, 0, 1) for each in resized]) / 255 * 2 - 1
    own = module.MuseGlimmerVideoProcessor
    patches, *grid = own.patchify(None, torch.from_numpy(planes[None]), 14, 2)
    rows = [frames_first(each, found.whole.grid, 2) for each in found.passes]
    assert grid == [len(found.passes), *found.whole.grid]
    np.testing.assert_allclose(np.concatenate(rows), patches[0].numpy(), atol=1e-6)
    theirs.video_processor = SimpleNamespace(
        merge_size=2, temporal_patch_size=2, frame_timestamp_format="Time: {timestamp:.1f}s"
    )
    metadata = VideoMetadata(1900, fps=25.0, duration=76.0, frames_indices=at)
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    prompt = theirs.replace_video_token(inputs, 0).replace("<|video|>", ours.image_token)
    assert found.whole.prompt == prompt
    with pytest.raises(LimitError, match="more pairs of frames than image tokens"):
        ours.fit_frames((190, 120), 6, 2, 100)


@settings(max_examples=8)
@given(size=SIZE, count=st.integers(1, 4), start=st.integers(0, 10000))
@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_gemma_4s_videos_are_those_of_transformers(pairs, model_type, size, count, start):
    """Patches and places of frames, and the prompt with their times."""
    from transformers.video_utils import VideoMetadata

    ours, theirs = pairs(model_type)
    frames = [picture(*size, seed) for seed in range(count)]
    output = gemma4_film(model_type, frames, 4, 3)
    at = [start + 40 * place for place in range(count)]
    output["video_metadata"] = [VideoMetadata(20000, fps=12.5, frames_indices=at)]
    fitted = tuple(map(ours.fit_frames(size, count, 70 * count, 280), frames))
    seconds = tuple(place / 12.5 for place in at)
    found = ours.prepare_film(Film(frames=fitted, seconds=seconds, frame_rate=1.0, duration=1600.0))
    wanted = theirs.replace_video_token(output, 0).replace("<|video|>", ours.image_token)
    assert found.whole.prompt == wanted
    assert found.whole.num_tokens == wanted.count(ours.image_token)
    places = np.asarray(output["video_position_ids"])
    for frame, pixels, own in zip(found.passes, output["pixel_values_videos"], places, strict=True):
        patches = patches_of(planes_of(frame, found.whole.grid, ours.merge_size), ours.patch_size)
        is_patch = (own >= 0).all(axis=-1)
        np.testing.assert_array_equal(patches, pixels.numpy()[is_patch])
        assert np.array_equal(own[is_patch], places_of(found.whole.grid))


@pytest.mark.parametrize("settings", [{}, {"num_frames": 5}, {"num_frames": None, "fps": 2}])
def test_gemma_4s_frames_are_sampled_as_by_transformers(tmp_path, settings):
    """A video of fewer frames than wanted, which transformers rejects, is taken as it is."""
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    folder = write_processor(tmp_path, "gemma4")
    own = {"patch_size": 4, "pooling_kernel_size": 3, **settings}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(own))
    ours = processors.load(folder)
    wanted = {"num_frames": 32, **settings}
    for total, rate in ((32, 25.0), (100, 25.0), (1001, 29.97), (40, 2.0)):
        theirs = default_sample_indices_fn(VideoMetadata(total, fps=rate), **wanted)
        assert ours.pick_frames(total, rate, 1000) == theirs.tolist()
    few = {**wanted, "num_frames": 3, "fps": None}
    theirs = default_sample_indices_fn(VideoMetadata(100, fps=25.0), **few)
    assert ours.pick_frames(100, 25.0, 3) == theirs.tolist()
    assert ours.pick_frames(1, 25.0, 1000) == [0]


def test_many_frames_of_gemma_4_are_smaller(pairs):
    ours, _ = pairs("gemma4")
    fitted = ours.fit_frames((640, 480), 8, 100, 70)(picture(640, 480))
    assert fitted.size == (12 * 4, 12 * 3)  # 12 tokens
    with pytest.raises(
        LimitError, match="a video of 8 frames has at least 8 tokens; 7 are allowed"
    ):
        ours.fit_frames((640, 480), 8, 7, 70)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 4, "fps": 2}, "num_frames = 4 does not go with fps = 2.0"),
        ({"num_frames": 0}, "num_frames = 0 does not go with fps = 0.0"),
        ({"max_soft_tokens": 71}, "max_soft_tokens = 71 is none of 70"),
        ({"max_soft_tokens": 560}, "is more than vision_soft_tokens_per_image = 280"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size = 2 should be 3"),
        ({"video_processor_type": "Gemma4UnifiedVideoProcessor"}, "is not supported"),
        ({"crops": True}, "does not understand: crops"),
    ],
)
def test_settings_of_gemma_4s_videos_that_are_rejected(tmp_path, changes, message):
    folder = write_processor(tmp_path, "gemma4")
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps({"patch_size": 4, "pooling_kernel_size": 3, **changes}))
    with pytest.raises(UnsupportedModelError, match=f"^{file.name}.*{message}") as caught:
        processors.load(folder)
    assert caught.value.hint


@settings(max_examples=8)
@given(size=SIZE, count=st.integers(1, 3))
@pytest.mark.parametrize("model_type", ["minicpmv4_6", "minicpmv4_7"])
def test_minicpms_videos_are_those_of_transformers(pairs, model_type, size, count):
    """Patches of frames and their slices, and the prompt; videos of 4.6 are counted alone."""
    ours, theirs = pairs(model_type)
    frames = [picture(*size, seed) for seed in range(count)]
    output = minicpm_film(frames, None, 4, 64)
    sheet = ours.fit_frames(size, count, 10**6, 10**6)
    film = Film(
        frames=tuple(map(sheet, frames)),
        seconds=tuple(range(count)),
        frame_rate=1.0,
        duration=float(count),
        resize=sheet,
    )
    found = ours.prepare_film(film)
    wanted = theirs.replace_video_token(output, 0, video_token_divisor=16)
    wanted = theirs._prepend_local_ids(["<|video_pad|>"], [wanted], "<|video_pad|>")[0]
    wanted = wanted.replace("<|video_pad|>", ours.image_token)
    still = ours.prepare(frames[0])
    text = expand(f"{ours.image_token}a<|video_pad|>", ours.image_token, [still, found.whole])
    assert text == f"{still.numbered_prompt(0)}a{wanted}"
    assert np.array_equal(found.whole.passes, output["target_sizes_videos"])
    strips = [
        strip_of(planes_of(*each, ours.merge_size), 4)
        for each in zip(found.passes, found.whole.passes, strict=True)
    ]
    pixels = output["pixel_values_videos"][0].numpy()
    assert np.array_equal(np.concatenate(strips, axis=-1), pixels)


@pytest.mark.parametrize("maximum", [128, 5])
def test_minicpms_frames_are_sampled_as_by_transformers(tmp_path, maximum):
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import (
        MiniCPMV4_6VideoProcessor,
    )
    from transformers.video_utils import VideoMetadata

    folder = write_processor(tmp_path, "minicpmv4_6")
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps({"max_num_frames": maximum}))
    ours, own = processors.load(folder), SimpleNamespace(max_num_frames=maximum, stack_frames=1)
    for total, rate in ((1, 25.0), (100, 25.0), (1001, 29.97), (90000, 30.0), (640, 8.0)):
        film = VideoMetadata(total, fps=rate, duration=total / rate)
        theirs = MiniCPMV4_6VideoProcessor.sample_frames(own, film)
        assert ours.pick_frames(total, rate, 1000) == theirs
    assert ours.pick_frames(10, 0.5, 1000) == sorted({*ours.pick_frames(10, 0.5, 1000)})
    with pytest.raises(
        LimitError, match="a video of 8 frames has at least 8 tokens; 7 are allowed"
    ):
        ours.fit_frames((640, 480), 8, 7, 70)
    file.write_text(json.dumps({"stack_frames": 2}))
    assert processors.load(folder).film is None
    file.write_text(json.dumps({"stack_frames": 1, "scale_resolution": 0}))
    with pytest.raises(UnsupportedModelError, match=f"^{file.name}: scale_resolution = 0"):
        processors.load(folder)


def test_numbers_of_frames_are_words():
    words = {0: "zero", 19: "nineteen", 40: "forty", 64: "sixty-four", 100: "one hundred"}
    words |= {101: "one hundred and one", 768: "seven hundred and sixty-eight"}
    words |= {1003: "one thousand and three", 2110: "two thousand, one hundred and ten"}
    assert {number: in_words(number) for number in words} == words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"video_sampling": {"fps": 0, "max_frames": 4}}, "fps = 0.0 is not positive"),
        ({"num_frames": 4, "fps": 2, "max_image_size": {"longest_edge": 99}}, "should be 32"),
        ({"num_frames": 4, "fps": 2, "crops": True}, "does not understand: crops"),
    ],
)
def test_settings_of_smolvlm_videos(tmp_path, changes, message):
    """A separate file has all settings; without sampling, videos are unsupported."""
    folder = write_processor(tmp_path, "smolvlm", video_sampling=None)
    assert processors.load(folder).film is None
    own = {"max_image_size": {"longest_edge": 32}, **changes}
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps(own))
    with pytest.raises(UnsupportedModelError, match=message):
        processors.load(folder)
    file.write_text(json.dumps({"max_image_size": {"longest_edge": 32}, "num_frames": 4, "fps": 2}))
    film = processors.load(folder).film
    assert (film.frame_rate, film.max_frames, film.longest_edge) == (2.0, 4, 1456)


def test_tokens_survive_the_tokenizer():
    tokenizer = byte_tokenizer([*QWEN, *INTERNVL.values(), *IDEFICS])
    assert len(tokenizer.encode("<row_1_col_1><image>\n").ids) == 3
