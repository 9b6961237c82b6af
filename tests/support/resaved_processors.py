"""Video processors of transformers without torchvision, which they need for pixels only.

Run as a program: names of torchvision exist in its process, and do nothing.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_VIDEO = {
    "cosmos3_edge": "cosmos3_edge.video_processing_cosmos3_edge.Cosmos3EdgeVideoProcessor",
    "gemma4": "gemma4.video_processing_gemma4.Gemma4VideoProcessor",
    "gemma4_unified": "gemma4_unified.video_processing_gemma4_unified.Gemma4UnifiedVideoProcessor",
    "lfm3_vl": "qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor",
    "qwen2_vl": "qwen2_vl.video_processing_qwen2_vl.Qwen2VLVideoProcessor",
    "qwen2_5_vl": "qwen2_vl.video_processing_qwen2_vl.Qwen2VLVideoProcessor",
    "qwen3_5": "qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor",
    "qwen3_5_moe": "qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor",
    "qwen3_vl_moe": "qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor",
    "qwen3_vl": "qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor",
    "minicpmv4_6": "minicpmv4_6.video_processing_minicpmv4_6.MiniCPMV4_6VideoProcessor",
    "muse_glimmer": "muse_glimmer.video_processing_muse_glimmer.MuseGlimmerVideoProcessor",
    "minicpmv4_7": "minicpmv4_6.video_processing_minicpmv4_6.MiniCPMV4_6VideoProcessor",
    "internvl": "internvl.video_processing_internvl.InternVLVideoProcessor",
    "smolvlm": "smolvlm.video_processing_smolvlm.SmolVLMVideoProcessor",
}
_TORCHVISION = ["torchvision"]
_TORCHVISION += [f"torchvision.{name}" for name in ("io", "transforms", "transforms.v2")]
_TORCHVISION += ["torchvision.transforms.functional", "torchvision.transforms.v2.functional"]


def resave_processors(jobs: Sequence[tuple[Path, str, Path]]) -> None:
    """Load folders' processors of images and videos in transformers, and save them.

    Args:
        jobs: folder, model type and the folder of the result.
    """
    _run("resave", json.dumps([[str(each) for each in job] for job in jobs]))


def video_sizes(
    processors: Sequence[tuple[str, Mapping[str, Any]]], films: Sequence[tuple[int, int, int]]
) -> list[list[tuple[int, int]]]:
    """Height and width in pixels that transformers resizes frames to, for each processor.

    Args:
        processors: model types with settings of their video processors.
        films: number of frames, height and width of each.
    """
    printed = _run("sizes", json.dumps(processors), json.dumps(films))
    return [[(height, width) for height, width in found] for found in json.loads(printed)]


def _run(*arguments: str) -> str:
    import transformers  # noqa: F401  # its absence is named, so that --quick leaves this out

    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _replace_torchvision() -> None:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from unittest.mock import MagicMock

    for name in _TORCHVISION:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        module.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
        sys.modules[name] = module


def _video_processor(model_type: str) -> Any:
    module, _, name = _VIDEO[model_type].rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _resave(jobs: str) -> None:
    from image_checkpoints import reference

    for folder, model_type, target in json.loads(jobs):
        processor = reference(Path(folder), model_type)
        if model_type in _VIDEO:
            processor.video_processor = _video_processor(model_type).from_pretrained(folder)
        own = Path(folder) / "processor_config.json"
        for key, value in json.loads(own.read_text() if own.exists() else "{}").items():
            setattr(processor, key, value)  # tokens of an image
        processor.save_pretrained(target)


def _sizes(processors: str, films: str) -> None:
    from types import SimpleNamespace

    from transformers.image_utils import SizeDict
    from transformers.video_processing_utils import BaseVideoProcessor

    found: list[list[tuple[int, int]]] = []

    def resize(_: object, size: Any, **__: object) -> None:
        found[-1].append((size.height, size.width))

    BaseVideoProcessor.resize = resize
    for model_type, settings in json.loads(processors):
        processor = _video_processor(model_type)(**settings)
        found.append([])
        for frames, height, width in json.loads(films):
            processor.resize(
                SimpleNamespace(shape=(1, frames, 3, height, width)),
                SizeDict(**dict(processor.size)),
                resample=None,
                factor=processor.patch_size * processor.merge_size,
                temporal_factor=processor.temporal_patch_size,
                cap_pixels_per_frame=processor.cap_pixels_per_frame,
            )
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _replace_torchvision()
    {"resave": _resave, "sizes": _sizes}[sys.argv[1]](*sys.argv[2:])
