"""Estimated time of a token on a GPU: bytes, launches and waits of a forward pass.

    python benchmarks/harness/gpu/model.py [--layers ENGINE/llm.layers.json] [--context 1024]

The network is Llama-3.1-8B with its EAGLE3 draft. Launches are those of engines that TensorRT-RTX
compiled (`LAUNCHES`, or an engine's layer report). Bytes follow from the weights' types and the KV
cache. Each figure is a sum of named parts, which explain its distance from the memory roofline.
This is a model that has not run on a GPU. Published figures are those of TensorRT Edge-LLM 0.4 on a
Jetson AGX Thor.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    MOST_SHARES,
    PARTIAL_ROWS,
)

BITS = {"fp16": 16.0, "int4": 4 + 16 / 128, "nvfp4": 4 + 8 / 16}  # of a weight, with its scales
# Of TensorRT-RTX 1.7.1 for compute capability 12.0, the engines of
# tests/support/tensorrt_bundles.py with 4 and 6 layers: kernels of a layer for one row and for
# many, those outside of layers; and those of a draft's step.
LAUNCHES = {"fp16": ((8, 12), 6), "int4": ((9, 15), 6), "nvfp4": ((20, 23), 5)}
DRAFT_LAUNCHES = {"fp16": 19, "int4": 22, "nvfp4": 30}
PUBLISHED = {  # tokens/s on Thor: plain, EAGLE3
    "nvfp4": (54.9, 189.2),
    "int4": (50.8, 81.0),
}
ACCEPTED = 5.2  # tokens of a round, as published with these figures


@dataclass(frozen=True, slots=True)
class Board:
    """Bandwidth and latencies of a GPU; all except the bandwidth are assumptions."""

    name: str
    gb_per_s: float  # of the memory, by its maker
    share: float = 0.85  # of it that large kernels reach
    launch_us: float = 1.5  # between two kernels of a CUDA graph
    wait_us: float = 40.0  # the host waits, reads and launches again
    small_us: float = 10.0  # a kernel of one block: a level joins the pool, a tree is chosen
    has_fp4: bool = False
    # Products of 60 rows with int4 are not bound by the memory: times what they read takes. So
    # much the published figure implies.
    int4_rows: float = 3.5


BOARDS = (
    Board("Thor", 273.0, has_fp4=True),
    Board("Orin", 204.8, wait_us=60.0),
    Board("H100", 3350.0, share=0.75, wait_us=15.0),
)


@dataclass(frozen=True, slots=True)
class Way:
    """A configuration of engine and runtime."""

    name: str
    attends_capacity: bool  # attention reads the whole KV cache, and writes and reads a copy
    head: str  # its precision, and the draft's
    waits: int  # of a round; of a plain step there is one


# Tests on the fake GPU count the waits, and `ROUND_KERNELS`; `edgellm-quantize --target` gives head
# and draft the form of the base.
_FLOATS = Way("head and draft in fp16", False, "fp16", 1)
_NATIVE = replace(_FLOATS, name="with --kernels tensorrt", attends_capacity=True)
TODAY = replace(_FLOATS, name="as built today", head="")
WAYS = (replace(_NATIVE, name="and the host between levels", waits=5), _NATIVE, _FLOATS, TODAY)

# edgellm's kernels with the networks' in a round on the device: of one block each, a level
# and the one after the last, the tree, its layout and its acceptance; and those that copy rows.
ROUND_KERNELS, ROUND_COPIES = 1 + 3, 4  # and one, or two, more for each level but the last
HOST_TREE_MS = 0.13  # of a round, measured: trees of 60 nodes and four levels on an x86 core
LAYERS, HIDDEN, KV_WIDTH, INNER, VOCAB = 32, 4096, 1024, 14336, 128256
DRAFT_VOCAB, STEPS = 32000, 4
_LINEAR = HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH) + 3 * HIDDEN * INNER  # weights of a layer
_DRAFT = _LINEAR + HIDDEN * (HIDDEN + 2 * KV_WIDTH)  # attention input: two hidden states
_FUSE = 3 * HIDDEN * HIDDEN


@dataclass(frozen=True, slots=True)
class Pass:
    """Bytes by kind, and launches, of a forward pass."""

    gigabytes: Mapping[str, float]
    launches: int

    def parts_ms(self, board: Board) -> dict[str, float]:
        """Return the time by kind."""
        rate = board.gb_per_s * board.share
        read = {kind: 1e3 * size / rate for kind, size in self.gigabytes.items()}
        return {**read, "launches": self.launches * board.launch_us / 1e3}


def base_pass(way: Way, precision: str, rows: int, context: int, capacity: int) -> Pass:
    """Return the base's forward pass over `rows` tokens after `context` others."""
    few_and_many, outside = LAUNCHES[precision]
    kv_row = 2 * LAYERS * KV_WIDTH * 2
    # Without edgellm's kernels a copy of the KV cache is written and read; edgellm's kernels write
    # and read partial sums of the context instead.
    shared = min(MOST_SHARES, max(rows, PARTIAL_ROWS) // rows) * rows
    sums = LAYERS * shared * HIDDEN * 4
    kv = 3 * capacity * kv_row if way.attends_capacity else context * kv_row
    return Pass(
        {
            "weights": LAYERS * _LINEAR * BITS[precision] / 8e9,
            "head": HIDDEN * VOCAB * BITS[way.head or precision] / 8e9,
            "cache": kv / 1e9,
            "sums": 0.0 if way.attends_capacity else 2 * sums / 1e9,
        },
        LAYERS * few_and_many[rows > 1] + outside,
    )


def draft_pass(way: Way, precision: str, *, fuses: bool) -> Pass:
    """Return the draft's forward pass: over accepted tokens, or a level of the tree."""
    kind = way.head or precision
    weights = _DRAFT + HIDDEN * DRAFT_VOCAB + (_FUSE if fuses else 0)
    return Pass({"draft": weights * BITS[kind] / 8e9}, DRAFT_LAUNCHES[kind] + fuses)


def plain_parts_ms(
    board: Board, way: Way, precision: str, context: int, capacity: int
) -> dict[str, float]:
    """Return the parts of a plain token's time."""
    step = base_pass(way, precision, 1, context, capacity)
    return {**step.parts_ms(board), "waits": board.wait_us / 1e3}


def round_parts_ms(
    board: Board, way: Way, precision: str, context: int, capacity: int
) -> dict[str, float]:
    """Return the parts of an EAGLE3 round's time."""
    passes = [base_pass(way, precision, 60, context, capacity)]
    passes += [draft_pass(way, precision, fuses=level == 0) for level in range(1 + STEPS)]
    total: dict[str, float] = {}
    for each in passes:
        for kind, ms in each.parts_ms(board).items():
            total[kind] = total.get(kind, 0.0) + ms
    if precision == "int4":
        total["rows of int4"] = (board.int4_rows - 1) * total["weights"]
    if way.waits == 1:
        kernels, copies = ROUND_KERNELS + STEPS, ROUND_COPIES + 2 * STEPS
        total["tree"] = (kernels * board.small_us + copies * board.launch_us) / 1e3
    else:
        total["tree"] = HOST_TREE_MS
    return {**total, "waits": way.waits * board.wait_us / 1e3}


def tokens_per_s(parts_ms: Mapping[str, float], tokens: float = 1.0) -> float:
    return 1e3 * tokens / sum(parts_ms.values())


def roofline(board: Board, precision: str, context: int) -> float:
    """Return tokens/s of plain decoding if only weights and the used KV cache took time."""
    step = base_pass(WAYS[-1], precision, 1, context, context)
    return board.gb_per_s / sum(step.gigabytes[kind] for kind in ("weights", "head", "cache"))


def read_launches(path: Path, layers: int) -> tuple[tuple[int, int], int]:
    """Return the launches of an engine's layer report, `<graph>.layers.json`; see `LAUNCHES`."""
    passes = json.loads(path.read_text("utf-8"))["passes"]
    few = passes["decode"]["kernels"]
    many = passes.get("verify", passes["decode"])["kernels"]
    return (few // layers, many // layers), max(few % layers, many % layers)


def show(context: int, capacity: int) -> None:
    """Print tables."""
    for board in BOARDS:
        for precision in ("nvfp4", "int4", "fp16"):
            if precision == "nvfp4" and not board.has_fp4:
                continue
            limit = roofline(board, precision, context)
            print(f"\n{board.name}, {precision}: roofline {limit:.1f} tokens/s")
            for way in WAYS:
                plain = plain_parts_ms(board, way, precision, context, capacity)
                drafted = round_parts_ms(board, way, precision, context, capacity)
                print(
                    f"  {way.name:30} plain {tokens_per_s(plain):6.1f}  "
                    f"EAGLE3 {tokens_per_s(drafted, ACCEPTED):6.1f}"
                )
            shown = ", ".join(f"{kind} {ms:.2f}" for kind, ms in plain.items())
            print(f"  of the last, ms a token: {shown}")
            shown = ", ".join(f"{kind} {ms:.2f}" for kind, ms in drafted.items())
            print(f"  ms a round: {shown}")
            if board.name == "Thor" and precision in PUBLISHED:
                plain_rate, drafted_rate = PUBLISHED[precision]
                name = "published, TensorRT Edge-LLM"
                print(f"  {name:30} plain {plain_rate:6.1f}  EAGLE3 {drafted_rate:6.1f}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=Path, help="layer report of an engine, for its launches")
    parser.add_argument("--depth", type=int, default=LAYERS, help="number of layers of that engine")
    parser.add_argument(
        "--precision", choices=LAUNCHES, default="nvfp4", help="precision of that engine"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens in the KV cache")
    parser.add_argument("--capacity", type=int, default=4096, help="capacity of the KV cache")
