"""Passes of several sequences as one: their rows stand one behind the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import Outputs
from edgellm.device_runtime.runners.onnxruntime_cpu.pages import PagedCache

Inputs = Mapping[str, NDArray[Any]]
# Symbols in the shapes of a graph's inputs that are no numbers of rows
NUM_SEQUENCES, TABLE_PAGES, MASK_VALUES = NOT_ROWS = "sequences", "table_pages", "mask_values"
_LEAST_MASK = 64  # values; passes with masks of nearly one size share what they bind
_NO_MASK = np.zeros(_LEAST_MASK, np.bool_)


_side_by_side = partial(np.concatenate, axis=1)


def joined(parts: Sequence[tuple[PagedCache, Inputs]]) -> dict[str, NDArray[Any]]:
    """Inputs of one pass for all parts, by the names that graphs of edgellm's kernels have.

    Args:
        parts: sequences, each with inputs by contract name; pages are there for their rows.
    """
    each = [inputs for _, inputs in parts]
    found = {
        name: _one_or_all([inputs[name] for inputs in each], _side_by_side)
        for name in (contract.INPUT_IDS, contract.POSITION_IDS, contract.DRAFT_HIDDEN)
        if name in each[0]
    }
    rows = [inputs[contract.INPUT_IDS].shape[1] for inputs in each]
    wanted = [inputs[contract.LOGITS_INDEX] for inputs in each]
    starts = itertools.accumulate(rows[:-1])
    wanted[1:] = [start + index for start, index in zip(starts, wanted[1:], strict=True)]
    found[contract.LOGITS_INDEX] = _one_or_all(wanted, np.concatenate)
    if contract.TOP_K in each[0]:
        found[contract.TOP_K] = max(inputs[contract.TOP_K] for inputs in each)
    masks = [inputs.get(contract.TREE_MASK) for inputs in each]
    found[contract.SEQUENCES] = np.array(
        [
            (inputs[contract.WRITE_INDEX][0], count, 0 if mask is None else mask.shape[1])
            for inputs, count, mask in zip(each, rows, masks, strict=True)
        ]
    )
    found[contract.TREE_MASKS] = _behind_each_other([one for one in masks if one is not None])
    if contract.ADAPTER in each[0]:
        own = [inputs[contract.ADAPTER][0] for inputs in each]
        found[contract.ADAPTER_ROWS] = np.repeat(own, rows)
    tables = [cache.tables() for cache, _ in parts]
    for name in tables[0]:
        found[name] = _one_or_all([pages[name][None] for pages in tables], np.concatenate)
    return found


def _one_or_all(
    arrays: list[NDArray[Any]], join: Callable[[list[NDArray[Any]]], NDArray[Any]]
) -> NDArray[Any]:
    """Most passes are of one sequence, whose time counts."""
    return arrays[0] if len(arrays) == 1 else join(arrays)


def _behind_each_other(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    if not masks:
        return _NO_MASK
    size = sum(mask.size for mask in masks)
    values = np.zeros(max(_LEAST_MASK, 1 << (size - 1).bit_length()), np.bool_)
    at = 0
    for mask in masks:
        values[at : at + mask.size] = mask.ravel()
        at += mask.size
    return values


class _Share(Mapping[str, NDArray[Any]]):
    """What a part gets of a pass."""

    def __init__(self, all_of: Outputs, rows: slice, wanted: slice) -> None:
        self._all, self._rows, self._wanted = all_of, rows, wanted

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._all[name][:, self._rows if name == contract.HIDDEN_TAPS else self._wanted]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def share(found: Outputs, parts: Sequence[Inputs]) -> list[Outputs]:
    """The outputs of a pass for all parts, one for each."""
    shares: list[Outputs] = []
    rows = wanted = 0
    for inputs in parts:
        next_rows = rows + inputs[contract.INPUT_IDS].shape[1]
        next_wanted = wanted + len(inputs[contract.LOGITS_INDEX])
        shares.append(_Share(found, slice(rows, next_rows), slice(wanted, next_wanted)))
        rows, wanted = next_rows, next_wanted
    return shares
