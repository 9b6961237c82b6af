"""Tensors of any source, with their part of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.export.checkpoints.checkpoint import CHUNK_BYTES

Contents = Callable[[], Iterator[memoryview]]
VISION = "vision"  # the whole encoder of a vision-language model
PARTS: tuple[str, ...] = (
    "embedding",
    "attention",
    "mlp",
    "head",
    "norms",
    "merger",
    VISION,
    "other",
)
_ENCODER = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|connector|merger|multi_modal_projector)\."
)
# The first match counts; q_norm is a norm, and an engine's copy of a tied table is a head.
_PATTERNS = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("norms", r"norm|\.ln_"),
        ("head", r"^head\.|(?:^|\.)lm_head\.|^output\."),
        ("merger", r"merger|connector|projector"),
        ("embedding", r"embed|embd"),
        ("attention", r"attn|attention"),
        ("mlp", r"mlp|ffn|fc[12]\b"),
    )
)
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks|blk|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A stored tensor; `contents` yields its bytes in pieces."""

    name: str
    dtype: str  # as named in its file
    shape: tuple[int, ...]
    num_bytes: int
    loaded_bytes: int  # in the compute type of an engine
    part: str  # one of PARTS
    layer: int | None
    is_read_whole: bool  # by a forward pass of one token, which reads single rows of tables
    contents: Contents = field(repr=False, compare=False)
    token_share: float = 1.0  # share of experts that one token uses


def contents_at(path: Path, offset: int, size: int) -> Contents:
    """Return a function that yields the bytes of a tensor at an offset in a file."""

    def stream() -> Iterator[memoryview]:
        with path.open("rb") as file:
            file.seek(offset)
            for begin in range(0, size, CHUNK_BYTES):
                yield memoryview(file.read(min(CHUNK_BYTES, size - begin)))

    return stream


def part_of(name: str, *, is_encoder: bool = False) -> str:
    """Return the part of a model that a tensor belongs to, by its name.

    Args:
        name: in Hugging Face's, GGUF's or edgellm's naming.
        is_encoder: whether the model is a visual encoder, whose parts are distinguished.
    """
    if not is_encoder and _ENCODER.search(name):
        return VISION
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), "other")


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor belongs to, by its name."""
    if "midlayer." in name:  # the only layer of a draft
        return 0
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def bytes_by_part(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return the bytes of each existing part, in the order of `PARTS`."""
    sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
    for tensor in tensors:
        sizes[tensor.part] += tensor.num_bytes
    return {part: size for part, size in sizes.items() if size}


def bytes_by_layer(tensors: Iterable[Tensor]) -> dict[int, dict[str, int]]:
    """Return `bytes_by_part` of each layer, without those of a vision-language model's encoder."""
    layers: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layer is not None and tensor.part != VISION:
            layers.setdefault(tensor.layer, []).append(tensor)
    return {layer: bytes_by_part(layers[layer]) for layer in sorted(layers)}


def by_dtype(tensors: Iterable[Tensor]) -> dict[str, tuple[int, int]]:
    """Return number of tensors and bytes of each type, largest first."""
    sizes: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        count, size = sizes.get(tensor.dtype, (0, 0))
        sizes[tensor.dtype] = count + 1, size + tensor.num_bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1][1]))
