"""What a round of a tree keeps on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.device_runtime.kernels.triton.catalog import PICKS, SHARE, START
from edgellm.device_runtime.runners.device_speculation import RATE_POINTS, Growth
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import (
    Block,
    Layout,
    Packed,
    Tensors,
    packed_bytes,
)
from edgellm.device_runtime.runners.tensorrt.ragged_batch import SHAPE as TABLE

_OF_A_LEVEL = ("nodes", "level_tokens", "above", "positions", "slot", "mask")
Shape = tuple[int, int]  # of the trees of a pass: nodes, and sequences


class RoundMemory:
    """Addresses by name; what the host writes each round, and what it reads.

    Attributes:
        arguments: of a round, written by the host.
        tensors: pool, slots of the draft's cache and what its passes over levels take and give.
        reports: by nodes and sequences, what the host reads; the trees among it are verified.
    """

    def __init__(
        self,
        *,
        device: Device,
        growth: Growth,
        axes: tuple[int, int],
        candidates: int,
        hidden: tuple[int, np.dtype],
        vocab_size: int,
        sequences: int,
        trees: Sequence[Shape],
    ) -> None:
        """Allocate and write what stays.

        Args:
            device: of both networks.
            growth: of all rounds.
            axes: of the positions of base and draft.
            candidates: that the draft gives for a row.
            hidden: numbers of a row that the draft continues, and their type.
            vocab_size: of the base.
            sequences: of a round at most.
            trees: that are verified in a pass.
        """
        self._device = device
        rows = max(nodes * count for nodes, count in trees)
        arguments = _arguments(growth, sequences)
        self._arguments = Block(device, packed_bytes(arguments))
        self.arguments: Packed = self._arguments.pack(arguments)
        layout = {
            **_pool(growth, sequences, candidates, hidden),
            **_levels(growth, sequences, axes[1], candidates, hidden),
            **_verification(growth, sequences, axes[0], vocab_size, rows),
        }
        self.tensors = Tensors(device, layout)
        reports = {each: _report(*each) for each in trees}
        self._report = Block(device, max(map(packed_bytes, reports.values())))
        self.reports = {each: self._report.pack(report) for each, report in reports.items()}
        self._write("parents", np.full(layout["parents"][0], -1))
        seen = np.zeros(layout["seen"][0], np.int8)
        seen[:, 0, 0] = 1
        self._write("seen", seen)
        self._write("index", np.arange(layout["index"][0][0]))
        if growth.places is not None:
            self._write("places", growth.places)

    def _write(self, name: str, array: np.ndarray) -> None:
        host = self._device.pinned(array.nbytes)
        host[:] = array.reshape(-1).view(np.uint8)
        self._device.upload(self.tensors[name], host)
        self._device.synchronize()

    def upload(self) -> None:
        """Ask for the arguments to be copied to the device."""
        self._arguments.upload(self.arguments)

    def download(self, trees: Shape) -> None:
        """Ask for the report of a pass over such trees."""
        report = self.reports[trees]
        self._device.download(report.host, report.address)


def _arguments(growth: Growth, sequences: int) -> Layout:
    return {
        "base_start": ((sequences, START), np.int64),
        "draft_start": ((sequences, START), np.int64),
        "rates": ((sequences, 2, RATE_POINTS), np.float64),
        "rules": ((sequences, 4), np.float64),
        "uniforms": ((sequences * growth.nodes[-1],), np.float64),  # by a tree's nodes
    }


def _pool(growth: Growth, sequences: int, candidates: int, hidden: tuple[int, np.dtype]) -> Layout:
    size, slots = growth.pool_size(growth.levels), 1 + sum(growth.widths)
    width, dtype = hidden
    return {
        "tokens": ((sequences, size), np.int64),
        "parents": ((sequences, size), np.int64),
        "scores": ((sequences, size), np.float64),
        "own": ((sequences, size), np.float32),
        "places": ((size,), np.float64),
        "seen": ((sequences, slots, slots), np.int8),
        "hidden": ((slots, sequences, width), dtype),
        "root_nodes": ((sequences,), np.int32),
        "root_ids": ((sequences, candidates), np.int64),
        "root_log_probs": ((sequences, candidates), np.float32),
    }


def _levels(
    growth: Growth, sequences: int, axes: int, candidates: int, hidden: tuple[int, np.dtype]
) -> Layout:
    maximum, (width, dtype) = sequences * max(growth.widths, default=1), hidden
    layout: dict = {
        "candidate_ids": ((maximum, candidates), np.int64),
        "candidate_log_probs": ((maximum, candidates), np.float32),
        "level_hidden": ((maximum, width), dtype),
        "level_recycled": ((maximum, width), dtype),
        # Where `grow_level` writes what a pass behind it would read; behind the last level is none.
        **dict.fromkeys(_OF_A_LEVEL, ((1,), np.int64)),
    }
    used = 0
    for level, count in enumerate(growth.widths):
        used += count
        layout |= {
            f"nodes{level}": ((sequences, count), np.int32),
            f"level_tokens{level}": ((sequences, count), np.int64),
            f"above{level}": ((sequences, count), np.int32),
            f"positions{level}": ((axes, sequences, count), np.int64),
            f"slot{level}": (_slot(sequences), np.int64),
            f"mask{level}": ((sequences, count, used), np.int8),
        }
    return layout


def _verification(growth: Growth, sequences: int, axes: int, vocab_size: int, rows: int) -> Layout:
    shares = -(-vocab_size // SHARE)
    level_rows = sequences * max(growth.widths, default=1)
    return {
        "index": ((max(rows, level_rows),), np.int64),
        "chosen": ((rows,), np.int32),
        "tree_positions": ((axes, rows), np.int64),
        "tree_slot": (_slot(sequences), np.int64),
        "tree_mask": ((rows, growth.nodes[-1]), np.int8),
        "argmax": ((rows,), np.int64),
        "highest": ((rows,), np.float32),
        "keys": ((rows, shares, PICKS), np.int64),
        "sums": ((rows, shares, 2), np.float32),
        "values": ((rows, PICKS), np.float32),
        "ids": ((rows, PICKS), np.int32),
        "picked": ((rows,), np.int64),
        "log_sums": ((rows,), np.float32),
    }


def _slot(sequences: int) -> tuple[int, ...]:
    """The table of the sequences of a pass."""
    return TABLE if sequences > 1 else (1,)


def _report(nodes: int, sequences: int) -> Layout:
    accepted: dict = {}
    for how in ("greedy", "sampled"):
        accepted[f"{how}_outcome"] = ((sequences, 3), np.int32)
        accepted[f"{how}_path"] = ((sequences, nodes), np.int32)
    return {
        **accepted,
        "token_ids": ((sequences, nodes), np.int64),
        "parents": ((sequences, nodes), np.int64),
        "log_probs": ((sequences, nodes), np.float32),
    }
