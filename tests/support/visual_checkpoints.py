"""Tiny random vision-language models, their features in transformers, and runs of their bundles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from image_checkpoints import (
    channels_last,
    frames_first,
    patches_of,
    places_of,
    planes_of,
    strip_of,
    write_tiny_processor,
)

from edgellm.core import graph_io
from edgellm.core.manifest import VISUAL_BUNDLE, load_bundle
from edgellm.core.model_spec import VisionSpec
from edgellm.export import visual
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal.patch_grid import grid_inputs


def make_visual_checkpoint(
    folder: Path, config: Mapping[str, Any], *, dtype: str = "float32"
) -> Path:
    """A vision-language model of the given config, every parameter random, saved to `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForImageTextToText.from_config(hf_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif ("norm" in name or "ln_pre" in name) and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:  # biases and layer scales
                parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("_min"):  # bounds of clipped layers
                buffer.uniform_(-2.5, -1)
            elif name.endswith("_max"):
                buffer.uniform_(1, 2.5)
            elif ".std_" in name:
                buffer.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tiny_processor(folder, config)
    return folder


def rename_tensors(folder: Path, old: str, new: str) -> None:
    """Rewrite the checkpoint with the prefix `old` of its tensors' names replaced."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert any(name.startswith(old) for name in tensors)
    renamed = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, path, {"format": "pt"})


class VisualModel:
    """A checkpoint in transformers, and its bundle in ONNX Runtime."""

    def __init__(
        self, checkpoint: Path, bundle: Path, dtype: str = "fp32", quantization: str = "none"
    ) -> None:
        import onnxruntime
        import torch
        from transformers import AutoModelForImageTextToText

        self.bundle = bundle
        source = open_checkpoint(str(checkpoint), tokenizer=False)
        export_visual(source, bundle, VisualOptions(dtype, quantization=quantization))
        self.manifest = load_bundle(bundle, VISUAL_BUNDLE)
        self.reference = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if quantization != "none":  # ONNX Runtime's kernels round inputs, too; the graph does not
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
        self.session = onnxruntime.InferenceSession(
            bundle / "model.onnx", options, providers=["CPUExecutionProvider"]
        )

    @property
    def spec(self) -> VisionSpec:
        return self.manifest.vision

    def run(self, pixels: np.ndarray, grid: tuple[int, int] = (0, 0)) -> list[np.ndarray]:
        """The graph's outputs for one image: `image_embeds`, then `deepstack_embeds` if any."""
        inputs = {graph_io.PIXEL_VALUES: pixels.astype(self.manifest.dtype)}
        inputs |= grid_inputs(*grid, self.spec)
        return [np.asarray(output) for output in self.session.run(None, inputs)]

    def linears(self) -> dict[str, Any]:
        """The linear layers of transformers' encoder by name."""
        import torch

        parts = visual.find(self.spec.model_type).Model.parts
        return {
            name: module
            for name, module in self.reference.model.named_modules()
            if name.startswith(parts) and isinstance(module, torch.nn.Linear)
        }

    def round_reference(self, precision: str) -> None:
        """Round transformers' weights with a scale for each output channel."""
        import torch

        for module in self.linears().values():
            weight = module.weight.data
            scale = weight.abs().amax(1, keepdim=True) / (127 if precision == "int8" else 448)
            codes = weight / scale
            codes = codes.round() if precision == "int8" else codes.to(torch.float8_e4m3fn).float()
            module.weight.data = codes * scale

    def features(
        self, pixels: list[np.ndarray], grids: list[tuple[int, int]]
    ) -> list[list[np.ndarray]]:
        """Features of all images by transformers, image by image."""
        import torch

        if self.spec.image_size:
            return [[self._tile_features(tiles)] for tiles in pixels]
        if self.spec.model_type == "mistral3":
            return [
                [self._plane_features(planes_of(image, grid, self.spec.merge_size))]
                for image, grid in zip(pixels, grids, strict=True)
            ]
        if self.spec.model_type == "lfm2_vl":
            return [[self._patch_features(*each)] for each in zip(pixels, grids, strict=True)]
        if self.spec.model_type.startswith("gemma4"):
            return [[self._pooled_features(*each)] for each in zip(pixels, grids, strict=True)]
        if self.spec.model_type.startswith("minicpm"):
            return [[self._strip_features(*each)] for each in zip(pixels, grids, strict=True)]
        sizes, whole = torch.tensor([(1, *grid) for grid in grids]), np.concatenate(pixels)
        if self.spec.model_type == "cosmos3_edge":
            whole = channels_last(whole, self.spec.patch_size)
        if self.spec.model_type == "muse_glimmer":
            merge = self.spec.merge_size
            rows = [frames_first(*each, merge) for each in zip(pixels, grids, strict=True)]
            whole = np.concatenate(rows)
        with torch.no_grad():
            found = self.reference.model.get_image_features(torch.from_numpy(whole), sizes)
        outputs = [[embeds.numpy()] for embeds in found.pooler_output]
        if self.spec.num_deepstack:
            for output, *levels in zip(outputs, *found.deepstack_features, strict=True):
                output.append(np.stack([level.numpy() for level in levels]))
        return outputs

    def _patch_features(self, patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        import torch

        rows = patches_of(planes_of(patches, grid, self.spec.merge_size), self.spec.patch_size)
        with torch.no_grad():
            found = self.reference.model.get_image_features(
                torch.from_numpy(rows[None]),
                spatial_shapes=torch.tensor([grid]),
                pixel_attention_mask=torch.ones(1, len(rows), dtype=torch.int64),
            )
        return found.pooler_output[0].numpy()

    def _pooled_features(self, patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        import torch

        rows = patches_of(planes_of(patches, grid, self.spec.merge_size), self.spec.patch_size)
        places = torch.from_numpy(places_of(grid))[None]
        with torch.no_grad():
            found = self.reference.model.get_image_features(
                torch.from_numpy(rows[None]), image_position_ids=places
            )
        return found.pooler_output[0].numpy()

    def _strip_features(self, patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        import torch

        strip = strip_of(planes_of(patches, grid, self.spec.merge_size), self.spec.patch_size)
        with torch.no_grad():
            found = self.reference.model.get_image_features(
                torch.from_numpy(strip[None]), torch.tensor([grid])
            )
        return found.pooler_output[0].numpy()

    def _plane_features(self, planes: np.ndarray) -> np.ndarray:
        import torch

        # Twice, with transformers' mask between images: it fails for an image of one token
        sizes, both = torch.tensor([planes.shape[1:]] * 2), np.stack([planes, planes[::-1]])
        with torch.no_grad():
            found = self.reference.model.get_image_features(
                torch.from_numpy(both), image_sizes=sizes
            )
        return found.pooler_output[0].numpy()

    def _tile_features(self, tiles: np.ndarray) -> np.ndarray:
        import torch

        pixels = torch.from_numpy(tiles)
        if self.spec.model_type in ("idefics3", "smolvlm"):
            pixels = pixels[None]
        with torch.no_grad():
            found = self.reference.model.get_image_features(pixels).pooler_output
        return np.concatenate([rows.numpy() for rows in found])


def whole_grid(spec: VisionSpec, grid: tuple[int, int]) -> tuple[int, int]:
    """A grid with even sides as one of as many tokens, whose sides may be longer."""
    if spec.image_size or spec.merge_size <= 2:
        return grid
    return grid[0] // 2 * spec.merge_size, grid[1] // 2 * spec.merge_size


def random_pixels(spec: VisionSpec, grid: tuple[int, int], seed: int) -> np.ndarray:
    """Pixel values of one image: patches of a grid, or as many tiles as the grid has rows."""
    rows, columns = grid
    shape = (
        (rows, 3, spec.image_size, spec.image_size)
        if spec.image_size
        else (rows * columns, spec.patch_values)
    )
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
