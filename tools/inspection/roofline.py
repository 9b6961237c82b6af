"""Roofline predictions of speed and memory on other boards, from bytes and bandwidth.

Decoding a token reads every weight and the KV cache of all earlier tokens once. So the speed is
at most

    tokens/s = bandwidth / (weight bytes + context * KV bytes per token)

Bandwidths are the makers' peak values; kernels reach less.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.core.model_spec import seen_bytes
from edgellm.tools.inspection.report import Report

FORMULA = "tokens/s <= bandwidth / (weight bytes + context x KV bytes per token)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A board with its maker's specification."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    source: str


BOARDS = (
    Board(
        name="Jetson Orin Nano Super 8 GB",
        memory_bytes=8 << 30,
        bandwidth_bytes_per_s=102e9,
        source="NVIDIA, Jetson Orin Nano Super Developer Kit data sheet",
    ),
    Board(
        name="Jetson Orin NX 16 GB",
        memory_bytes=16 << 30,
        bandwidth_bytes_per_s=102.4e9,
        source="NVIDIA, Jetson Orin NX data sheet DS-10712",
    ),
    Board(
        name="Jetson AGX Orin 64 GB",
        memory_bytes=64 << 30,
        bandwidth_bytes_per_s=204.8e9,
        source="NVIDIA, Jetson AGX Orin Series technical brief v1.2",
    ),
    Board(
        name="Jetson Thor T5000 128 GB",
        memory_bytes=128 << 30,
        bandwidth_bytes_per_s=273e9,
        source="NVIDIA, Jetson Thor modules data sheet",
    ),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Upper bound of plain decode speed on a board, and the memory it needs."""

    board: Board
    tokens_per_s: float
    needed_bytes: int  # weights and KV cache, without activations, libraries and system

    @property
    def fits(self) -> bool:
        """Whether weights and KV cache are smaller than the memory."""
        return self.needed_bytes < self.board.memory_bytes


def predict(report: Report, context: int) -> tuple[Prediction, ...]:
    """Return predictions for a language model after `context` tokens; () if weights are unknown."""
    if not report.is_decoder or report.kv is None or not report.read_bytes:
        return ()
    read = report.read_bytes + seen_bytes(report.kv, context)
    needed = report.loaded_bytes + report.held_kv_bytes(context)
    return tuple(Prediction(board, board.bandwidth_bytes_per_s / read, needed) for board in BOARDS)
