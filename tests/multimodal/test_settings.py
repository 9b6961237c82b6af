"""Image settings of a checkpoint: supported, or rejected with file and key."""

from __future__ import annotations

import json

import pytest
from image_checkpoints import FAMILIES, INTERNVL, picture, reference, write_processor
from resaved_processors import video_sizes

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.multimodal import processors

# As model repositories have them, with the values of config.json that matter.
NORMAL = {"do_convert_rgb": True, "do_resize": True, "do_rescale": True, "do_normalize": True}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PUBLISHED = {
    "Qwen2-VL-2B-Instruct": (
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"max_pixels": 12845056, "min_pixels": 3136},
            "patch_size": 14,
        },
        None,
        {"model_type": "qwen2_vl", "vision_config": {"spatial_patch_size": 14}},
        (1288, 728, 46 * 26),
    ),
    "Qwen3-VL-2B-Instruct": (
        {
            **HALVES,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "do_center_crop": None,
            "max_pixels": None,
            "data_format": "channels_first",
            "default_to_square": True,
        },
        None,
        {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}},
        (1920, 1080, 60 * 34),
    ),
    "InternVL3-1B-hf": (
        {
            **NORMAL,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "size": {"height": 448, "width": 448},
            "max_patches": 12,
        },
        {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
        {
            "model_type": "internvl",
            "downsample_ratio": 0.5,
            "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
        },
        (1280, 960, 13 * 256),
    ),
    "LFM2-VL-450M": (
        {
            **NORMAL,
            **HALVES,
            "do_image_splitting": True,
            "do_pad": True,
            "downsample_factor": 2,
            "encoder_patch_size": 16,
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "max_image_tokens": 256,
            "max_num_patches": 1024,
            "max_pixels_tolerance": 2.0,
            "max_tiles": 10,
            "min_image_tokens": 64,
            "min_tiles": 2,
            "resample": 2,
            "return_row_col_info": True,
            "size": {"height": 512, "width": 512},
            "tile_size": 512,
            "use_thumbnail": True,
        },
        None,
        {"model_type": "lfm2_vl", "downsample_factor": 2, "vision_config": {"patch_size": 16}},
        (1920, 1080, 8 * 256 + 21 * 12),
    ),
    "Ministral-3-3B-Instruct": (
        {
            **NORMAL,
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": 14,
            "resample": 3,
            "size": {"longest_edge": 1540},
        },
        {
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "image_token": "[IMG]",
            "patch_size": 14,
            "processor_class": "PixtralProcessor",
            "spatial_merge_size": 2,
        },
        {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
        (1920, 1080, 55 * 31),
    ),
    "gemma-3-4b-it": (
        {
            **NORMAL,
            **HALVES,
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256,
            "pan_and_scan_max_num_crops": None,
            "pan_and_scan_min_crop_size": None,
            "pan_and_scan_min_ratio_to_activate": None,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 896, "width": 896},
        },
        {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "vision_config": {"image_size": 896, "patch_size": 14},
        },
        (1920, 1080, 256),
    ),
    "gemma-4-E2B-it": (
        {},
        {
            "audio_ms_per_token": 40,
            "audio_seq_length": 750,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
            "image_processor": {
                **NORMAL,
                "do_normalize": False,
                "image_mean": [0.0, 0.0, 0.0],
                "image_processor_type": "Gemma4ImageProcessor",
                "image_seq_length": 280,
                "image_std": [1.0, 1.0, 1.0],
                "max_soft_tokens": 280,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "resample": 3,
                "rescale_factor": 0.00392156862745098,
            },
            "image_seq_length": 280,
            "processor_class": "Gemma4Processor",
            "video_processor": {"max_soft_tokens": 70, "num_frames": 32},
        },
        {
            "model_type": "gemma4",
            "vision_config": {
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "position_embedding_size": 10240,
            },
            "vision_soft_tokens_per_image": 280,
        },
        (1920, 1080, 12 * 22),
    ),
    "MiniCPM-V-4.6": (
        {},
        {
            "image_processor": {
                **NORMAL,
                **HALVES,
                "downsample_mode": "16x",
                "image_processor_type": "MiniCPMV4_6ImageProcessor",
                "max_slice_nums": 9,
                "patch_size": 14,
                "resample": 3,
                "rescale_factor": 0.00392156862745098,
                "scale_resolution": 448,
                "slice_mode": True,
                "use_image_id": True,
            },
            "processor_class": "MiniCPMV4_6Processor",
            "video_processor": {"max_num_frames": 128, "stack_frames": 1},
        },
        {"model_type": "minicpmv4_6", "vision_config": {"patch_size": 14}},
        (1920, 1080, 6 * 11 + 8 * 64),
    ),
    "SmolVLM-256M-Instruct": (
        {
            **NORMAL,
            **HALVES,
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "do_pad": True,
        },
        {"image_seq_len": 64},
        {"model_type": "idefics3", "scale_factor": 4, "vision_config": {"patch_size": 16}},
        (1920, 1080, 13 * 64),
    ),
    "SmolVLM2-2.2B-Instruct": (
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 1536},
            "max_image_size": {"longest_edge": 384},
            "video_sampling": {"fps": 1},
        },
        {"image_seq_len": 81},
        {"model_type": "smolvlm", "scale_factor": 3, "vision_config": {"patch_size": 14}},
        (1000, 1000, 17 * 81),
    ),
}


def edit(folder, name, **changes):
    path = folder / f"{name}.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints(tmp_path, name):
    image, processor, model, (width, height, tokens) = PUBLISHED[name]
    edit(tmp_path, "preprocessor_config", **image)
    edit(tmp_path, "config", **model)
    if processor:
        edit(tmp_path, "processor_config", **processor)
    assert processors.load(tmp_path).count((width, height)) == tokens


@pytest.mark.parametrize("model_type", FAMILIES)
def test_files_that_transformers_saves(tmp_path, model_type):
    """Its own spelling, in the file of older versions and in that of newer ones."""
    original = write_processor(tmp_path / "original", model_type)
    saved = write_processor(tmp_path / "saved", model_type)
    reference(original, model_type).image_processor.save_pretrained(saved)
    expected = processors.load(original)
    assert_same(processors.load(saved), expected)

    image = json.loads((saved / "preprocessor_config.json").read_text())
    tile = {"max_image_size": image["max_image_size"]} if "max_image_size" in image else {}
    edit(saved, "processor_config", image_processor=image, video_processor={"fps": 2, **tile})
    edit(saved, "preprocessor_config", unheard_of=1)
    assert_same(processors.load(saved), expected)
    (saved / "preprocessor_config.json").unlink()
    assert_same(processors.load(saved), expected)


def assert_same(found, expected):
    assert type(found) is type(expected)
    assert (found.rules.table == expected.rules.table).all()
    assert found.rules.resample == expected.rules.resample
    for name in type(found).__slots__:
        if name not in ("rules", "film"):  # videos have their own rules and file
            assert getattr(found, name) == getattr(expected, name)


CAPPED = {"cap_pixels_per_frame": True, "do_sample_frames": True}
CAPS = [
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", CAPPED),
    ("qwen2_5_vl", {**CAPPED, "max_video_tokens": 900}),
    ("qwen2_5_vl", {**CAPPED, "max_video_tokens": 40}),
    ("qwen3_vl", {}),
    ("qwen3_vl", CAPPED),
    ("qwen3_vl", {**CAPPED, "max_video_tokens": 30}),
    ("qwen3_vl", {**CAPPED, "size": {"shortest_edge": 4096, "longest_edge": 25165824}}),
]


@pytest.mark.nightly
def test_limits_of_frames_are_those_of_transformers(tmp_path):
    """With `cap_pixels_per_frame`, `max_video_tokens` limits a frame or a video."""
    films = [(4, 480, 640), (10, 1080, 1920), (64, 720, 1280), (768, 1080, 1920), (6, 60, 90)]
    expected, found = video_sizes(CAPS, films), []
    for at, (model_type, settings) in enumerate(CAPS):
        folder = write_processor(tmp_path / str(at), model_type)
        (folder / "video_preprocessor_config.json").unlink(missing_ok=True)
        side = 32 if model_type == "qwen3_vl" else 28
        size = {"shortest_edge": 128 * side**2, "longest_edge": 768 * side**2}
        edit(folder, "processor_config", video_processor={"size": size, **settings})
        rules = processors.load(folder).film
        grids = [rules.area((width, height), frames, 2, side) for frames, height, width in films]
        found.append([(rows * side, columns * side) for rows, columns in grids])
    assert found == expected


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_errors_name_the_file_of_the_video_settings(tmp_path, model_type):
    folder = write_processor(tmp_path, model_type)
    tile = {"max_image_size": {"longest_edge": 32}} if model_type == "smolvlm" else {}
    edit(folder, "video_preprocessor_config", **tile, unheard_of=1)
    with pytest.raises(UnsupportedModelError, match=r"^video_preprocessor_config.json has keys"):
        processors.load(folder)
    (folder / "video_preprocessor_config.json").unlink()
    video = {"fps": 2, "num_frames": 8} if model_type == "smolvlm" else {}
    edit(folder, "processor_config", video_processor={**video, **tile, "unheard_of": 1})
    with pytest.raises(
        UnsupportedModelError, match=r"^processor_config.json: video_processor has keys"
    ):
        processors.load(folder)


def test_names_of_tokens(tmp_path):
    folder = write_processor(tmp_path, "internvl")
    edit(folder, "tokenizer_config", extra_special_tokens={**INTERNVL, "start_image_token": "<i>"})
    assert processors.load(folder).start_token == "<i>"
    edit(folder, "tokenizer_config", extra_special_tokens=["<x>"], end_image_token="</i>")
    assert processors.load(folder).end_token == "</i>"
    assert processors.load(folder).start_token == "<img>"


@pytest.mark.parametrize(
    ("model_type", "changes", "match"),
    [
        ("qwen2_vl", {"do_resize": False}, "do_resize = False is not supported"),
        ("qwen2_vl", {"do_center_crop": True}, "do_center_crop = True is not supported"),
        ("qwen2_vl", {"pruning": {"rate": 2}}, "does not understand: pruning"),
        ("qwen2_vl", {"patch_size": 16}, "patch_size = 16 should be 14"),
        ("qwen2_vl", {"merge_size": "2"}, "merge_size = '2' is not of type int"),
        ("qwen2_vl", {"merge_size": True}, "merge_size = True is not of type int"),
        ("qwen2_vl", {"min_pixels": 10**9}, "is more than max_pixels"),
        ("qwen2_vl", {"max_pixels": 0}, "max_pixels = 0 is not positive"),
        ("qwen2_vl", {"size": {"height": 3}}, "size has keys .* height"),
        ("qwen2_vl", {"size": 224}, "size = 224 is not of type dict"),
        ("qwen2_vl", {"resample": 9}, "resample = 9 is not a filter"),
        ("qwen2_vl", {"image_mean": [0.5]}, "image_mean = .* is not three numbers"),
        ("qwen2_vl", {"image_std": [0, 1, 1]}, "image_std = .* is not positive"),
        ("qwen2_vl", {"image_processor_type": "MyProcessor"}, "'MyProcessor' is not supported"),
        ("internvl", {"size": {"height": 28, "width": 56}}, "width = 56 should be 28"),
        ("internvl", {"size": {"height": 448, "width": 448}}, "does not fit tiles of 448"),
        ("internvl", {"min_patches": 20}, "is more than max_patches"),
        ("internvl", {"use_thumbnail": True}, "does not understand: use_thumbnail"),
        ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens = 100 is none of 70, 140, 280"),
        ("gemma4", {"max_soft_tokens": 560}, "more than vision_soft_tokens_per_image = 280"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size = 2 should be 3"),
        ("gemma4", {"do_normalize": 1}, "do_normalize = 1 is not of type bool"),
        ("minicpmv4_6", {"downsample_mode": "4x"}, "downsample_mode = .4x. should be .16x., as in"),
        ("minicpmv4_6", {"patch_size": 14}, "patch_size = 14 should be 4"),
        ("minicpmv4_6", {"max_slice_nums": 0}, "max_slice_nums = 0 is not positive"),
        ("idefics3", {"max_image_size": {"longest_edge": 64}}, "does not fit tiles of 64"),
        ("idefics3", {"size": {"height": 8, "width": 8}}, "size has keys .* height, width"),
    ],
)
def test_unsupported_settings_are_rejected(tmp_path, model_type, changes, match):
    folder = write_processor(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        processors.load(folder)
    assert "preprocessor_config.json" in str(caught.value) or "processor_config" in str(
        caught.value
    )


@pytest.mark.parametrize("key", ["image_start_id", "newline_id"])
def test_tags_of_a_canvas_are_required(tmp_path, key):
    folder = write_processor(tmp_path, "minicpmv4_7")
    config = json.loads((folder / "config.json").read_text())
    edit(folder, "config", **{**config, key: None})
    with pytest.raises(UnsupportedModelError, match=f"config.json has no {key}") as caught:
        processors.load(folder)
    assert caught.value.hint


def test_positions_of_gemma_4_are_as_many_as_a_strip_has(tmp_path):
    folder = write_processor(tmp_path, "gemma4")
    vision = {"patch_size": 4, "pooling_kernel_size": 3}
    edit(folder, "config", vision_config={**vision, "position_embedding_size": 210})
    assert processors.load(folder).prepare(picture(200, 1)).grid == (3, 210)
    edit(folder, "config", vision_config={**vision, "position_embedding_size": 209})
    with pytest.raises(UnsupportedModelError, match="more than position_embedding_size = 209"):
        processors.load(folder)


def test_processor_config_is_supported(tmp_path):
    folder = write_processor(tmp_path, "idefics3")
    edit(folder, "processor_config", image_break_token="x")
    with pytest.raises(UnsupportedModelError, match="does not understand: image_break_token"):
        processors.load(folder)


def test_squares_of_the_model(tmp_path):
    folder = write_processor(tmp_path, "internvl")
    for patch in ([14, 7], ["14", "14"], [14], [0, 0]):
        edit(folder, "config", vision_config={"patch_size": patch})
        with pytest.raises(UnsupportedModelError, match=r"patch_size = .*not a square"):
            processors.load(folder)


def test_files_that_are_missing_or_damaged(tmp_path):
    folder = write_processor(tmp_path, "qwen2_vl")
    (folder / "processor_config.json").write_text("[1]")
    with pytest.raises(BrokenArtifactError, match=r"processor_config.json holds no JSON object"):
        processors.load(folder)
    (folder / "processor_config.json").write_text("{")
    with pytest.raises(BrokenArtifactError, match=r"processor_config.json cannot be read"):
        processors.load(folder)
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(BrokenArtifactError, match=r"holds no preprocessor_config.json") as caught:
        processors.load(folder)
    assert caught.value.hint
    edit(folder, "preprocessor_config")
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"config.json has no model_type"):
        processors.load(folder)


def test_families():
    assert processors.supported() == sorted(FAMILIES)
    with pytest.raises(UnsupportedModelError, match="'qwen4_vl' models") as caught:
        processors.find("qwen4_vl")
    assert caught.value.hint == f"supported: {', '.join(processors.supported())}"
