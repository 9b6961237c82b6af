"""What a round of a tree keeps on the device."""

from __future__ import annotations

import numpy as np

from edgellm.device_runtime.kernels.triton.catalog import PICKS, SHARE
from edgellm.device_runtime.runners.rounds import RATE_POINTS, Growth
from edgellm.device_runtime.runners.tensorrt.device import Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import (
    Block,
    Layout,
    Packed,
    Tensors,
    packed_bytes,
)

_OF_A_LEVEL = ("nodes", "level_tokens", "above", "positions", "slot", "mask")


class RoundMemory:
    """Addresses by name; what the host writes each round, and what it reads.

    Attributes:
        arguments: of a round, written by the host.
        tensors: pool, slots of the draft's cache and what its passes over levels take and give.
        reports: by size of the tree, what the host reads; the tree among it is verified.
    """

    def __init__(
        self,
        device: Device,
        growth: Growth,
        *,
        axes: tuple[int, int],
        candidates: int,
        hidden: tuple[int, np.dtype],
        vocab_size: int,
    ) -> None:
        """Allocate and write what stays.

        Args:
            device: of both networks.
            growth: of all rounds.
            axes: of the positions of base and draft.
            candidates: that the draft gives for a row.
            hidden: numbers of a row that the draft continues, and their type.
            vocab_size: of the base.
        """
        self._device = device
        arguments = _arguments(growth)
        self._arguments = Block(device, packed_bytes(arguments))
        self.arguments: Packed = self._arguments.pack(arguments)
        layout = {
            **_pool(growth, hidden),
            **_levels(growth, axes[1], candidates, hidden),
            **_verification(growth, axes[0], vocab_size),
        }
        self.tensors = Tensors(device, layout)
        reports = {nodes: _report(nodes) for nodes in growth.nodes}
        self._report = Block(device, max(map(packed_bytes, reports.values())))
        self.reports = {nodes: self._report.pack(each) for nodes, each in reports.items()}
        self._write("parents", np.array([-1]))
        self._write("seen", np.ones(1, np.int8))
        self._write("index", np.arange(max((growth.nodes[-1], *growth.widths))))
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

    def download(self, nodes: int) -> None:
        """Ask for the report of a tree of so many nodes."""
        report = self.reports[nodes]
        self._device.download(report.host, report.address)


def _arguments(growth: Growth) -> Layout:
    return {
        "base_start": ((2,), np.int64),
        "draft_start": ((2,), np.int64),
        "root": ((1,), np.int64),
        "rates": ((2, RATE_POINTS), np.float64),
        "rules": ((4,), np.float64),
        "uniforms": ((1 + growth.levels,), np.float64),
    }


def _pool(growth: Growth, hidden: tuple[int, np.dtype]) -> Layout:
    size, slots = growth.pool_size(growth.levels), 1 + sum(growth.widths)
    width, dtype = hidden
    return {
        "tokens": ((size,), np.int64),
        "parents": ((size,), np.int64),
        "scores": ((size,), np.float64),
        "own": ((size,), np.float32),
        "places": ((size,), np.float64),
        "seen": ((slots, slots), np.int8),
        "hidden": ((slots, width), dtype),
        "root_nodes": ((1,), np.int32),
    }


def _levels(growth: Growth, axes: int, candidates: int, hidden: tuple[int, np.dtype]) -> Layout:
    most, (width, dtype) = max(growth.widths, default=1), hidden
    layout: dict = {
        "candidate_ids": ((most, candidates), np.int64),
        "candidate_log_probs": ((most, candidates), np.float32),
        "level_hidden": ((most, width), dtype),
        # Where `grow_level` writes what a pass behind it would read; behind the last level is none.
        **dict.fromkeys(_OF_A_LEVEL, ((1,), np.int64)),
    }
    used = 0
    for level, count in enumerate(growth.widths):
        used += count
        layout |= {
            f"nodes{level}": ((count,), np.int32),
            f"level_tokens{level}": ((count,), np.int64),
            f"above{level}": ((count,), np.int32),
            f"positions{level}": ((axes, count), np.int64),
            f"slot{level}": ((1,), np.int64),
            f"mask{level}": ((count, used), np.int8),
        }
    return layout


def _verification(growth: Growth, axes: int, vocab_size: int) -> Layout:
    most = growth.nodes[-1]
    shares = -(-vocab_size // SHARE)
    return {
        "index": ((max((most, *growth.widths)),), np.int64),
        "chosen": ((most,), np.int32),
        "tree_positions": ((axes, most), np.int64),
        "tree_mask": ((most, most), np.int8),
        "argmax": ((most,), np.int64),
        "highest": ((most,), np.float32),
        "keys": ((most, shares, PICKS), np.int64),
        "sums": ((most, shares, 2), np.float32),
        "values": ((most, PICKS), np.float32),
        "ids": ((most, PICKS), np.int32),
        "picked": ((most,), np.int64),
        "log_sums": ((most,), np.float32),
    }


def _report(nodes: int) -> Layout:
    return {
        "outcome": ((3,), np.int32),
        "path": ((nodes,), np.int32),
        "token_ids": ((nodes,), np.int64),
        "parents": ((nodes,), np.int64),
        "log_probs": ((nodes,), np.float32),
    }
