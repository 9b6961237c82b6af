"""Tensors of a visual encoder's GGUF file under Hugging Face names.

Source: llama.cpp's `tools/mtmd/clip-impl.h` (names), `clip.cpp` (swapped networks of older files)
and `conversion/*.py` (qwenvl, qwen3vl, smolvlm, internvl, gemma, llava, lfm2).

A converter splits two kinds of tensors, which are joined here: queries, keys and values, and the
patch embedding's kernel over two frames. Other changes are reverted as the family says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.gguf.reader import GGUFTensor, decoded
from edgellm.export.checkpoints.weights import as_bytes

_PLAIN = ("F32", "F16", "BF16")
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(.+)\.(weight|bias|(?:in|out)put_m(?:in|ax))")
_LINEAR = ".linear"  # module of the weight of a clipped layer; its bounds are next to it
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
_KERNEL = "v.patch_embd.weight"
_JOINED = ("attn_q", "attn_k", "attn_v")
Revert = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Hugging Face's names of an encoder's tensors, by llama.cpp's."""

    root: str  # of the tower; unknown tensors keep llama.cpp's name after it
    blocks: str  # between the root and a block's index
    block: Mapping[str, str]  # modules of a block
    tensors: Mapping[str, str]  # modules and whole tensors outside of blocks
    parameters: Mapping[str, str] = field(default_factory=dict)  # of a block, not in a module
    qkv: str = ""  # the module that joins queries, keys and values; "": they are apart
    deepstack: Mapping[str, str] = field(default_factory=dict)  # modules of a level
    ranks: Mapping[str, int] = field(default_factory=dict)  # of tensors stored with fewer axes
    unused: tuple[str, ...] = ()  # what only llama.cpp needs
    ignored: tuple[str, ...] = ()  # prefixes of another encoder's tensors
    may_swap: bool = True  # older files name the two layers of a network the other way around


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """Parts of a tensor, one after the other on an axis."""

    parts: Sequence[GGUFTensor]
    shape: tuple[int, ...]
    is_stacked: bool = False  # frames of a kernel, on a new axis 2
    revert: Revert | None = None  # of a single part

    @property
    def dtype(self) -> str:
        """Of safetensors; parts in blocks and reverted changes become float32."""
        if self.revert is not None:
            return "F32"
        kinds = {part.kind for part in self.parts}
        return next(iter(kinds)) if len(kinds) == 1 and kinds <= {*_PLAIN} else "F32"

    def stream(self) -> Iterator[memoryview]:
        """Row-major data."""
        if self.revert is not None:
            yield as_bytes(np.ascontiguousarray(self.revert(_floats(self.parts[0]))))
            return
        if not self.is_stacked:
            for part in self.parts:
                yield as_bytes(_values(part, self.dtype))
            return
        itemsize = 4 if self.dtype == "F32" else 2
        frames = [
            np.ascontiguousarray(_values(part, self.dtype)).view(f"u{itemsize}").reshape(part.shape)
            for part in self.parts
        ]
        yield as_bytes(np.stack(frames, axis=2))


def _values(tensor: GGUFTensor, dtype: str) -> np.ndarray:
    return tensor.data if tensor.kind == dtype else decoded(tensor.data, tensor.kind)


def _floats(tensor: GGUFTensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(_values(tensor, "F32")).view(np.float32).reshape(tensor.shape)


class EncoderTensors:
    """An encoder's tensors as floats."""

    def __init__(
        self,
        *,
        tensors: Sequence[GGUFTensor],
        names: EncoderNames,
        levels: Sequence[int] = (),
        changes: Mapping[str, Revert] | None = None,
    ) -> None:
        """Args as follows.

        Args:
            tensors: of the file.
            names: Hugging Face's.
            levels: blocks with DeepStack levels.
            changes: what reverts a converter's change, by name; in blocks after `v.blk.N.`.
        """
        held = {
            tensor.name: tensor
            for tensor in tensors
            if tensor.name not in names.unused and not tensor.name.startswith(names.ignored)
        }
        if names.may_swap and _is_swapped(held):
            held = {_swapped(name): tensor for name, tensor in held.items()}
        self._joined = dict(_joined(held, names, levels, changes or {}))

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return {name: TensorInfo(each.dtype, each.shape) for name, each in self._joined.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """Row-major data."""
        return self._joined[name].stream()


def _is_swapped(held: Mapping[str, GGUFTensor]) -> bool:
    up, down = (held.get(f"v.blk.0.ffn_{part}.weight") for part in ("up", "down"))
    query = held.get("v.blk.0.ln1.weight")
    if up is None or down is None or query is None or len(down.shape) != 2:
        return False
    size = math.prod(query.shape)
    return down.shape[1] == size and down.shape[0] != size


def _swapped(name: str) -> str:
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return re.sub(r"ffn_up|ffn_down", lambda found: other[found[0]], name)


def _joined(
    held: Mapping[str, GGUFTensor],
    names: EncoderNames,
    levels: Sequence[int],
    changes: Mapping[str, Revert],
) -> Iterator[tuple[str, _Joined]]:
    taken: set[str] = set()
    for name, tensor in held.items():
        if name in taken:
            continue
        block = _BLOCK.fullmatch(name)
        own = f"{block[2]}.{block[3]}" if block is not None else name
        if (revert := changes.get(own)) is not None:
            shape = revert(np.zeros(tensor.shape, np.float32)).shape
            yield _name(name, names, levels), _Joined(parts=(tensor,), shape=shape, revert=revert)
            continue
        second = held.get(f"{_KERNEL}.1")
        if name == _KERNEL and second is not None and len(tensor.shape) == 4:
            taken.add(f"{_KERNEL}.1")
            shape = (*tensor.shape[:2], 2, *tensor.shape[2:])
            yield (
                _name(name, names, levels),
                _Joined(parts=(tensor, second), shape=shape, is_stacked=True),
            )
            continue
        sources = _projections(held, name, names)
        taken.update(sources)
        parts = [held[each] for each in sources]
        rows = sum(part.shape[0] for part in parts)
        shape = rows, *tensor.shape[1:]
        ones = (1,) * (names.ranks.get(name, 0) - len(shape))
        yield _name(name, names, levels), _Joined(parts=parts, shape=(*ones, *shape))


def _projections(held: Mapping[str, GGUFTensor], name: str, names: EncoderNames) -> Sequence[str]:
    """The tensor, or those of queries, keys and values if they are one in the checkpoint."""
    found = _BLOCK.fullmatch(name)
    if not names.qkv or found is None or found[2] not in _JOINED:
        return (name,)
    parts = [f"v.blk.{found[1]}.{part}.{found[3]}" for part in _JOINED]
    return parts if all(each in held for each in parts) else (name,)


def _name(name: str, names: EncoderNames, levels: Sequence[int]) -> str:
    if (found := _BLOCK.fullmatch(name)) is not None:
        layer, own, kind = found.groups()
        place = f"{names.root}.{names.blocks}.{layer}"
        module = names.qkv if names.qkv and own in _JOINED else names.block.get(own)
        if module is not None:
            is_bound = kind not in ("weight", "bias")
            return f"{place}.{module.removesuffix(_LINEAR) if is_bound else module}.{kind}"
        if own in names.parameters:
            return f"{place}.{names.parameters[own]}"
    if (level := _DEEPSTACK.fullmatch(name)) is not None and int(level[1]) in levels:
        place = f"{names.root}.deepstack_merger_list.{list(levels).index(int(level[1]))}"
        return f"{place}.{names.deepstack.get(level[2], level[2])}.{level[3]}"
    if (whole := names.tensors.get(name)) is not None:
        return whole
    stem, _, kind = name.rpartition(".")
    module = names.tensors.get(stem)
    return f"{names.root}.{name}" if module is None else f"{module}.{kind}"
