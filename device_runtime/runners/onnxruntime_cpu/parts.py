"""Passes of several sequences as one: their rows stand one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import Outputs
from edgellm.device_runtime.runners.onnxruntime_cpu.pages import PagedCache

Inputs = Mapping[str, NDArray[Any]]
# Symbols in the shapes of a graph's inputs that are no numbers of rows
NUM_SEQUENCES, TABLE_PAGES, MASK_VALUES = NOT_ROWS = "sequences", "table_pages", "mask_values"
_NOWHERE = -1
_LEAST_MASK = 64  # values; passes with masks of nearly one size share what they bind


def joined(parts: Sequence[tuple[PagedCache, Inputs]], table_pages: int) -> dict[str, NDArray[Any]]:
    """Inputs of one pass for all parts, by the names that graphs of edgellm's kernels have.

    Args:
        parts: sequences, each with inputs by contract name; pages are there for their rows.
        table_pages: of a whole table.
    """
    each = [inputs for _, inputs in parts]
    found = {
        name: np.concatenate([inputs[name] for inputs in each], axis=1)
        for name in (contract.INPUT_IDS, contract.POSITION_IDS, contract.DRAFT_HIDDEN)
        if name in each[0]
    }
    rows = [inputs[contract.INPUT_IDS].shape[1] for inputs in each]
    starts = np.cumsum([0, *rows[:-1]])
    found[contract.LOGITS_INDEX] = np.concatenate(
        [start + inputs[contract.LOGITS_INDEX] for start, inputs in zip(starts, each, strict=True)]
    )
    if contract.TOP_K in each[0]:
        found[contract.TOP_K] = np.max([inputs[contract.TOP_K] for inputs in each], axis=0)
    masks = [inputs.get(contract.TREE_MASK) for inputs in each]
    found[contract.SEQUENCES] = np.array(
        [
            (inputs[contract.WRITE_INDEX][0], count, 0 if mask is None else mask.shape[1])
            for inputs, count, mask in zip(each, rows, masks, strict=True)
        ]
    )
    found[contract.TREE_MASKS] = _behind_each_other(masks)
    return found | _tables([cache for cache, _ in parts], table_pages)


def _behind_each_other(masks: Sequence[NDArray[np.bool_] | None]) -> NDArray[np.bool_]:
    size = sum(mask.size for mask in masks if mask is not None)
    values = np.zeros(max(_LEAST_MASK, 1 << max(size - 1, 0).bit_length()), np.bool_)
    at = 0
    for mask in masks:
        if mask is not None:
            values[at : at + mask.size] = mask.ravel()
            at += mask.size
    return values


def _tables(caches: Sequence[PagedCache], table_pages: int) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for at, cache in enumerate(caches):
        for name, pages in cache.list_pages().items():
            if name not in found:
                found[name] = np.full((len(caches), table_pages), _NOWHERE)
            found[name][at, : len(pages)] = pages
    return found


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
