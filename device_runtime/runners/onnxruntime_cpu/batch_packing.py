"""Packs a batch into one pass: the tokens of all sequences are concatenated, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.onnxruntime_cpu.block_kv_cache import block_kv_cache
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.runner import Inputs

# Symbols in the shapes of a graph's inputs that do not count tokens
NUM_SEQUENCES, TABLE_PAGES, MASK_VALUES = NOT_ROWS = "sequences", "table_pages", "mask_values"
_MIN_MASK = 64  # values; masks are padded to powers of two, so passes share bindings
_NO_MASK = np.zeros(_MIN_MASK, np.bool_)


# The axis along which sequences are concatenated
_BY_TOKEN = (graph_io.INPUT_IDS, graph_io.POSITION_IDS, graph_io.DRAFT_HIDDEN)
_AXES = {**dict.fromkeys(_BY_TOKEN, 1), graph_io.TOP_K: 0, graph_io.WINDOW_PLACES: 0}


def joined(parts: Sequence[tuple[KVCache, Inputs]]) -> dict[str, NDArray[Any]]:
    """The inputs of one pass for all parts, by the names in graphs with edgellm's kernels.

    Args:
        parts: caches with allocated blocks, each with inputs by graph I/O name.
    """
    columns: dict[str, list[NDArray[Any]]] = {}
    sequences: list[tuple[int, int, int]] = []
    masks: list[NDArray[np.bool_]] = []
    start = 0
    for cache, inputs in parts:
        rows, index = inputs[graph_io.INPUT_IDS].shape[1], inputs[graph_io.LOGITS_INDEX]
        for name in _AXES:
            if name in inputs:
                columns.setdefault(name, []).append(inputs[name])
        columns.setdefault(graph_io.LOGITS_INDEX, []).append(index + start if start else index)
        if graph_io.PARENT_ROWS in inputs:
            parents = inputs[graph_io.PARENT_ROWS]
            shifted = np.where(parents < 0, parents, parents + start) if start else parents
            columns.setdefault(graph_io.PARENT_ROWS, []).append(shifted)
        for name, table in block_kv_cache(cache).tables.items():
            columns.setdefault(name, []).append(table)
        mask = inputs.get(graph_io.TREE_MASK)
        if mask is not None:
            masks.append(mask)
        width = 0 if mask is None else mask.shape[1]
        sequences.append((inputs[graph_io.WRITE_INDEX][0], rows, width))
        start += rows
    found = {
        # Most passes have one sequence; no copy is made for it.
        name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=_AXES.get(name, 0))
        for name, arrays in columns.items()
    }
    if graph_io.TOP_K in found:
        found[graph_io.TOP_K] = found[graph_io.TOP_K].max(keepdims=True)
    found[graph_io.SEQUENCES] = np.array(sequences)
    found[graph_io.TREE_MASKS] = _packed_masks(masks)
    if graph_io.ADAPTER in parts[0][1]:
        own = [inputs[graph_io.ADAPTER][0] for _, inputs in parts]
        found[graph_io.ADAPTER_ROWS] = np.repeat(own, [rows for _, rows, _ in sequences])
    # The states of all sequences are one array, which is in each part.
    first = parts[0][1]
    found |= {name: first[name] for name in first if name.startswith(graph_io.STATE)}
    return found


def _packed_masks(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    if not masks:
        return _NO_MASK
    size = 0
    for mask in masks:
        size += mask.size
    values = np.zeros(max(_MIN_MASK, 1 << (size - 1).bit_length()), np.bool_)
    at = 0
    for mask in masks:
        values[at : at + mask.size] = mask.ravel()
        at += mask.size
    return values


# Prefixes of outputs of all tokens
_OF_ROWS = graph_io.HIDDEN_TAPS, graph_io.ALIGNMENT_QUERIES, graph_io.STATE_ROWS


class _Share(Mapping[str, NDArray[Any]]):
    """A part's outputs of a pass."""

    def __init__(self, all_of: Outputs, rows: slice, wanted: slice) -> None:
        self._all, self._rows, self._wanted = all_of, rows, wanted

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._all[name][:, self._rows if name.startswith(_OF_ROWS) else self._wanted]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def share(found: Outputs, parts: Sequence[Inputs]) -> list[Outputs]:
    """The outputs of a pass for all parts, one for each."""
    shares: list[Outputs] = []
    rows = wanted = 0
    for inputs in parts:
        next_rows = rows + inputs[graph_io.INPUT_IDS].shape[1]
        next_wanted = wanted + len(inputs[graph_io.LOGITS_INDEX])
        shares.append(_Share(found, slice(rows, next_rows), slice(wanted, next_wanted)))
        rows, wanted = next_rows, next_wanted
    return shares
