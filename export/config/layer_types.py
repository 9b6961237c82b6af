"""Attention kinds of layers: full or sliding window, by config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR, CONV = "linear_attention", "conv"
EXPERTS, NETWORK = "moe", "mlp"
DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of a layer."""

    num_heads: int
    head_dim: int
    source: int | None = None  # the layer that computes them; None: the layer itself


@dataclass(frozen=True, slots=True, eq=False)
class AttentionKind:
    """Attention kind; layers with the same rope share RoPE tables, with the same window masks."""

    rope: Rope | None  # None: NoPE
    window: int | None = None  # tokens that a token attends to, itself included; None: all
    kv: LayerKV | None = None  # None: of the config's sizes, its own
    # Image tokens attend to no later ones, even if those of other layers attend to each other.
    causal_images: ClassVar[bool] = False

    @property
    def source(self) -> int | None:
        """The layer whose keys and values it reads; None: its own."""
        return self.kv.source if self.kv is not None else None


class CausalKind(AttentionKind):
    """Attention of layers that are causal for images, too."""

    causal_images = True


def read_layer_types(
    reader: ConfigReader, default: Sequence[str], kinds: Sequence[str] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """One of `kinds` for each layer; `default` if the config has no layer_types.

    Raises:
        UnsupportedModelError: unknown types, not one for each layer, or no attention.
    """
    found = reader.read("layer_types", list, list(default))
    if unknown := [kind for kind in found if kind not in kinds]:
        raise UnsupportedModelError(
            f"config.json: layer_types names {unknown[0]!r}, which is not supported",
            hint=f"supported: {', '.join(kinds)}",
        )
    check_length(reader, "layer_types", found)
    if not {FULL, SLIDING} & {*found}:
        raise UnsupportedModelError(
            "config.json: no layer attends, which is not supported",
            hint=REMEDY,
        )
    return tuple(found)


def read_networks(reader: ConfigReader, default: Sequence[bool]) -> tuple[bool, ...]:
    """Whether each layer has experts; `default` if the config has no mlp_layer_types.

    Raises:
        UnsupportedModelError: unknown types, or not one for each layer.
    """
    usual = [SPARSE if is_sparse else DENSE for is_sparse in default]
    found = reader.read("mlp_layer_types", list, usual)
    if unknown := [kind for kind in found if kind not in (DENSE, SPARSE)]:
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types names {unknown[0]!r}, which is not supported",
            hint=f"supported: {DENSE}, {SPARSE}",
        )
    check_length(reader, "mlp_layer_types", found)
    return tuple(kind == SPARSE for kind in found)


def check_length(reader: ConfigReader, key: str, found: Sequence[object]) -> None:
    """Raise `UnsupportedModelError` unless a list has one entry for each layer."""
    layers = reader.positive("num_hidden_layers")
    if len(found) != layers:
        raise UnsupportedModelError(
            f"config.json: {key} has {len(found)} entries, num_hidden_layers is {layers}",
            hint="correct config.json; --num_layers N exports the first N layers",
        )


def every(interval: int, layers: int) -> list[str]:
    """Full attention in layers `interval`, 2 * `interval`, ..., windows in the others."""
    return [FULL if index % interval == 0 else SLIDING for index in range(1, layers + 1)]


def read_window(reader: ConfigReader, types: Sequence[str]) -> int | None:
    """`sliding_window`; raises `UnsupportedModelError` if layers need one and it is missing."""
    window = reader.optional("sliding_window", int)
    if window is None and SLIDING in types:
        raise UnsupportedModelError(f"config.json: {SLIDING} in layer_types, but no sliding_window")
    return window


def window_of(kind: str, window: int | None) -> int | None:
    """`window` for a sliding layer, None for full attention."""
    return window if kind == SLIDING else None
