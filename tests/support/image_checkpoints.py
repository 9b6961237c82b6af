"""Processor files of each family, small enough for tests, and transformers' processors of them."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
from PIL import Image

QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
GEMMA = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
GEMMA4 = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
}
MINICPM = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
MUSE = ["<|patch|>", "<|video|>", "<|vid_start|>", "<|vid_frame_separator|>", "<|vid_end|>"]
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
LFM = ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
LFM += [
    f"<|img_row_{row}_col_{column}|>"
    for row in range(1, 5)
    for column in range(1, 5)
    if row * column <= 4
]
IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
IDEFICS += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
NAMED_TOKENS = {  # by model type
    "internvl": INTERNVL,
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4,
    "minicpmv4_6": MINICPM,
    "minicpmv4_7": MINICPM,
}

_QWEN2 = {
    "preprocessor_config": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 4 * 28 * 28,
        "max_pixels": 60 * 28 * 28,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "config": {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
}
_IDEFICS3 = {
    "preprocessor_config": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "resample": 1,
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 32},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "processor_config": {"image_seq_len": 4, "processor_class": "Idefics3Processor"},
    "config": {"scale_factor": 2, "vision_config": {"image_size": 32, "patch_size": 8}},
}
_QWEN3 = {
    "preprocessor_config": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 40 * 32 * 32},
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "video_preprocessor_config": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "config": {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
}
_GEMMA4 = {
    "preprocessor_config": {
        "image_processor_type": "Gemma4ImageProcessor",
        "do_normalize": False,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": 70,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "resample": 3,
    },
    "processor_config": {"image_seq_length": 70, "processor_class": "Gemma4Processor"},
    "config": {"vision_config": {"patch_size": 4, "pooling_kernel_size": 3}},
    "tokenizer_config": {"extra_special_tokens": GEMMA4},
}
_MINICPM = {
    "preprocessor_config": {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "downsample_mode": "16x",
        "max_slice_nums": 4,
        "patch_size": 4,
        "resample": 3,
        "scale_resolution": 64,
        "slice_mode": True,
        "use_image_id": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "processor_config": {"processor_class": "MiniCPMV4_6Processor"},
    "config": {"vision_config": {"patch_size": 4}},
    "tokenizer_config": {"extra_special_tokens": MINICPM},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "preprocessor_config": {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_pan_and_scan": None,
            "size": {"height": 32, "width": 32},
            "resample": 2,
            "image_seq_length": 4,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        "config": {
            "mm_tokens_per_image": 4,
            "vision_config": {"image_size": 32, "patch_size": 4},
        },
        "tokenizer_config": {"extra_special_tokens": GEMMA},
    },
    "gemma4": _GEMMA4,
    "gemma4_unified": {
        **_GEMMA4,
        "preprocessor_config": {
            **_GEMMA4["preprocessor_config"],
            "image_processor_type": "Gemma4UnifiedImageProcessor",
        },
        "processor_config": {"image_seq_length": 70, "processor_class": "Gemma4UnifiedProcessor"},
    },
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "cosmos3_edge": {
        "preprocessor_config": {
            "image_processor_type": "Cosmos3EdgeImageProcessorFast",
            "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 40 * 32 * 32},
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "video_preprocessor_config": {
            "video_processor_type": "Cosmos3EdgeVideoProcessor",
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 1,
        },
        "config": {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
    },
    "lfm3_vl": _QWEN3,
    "muse_glimmer": {
        "preprocessor_config": {
            "image_processor_type": "MuseGlimmerImageProcessor",
            "max_image_tokens": 40,
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "resample": 1,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "video_preprocessor_config": {
            "video_processor_type": "MuseGlimmerVideoProcessor",
            "fps": 2.0,
            "frame_timestamp_format": "Time: {timestamp:.1f}s",
            "max_video_frame_tokens": 12,
            "num_frames": 8,
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        "config": {"vision_config": {"patch_size": 14}},
    },
    "mistral3": {
        "preprocessor_config": {
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 112},
            "patch_size": 7,
            "resample": 3,
        },
        "processor_config": {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 7,
            "spatial_merge_size": 2,
            "processor_class": "PixtralProcessor",
        },
        "config": {"spatial_merge_size": 2, "vision_config": {"patch_size": 7}},
    },
    "lfm2_vl": {
        "preprocessor_config": {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "do_image_splitting": True,
            "downsample_factor": 2,
            "encoder_patch_size": 4,
            "max_image_tokens": 20,
            "max_pixels_tolerance": 2.0,
            "max_tiles": 4,
            "min_image_tokens": 4,
            "min_tiles": 2,
            "resample": 2,
            "size": {"height": 512, "width": 512},
            "tile_size": 32,
            "use_thumbnail": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config": {"processor_class": "Lfm2VlProcessor"},
        "config": {"downsample_factor": 2, "vision_config": {"patch_size": 4}},
    },
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": {
        **_MINICPM,
        "processor_config": {"processor_class": "MiniCPMV4_7Processor"},
        "config": {
            **_MINICPM["config"],
            "image_start_id": 5,
            "image_end_id": 6,
            "slice_start_id": 7,
            "slice_end_id": 8,
            "newline_id": 9,
        },
    },
    "internvl": {
        "preprocessor_config": {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "size": {"height": 28, "width": 28},
            "min_patches": 1,
            "max_patches": 12,
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "do_resize": True,
            "do_normalize": True,
            "crop_size": None,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        "processor_config": {"image_seq_length": 1, "processor_class": "InternVLProcessor"},
        "config": {"downsample_ratio": 0.5, "vision_config": {"patch_size": [14, 14]}},
        "tokenizer_config": {"extra_special_tokens": INTERNVL},
    },
    "idefics3": _IDEFICS3,
    "smolvlm": {
        **_IDEFICS3,
        "preprocessor_config": {
            **_IDEFICS3["preprocessor_config"],
            "image_processor_type": "SmolVLMImageProcessor",
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
    },
}


def write_tiny_processor(folder: Path, config: Mapping[str, Any]) -> None:
    """The files of an image processor that fits a tiny model's config.json."""
    model_type, vision = config["model_type"], config["vision_config"]
    files = {name: dict(values) for name, values in FAMILIES[model_type].items()}
    image = files["preprocessor_config"]
    if model_type == "muse_glimmer":
        sizes = {"patch_size": vision["patch_size"], "merge_size": vision.get("merge_size", 2)}
        image |= sizes
        files["video_preprocessor_config"] |= sizes
    elif model_type.startswith(("qwen", "lfm3", "cosmos3")):
        merge_size = vision.get("spatial_merge_size", 2)
        sizes = {"patch_size": vision["patch_size"], "merge_size": merge_size}
        side = 2 * vision["patch_size"]
        image.pop("size", None)
        image |= {**sizes, "min_pixels": 4 * side**2, "max_pixels": 60 * side**2}
        if video := files.get("video_preprocessor_config"):
            video |= sizes
    elif model_type.startswith("gemma4"):
        image |= {key: vision[key] for key in ("patch_size", "pooling_kernel_size")}
    elif model_type == "lfm2_vl":
        image["encoder_patch_size"] = vision["patch_size"]
        image["downsample_factor"] = config["downsample_factor"]
        image["tile_size"] = 4 * vision["patch_size"] * config["downsample_factor"]
    elif model_type.startswith("minicpm"):
        image |= {"patch_size": vision["patch_size"], "scale_resolution": 16 * vision["patch_size"]}
        image["downsample_mode"] = config.get("downsample_mode", "16x")
    elif model_type == "mistral3":
        side = vision["patch_size"] * config["spatial_merge_size"]
        image["size"] = {"longest_edge": 10 * side}
        sizes = {"patch_size": vision["patch_size"]}
        files["processor_config"] |= {"spatial_merge_size": config["spatial_merge_size"], **sizes}
    else:
        side, of_patch = (np.max(vision[key]).item() for key in ("image_size", "patch_size"))
        tokens = (side // of_patch // config.get("scale_factor", 2)) ** 2
        if model_type in ("internvl", "gemma3"):
            tokens = config.get("mm_tokens_per_image", tokens)
            image["size"] = {"height": side, "width": side}
            files["processor_config"]["image_seq_length"] = tokens
            if model_type == "gemma3":
                image["image_seq_length"] = tokens
        else:
            image["size"] = {"longest_edge": 4 * side}
            image["max_image_size"] = {"longest_edge": side}
            files["processor_config"]["image_seq_len"] = tokens
    for name, values in files.items():
        if name != "config":
            (folder / f"{name}.json").write_text(json.dumps(values))


def write_processor(folder: Path, model_type: str, **changes: Any) -> Path:
    """The JSON files of a family; `changes` are keys of preprocessor_config.json."""
    files = {name: dict(values) for name, values in FAMILIES[model_type].items()}
    files["preprocessor_config"].update(changes)
    files["config"]["model_type"] = model_type
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def channels_last(patches: np.ndarray, patch_size: int) -> np.ndarray:
    """Patches of one frame [P, 3*p*p] as [P, p*p*3]."""
    apart = patches.reshape(len(patches), 3, patch_size**2)
    return np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(len(patches), -1)


def frames_first(patches: np.ndarray, grid: tuple[int, int], merge_size: int) -> np.ndarray:
    """Patches of two frames [P, 3 * 2 * p * p] in blocks as [P, 2 * 3 * p * p], row by row."""
    (rows, columns), m = grid, merge_size
    apart = patches.reshape(rows // m, columns // m, m, m, 3, 2, -1)
    return np.ascontiguousarray(apart.transpose(0, 2, 1, 3, 5, 4, 6)).reshape(rows * columns, -1)


def byte_tokenizer(special: list[str]) -> Any:
    """A byte-level tokenizer, which is lossless."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def reference(folder: Path, model_type: str) -> Any:
    """The processor of transformers on Pillow, and its tokenizer."""
    import transformers
    from transformers.models.smolvlm import processing_smolvlm

    special = [*QWEN, *INTERNVL.values(), *GEMMA.values(), *IDEFICS, *PIXTRAL, *LFM]
    special += [*GEMMA4.values(), *MINICPM.values(), *MUSE]
    named = NAMED_TOKENS.get(model_type, {})
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(special),
        extra_special_tokens=named,
        pad_token="!",
    )
    if model_type in _OWN_PICTURES:  # which have no backend for Pillow
        pictures = _OWN_PICTURES[model_type](folder)
    else:
        pictures = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    processing_smolvlm.num2words = str  # for videos only
    kind, arguments = {
        "qwen2_vl": (transformers.Qwen2VLProcessor, {}),
        "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, {}),
        "qwen3_vl": (transformers.Qwen3VLProcessor, {}),
        "qwen3_vl_moe": (transformers.Qwen3VLProcessor, {}),
        "qwen3_5": (transformers.Qwen3VLProcessor, {}),
        "qwen3_5_moe": (transformers.Qwen3VLProcessor, {}),
        "gemma3": (transformers.Gemma3Processor, {"image_seq_length": 4}),
        "gemma4": (
            transformers.Gemma4Processor,
            {"feature_extractor": transformers.Gemma4AudioFeatureExtractor()},
        ),
        "gemma4_unified": (
            transformers.Gemma4UnifiedProcessor,
            {"feature_extractor": transformers.Gemma4UnifiedAudioFeatureExtractor()},
        ),
        "mistral3": (_pixtral_processor() if model_type == "mistral3" else None, _merging(folder)),
        "lfm2_vl": (transformers.Lfm2VlProcessor, {}),
        "lfm3_vl": (transformers.Lfm3VlProcessor, {}),
        "cosmos3_edge": (transformers.Cosmos3EdgeProcessor, {}),
        "minicpmv4_6": (transformers.MiniCPMV4_6Processor, {}),
        "muse_glimmer": (transformers.MuseGlimmerProcessor, {}),
        "minicpmv4_7": (transformers.MiniCPMV4_7Processor, {}),
        "internvl": (transformers.InternVLProcessor, {"image_seq_length": 1}),
        "idefics3": (transformers.Idefics3Processor, {"image_seq_len": 4}),
        "smolvlm": (transformers.SmolVLMProcessor, {"image_seq_len": 4}),
    }[model_type]
    if model_type not in ("idefics3", "gemma3", "mistral3", "lfm2_vl"):
        arguments["video_processor"] = None
    if model_type.startswith("minicpm"):  # whose processor reads these settings
        video = SimpleNamespace(slice_mode=True, downsample_mode="16x")
        arguments["video_processor"] = video
    # transformers requires a video processor, which would need torchvision
    own: dict[str, Any] = {"check_argument_for_proper_class": lambda *_: None}
    if model_type == "gemma3":  # whose processor takes pan and scan from arguments, not from files
        values = json.loads((folder / "preprocessor_config.json").read_text())
        cuts = {key: value for key, value in values.items() if "pan_and_scan" in key and value}
        own["images_kwargs"] = {**kind.images_kwargs, **cuts}
    kind = type(kind.__name__, (kind,), own)
    return kind(image_processor=pictures, tokenizer=tokenizer, **arguments)


def _pixtral_processor() -> Any:
    """The class, whose module imports a function that needs torchvision, and does not use it."""
    return without_torchvision("pixtral.processing_pixtral").PixtralProcessor


def without_torchvision(module: str) -> Any:
    """A module of transformers that imports torchvision, and does not call it."""
    names = [f"torchvision{end}" for end in ("", ".transforms", ".transforms.v2")]
    stubs = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in names}
    with patch.dict(sys.modules, stubs):
        return importlib.import_module(f"transformers.models.{module}")


def _torch_pictures(folder: Path, family: str, name: str) -> Any:
    """An image processor, whose steps of torchvision are Pillow's and those of floats."""
    import torch

    module = without_torchvision(f"{family}.image_processing_{family}")

    class Backend(module.TorchvisionBackend):
        def process_image(self, image: Image.Image, **_: Any) -> torch.Tensor:
            return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())

        def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
            pictures = [Image.fromarray(each.numpy().transpose(1, 2, 0)) for each in image]
            resized = [each.resize((size.width, size.height), int(resample)) for each in pictures]
            return torch.stack([self.process_image(each) for each in resized])

        def rescale_and_normalize(
            self, images: Any, _: bool, factor: float, __: bool, mean: Any, std: Any
        ) -> torch.Tensor:
            channels = (torch.tensor(each)[:, None, None] for each in (mean, std))
            means, deviations = channels
            return ((images.double() * factor).float() - means) / deviations

    values = json.loads((folder / "preprocessor_config.json").read_text())
    original = getattr(module, name)
    kind = type(original.__name__, (original, Backend), {})
    return kind(**{key: value for key, value in values.items() if "type" not in key})


def _gemma4_unified_pictures(folder: Path) -> Any:
    """Gemma 4's image processor, whose patches are merged as the 12B model's are."""
    import torch
    import transformers

    merged = without_torchvision("gemma4_unified.image_processing_gemma4_unified").patches_merge

    def preprocess(self: Any, images: Any, **settings: Any) -> Any:
        found = transformers.Gemma4ImageProcessorPil.preprocess(self, images, **settings)
        sizes, block = found["num_soft_tokens_per_image"], self.pooling_kernel_size**2
        pixels, places = found["pixel_values"], found["image_position_ids"]
        found["pixel_values"] = np.zeros((len(sizes), max(sizes), pixels.shape[-1] * block))
        found["image_position_ids"] = np.full((len(sizes), max(sizes), 2), -1)
        for at, count in enumerate(sizes):
            whole = (torch.from_numpy(each[at, : count * block]) for each in (pixels, places))
            patches, positions = merged(*whole, count)
            found["pixel_values"][at, :count] = patches
            found["image_position_ids"][at, :count] = positions
        found["pixel_values"] = found["pixel_values"].astype(np.float32)
        return found

    own = {"preprocess": preprocess}
    kind = type("Gemma4UnifiedImageProcessor", (transformers.Gemma4ImageProcessorPil,), own)
    values = json.loads((folder / "preprocessor_config.json").read_text())
    return kind(**{key: value for key, value in values.items() if "type" not in key})


_OWN_PICTURES = {
    "lfm2_vl": partial(_torch_pictures, family="lfm2_vl", name="Lfm2VlImageProcessor"),
    "muse_glimmer": partial(
        _torch_pictures, family="muse_glimmer", name="MuseGlimmerImageProcessor"
    ),
    "gemma4_unified": _gemma4_unified_pictures,
}


@functools.cache
def _gemma4_films(model_type: str) -> Any:
    """Gemma 4's video processor, whose steps of torchvision are Pillow's and those of floats."""
    import torch

    importlib.import_module("transformers.video_processing_utils")  # which needs no torchvision
    kind = "Gemma4Unified" if model_type == "gemma4_unified" else "Gemma4"
    with patch("transformers.utils.is_torchvision_v2_available", lambda: True):
        module = without_torchvision(f"{model_type}.video_processing_{model_type}")

    def resize(
        _: Any, video: Any, patch_size: int, max_patches: int, pooling_kernel_size: int, **__: Any
    ) -> torch.Tensor:
        size = module.get_aspect_ratio_preserving_size(
            *video.shape[-2:], patch_size, max_patches, pooling_kernel_size
        )
        frames = [Image.fromarray(each.numpy().transpose(1, 2, 0)) for each in video]
        resized = [each.resize(size[::-1], Image.Resampling.BICUBIC) for each in frames]
        return torch.from_numpy(np.stack([np.asarray(each) for each in resized])).permute(
            0, 3, 1, 2
        )

    def rescale(_: Any, video: Any, __: bool, factor: float, *___: Any) -> torch.Tensor:
        return (video.double() * factor).float()

    own = {"aspect_ratio_preserving_resize": resize, "rescale_and_normalize": rescale}
    original = getattr(module, f"{kind}VideoProcessor")
    return type(original.__name__, (original,), own)()


def gemma4_film(
    model_type: str, frames: Sequence[Image.Image], patch_size: int, merged: int
) -> Any:
    """What transformers' video processor makes of frames, with its budget of tokens."""
    import torch

    planes = np.stack([np.asarray(each) for each in frames]).transpose(0, 3, 1, 2)
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": None}
    return _gemma4_films(model_type)._preprocess(
        [torch.from_numpy(planes)],
        **steps,
        rescale_factor=1 / 255,
        image_mean=None,
        image_std=None,
        return_tensors="pt",
        patch_size=patch_size,
        max_soft_tokens=70,
        pooling_kernel_size=merged,
    )


def minicpm_film(frames: Sequence[Image.Image], metadata: Any, patch_size: int, area: int) -> Any:
    """What MiniCPM-V's video processor makes of frames, with four slices and Pillow's resizing.

    `area`: `scale_resolution`.
    """
    import torch

    module = without_torchvision("minicpmv4_6.video_processing_minicpmv4_6")

    def resize(_: Any, video: Any, size: Any, **__: Any) -> torch.Tensor:
        flat = video.reshape(-1, *video.shape[-3:]).permute(0, 2, 3, 1).numpy()
        wanted = size.width, size.height
        resized = [Image.fromarray(each).resize(wanted, Image.Resampling.BICUBIC) for each in flat]
        stacked = torch.from_numpy(np.stack([np.asarray(each) for each in resized]))
        found = stacked.permute(0, 3, 1, 2)
        return found.reshape(*video.shape[:-2], *found.shape[-2:])

    def rescale(_: Any, video: Any, __: bool, factor: float, *___: Any) -> torch.Tensor:
        return ((video.double() * factor).float() - 0.5) / 0.5

    own = {"resize": resize, "rescale_and_normalize": rescale}
    original = module.MiniCPMV4_6VideoProcessor
    planes = np.stack([np.asarray(each) for each in frames]).transpose(0, 3, 1, 2)
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": None}
    return type(original.__name__, (original,), own)()._preprocess(
        [torch.from_numpy(np.ascontiguousarray(planes))],
        **steps,
        rescale_factor=1 / 255,
        image_mean=None,
        image_std=None,
        max_slice_nums=4,
        scale_resolution=area,
        patch_size=patch_size,
        slice_mode=True,
        stack_frames=1,
        max_num_frames=128,
        video_metadata=[metadata],
        return_tensors=None,
    )


def _merging(folder: Path) -> dict[str, Any]:
    """The arguments of Pixtral's processor."""
    path = folder / "processor_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    return {key: values[key] for key in ("patch_size", "spatial_merge_size") if key in values}


def planes_of(patches: np.ndarray, grid: tuple[int, int], merge_size: int) -> np.ndarray:
    """An image [3, height, width] from patches [P, 3 * p * p] in blocks of merged ones."""
    (rows, columns), m = grid, merge_size
    side = round((patches.shape[1] // 3) ** 0.5)
    apart = patches.reshape(rows // m, columns // m, m, m, 3, side, side)
    planes = np.zeros((3, rows * side, columns * side), np.float32)
    for at in np.ndindex(rows, columns):
        (row, inner_row), (column, inner_column) = (divmod(each, m) for each in at)
        down, across = (slice(each * side, (each + 1) * side) for each in at)
        planes[:, down, across] = apart[row, column, inner_row, inner_column]
    return planes


def patches_of(planes: np.ndarray, side: int) -> np.ndarray:
    """Patches [P, side * side * 3] of an image [3, height, width], row by row, channels last."""
    rows, columns = (extent // side for extent in planes.shape[1:])
    apart = planes.reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
    return apart.reshape(rows * columns, -1)


def strip_of(planes: np.ndarray, side: int) -> np.ndarray:
    """Patches of an image [3, height, width], one right of the other: [3, side, P * side]."""
    rows, columns = (extent // side for extent in planes.shape[1:])
    apart = planes.reshape(3, rows, side, columns, side).transpose(0, 2, 1, 3, 4)
    return apart.reshape(3, side, -1)


def places_of(grid: tuple[int, int]) -> np.ndarray:
    """Column and row of each patch, row by row, [P, 2]."""
    rows, columns = np.indices(grid).reshape(2, -1)
    return np.stack([columns, rows], axis=1)


def planes_of_passes(item: Any, merge_size: int) -> list[np.ndarray]:
    """The images of all passes of a prepared image."""
    ends = np.cumsum([rows * columns for rows, columns in item.passes])
    parts = np.split(item.pixels, ends[:-1])
    return [planes_of(*each, merge_size) for each in zip(parts, item.passes, strict=True)]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Colours with edges, gradients and noise, so that every filter leaves its own trace."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    waves = np.stack([np.sin(rows / 7), np.cos(columns / 5), np.sin((rows + columns) / 11)], -1)
    pixels = 127 + 90 * waves + generator.normal(0, 25, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = generator.integers(0, 256, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
