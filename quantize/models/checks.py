"""Checks before the computation: the model, its weights, memory and disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgellm.core.errors import (
    BrokenArtifactError,
    LimitError,
    UnsupportedModelError,
)
from edgellm.core.resources import system_memory
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo, TensorSource
from edgellm.export.checkpoints.vlm import text_tower
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import understand
from edgellm.quantize.formats.tensors import FLOATS, Tensor
from edgellm.quantize.models.families import Family, check_family

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NO_WEIGHTS = ("inv_freq", "d2t", "t2d")
_BASE_BYTES = 700 << 20  # Python with torch, transformers and ModelOpt
_HEAD_COPIES = 5


def check_model(checkpoint: Checkpoint, ignored_keys: tuple[str, ...]) -> DecoderConfig:
    """Return the config of a float model whose result can be exported.

    Raises:
        UnsupportedModelError: the model is quantized, computes embeddings, or its architecture is
            unsupported.
        BrokenArtifactError: tensors are missing, unknown or of other shapes.
    """
    check_floats(checkpoint)
    if checkpoint.pooling:
        raise UnsupportedModelError(
            f"{checkpoint.label} is an embedding model, for which calibration is unsupported",
            hint="quantize its weights with llm_build --quantize int8 or int4",
        )
    config = understand(checkpoint, ExportOptions(ignore_config_keys=ignored_keys))
    model_type = text_tower(checkpoint).checkpoint.config["model_type"]
    check_family(checkpoint.label, model_type)
    return config


def check_floats(checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedModelError` if the weights are quantized."""
    if checkpoint.quant_config:
        raise UnsupportedModelError(
            f"{checkpoint.label} is quantized already ({checkpoint.quantization})",
            hint="give the float checkpoint that it was made from",
        )
    for name, info in checkpoint.tensors.infos().items():
        if info.dtype not in FLOATS and not name.endswith(_NO_WEIGHTS):
            raise UnsupportedModelError(
                f"{name} is stored as {info.dtype}, not as float",
                hint="give the float checkpoint that it was made from",
            )


def linear_shapes(
    infos: Mapping[str, TensorInfo], layers: tuple[str, ...], family: Family
) -> dict[str, tuple[int, int]]:
    """Return [out, in] of the linear layers in `layers`."""
    found = {}
    for name, info in infos.items():
        layer = next((each for each in layers if name.startswith(each)), None)
        if layer is None:
            continue
        shape = family.linear_shape(name.removeprefix(layer), info.shape)
        if shape is not None:
            found[name.removesuffix(".weight")] = shape
    return found


def check_weights(source: TensorSource) -> None:
    """Check the values of all tensors, in parts.

    Raises:
        BrokenArtifactError: a tensor has NaN or infinity, or a matrix is all zeros.
    """
    for name, info in source.infos().items():
        if info.dtype not in FLOATS:
            continue
        is_zero, width = len(info.shape) == 2, 4 if info.dtype == "F32" else 2
        for part in source.stream(name):
            values = Tensor(TensorInfo(info.dtype, (len(part) // width,)), part).floats()
            if not np.isfinite(values).all():
                raise BrokenArtifactError(
                    f"tensor {name} holds values that are not numbers",
                    hint="the checkpoint is damaged or its training diverged; fetch it again",
                )
            is_zero = is_zero and not values.any()
        if is_zero:
            raise BrokenArtifactError(
                f"tensor {name} is all zeros, which cannot be quantized",
                hint="the checkpoint is incomplete; fetch it again",
            )


def needed_bytes(
    infos: Mapping[str, TensorInfo],
    layers: tuple[str, ...],
    head: TensorInfo,
    config: DecoderConfig,
    batch_tokens: int,
    copies: int,
    *,
    with_head: bool,
) -> int:
    """Return an upper estimate of a run's memory.

    Args:
        infos: of all tensors.
        layers: name prefix of each layer's tensors.
        head: of the float head [V, H].
        config: sizes of the layers.
        batch_tokens: computed at a time.
        copies: peak number of copies of a layer's weights.
        with_head: whether the head is quantized.
    """
    sizes = [
        sum(math.prod(info.shape) for name, info in infos.items() if name.startswith(layer))
        for layer in layers
    ]
    width = 8 * config.hidden_size + 4 * config.intermediate_size
    peaks = [
        copies * 4 * max(sizes) + 4 * batch_tokens * width,
        head.num_bytes + 4 * 8 * 256 * head.shape[0],  # the evaluation's logits
        _HEAD_COPIES * 4 * math.prod(head.shape) if with_head else 0,
    ]
    return _BASE_BYTES + max(peaks)


def check_memory(needed: int, available: int | None) -> None:
    """Raise `LimitError` if memory does not suffice; None: unknown."""
    if available is not None and needed > available:
        raise LimitError(
            f"quantizing this model needs about {needed / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are free",
            hint="close other programs, give a smaller --batch_tokens, or leave out "
            "--lm_head_quantization",
        )


def available_bytes() -> int | None:
    """Return the memory available without swapping; None: unknown."""
    memory = system_memory()
    return memory.available_bytes if memory is not None else None


def check_disk(folder: Path, needed: int) -> None:
    """Raise `LimitError` if the hidden states and the result do not fit on the disk."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise LimitError(
            f"{folder} needs about {needed / 1e9:.1f} GB of disk ({needed} bytes), "
            f"{free / 1e9:.1f} GB are free in {place}",
            hint="free some space, or give a smaller --num_samples",
        )
