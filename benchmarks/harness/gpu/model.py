"""Estimated time of a token, a round and a prompt on a GPU: bytes, products, launches and waits.

Launches are those of engines that TensorRT-RTX compiled (`LAUNCHES`, or an engine's layer report).
Bytes follow from the weights' types and the KV cache. Each figure is a sum of named parts, which
explain its distance from the memory roofline. This is a model that has not run on a GPU: bandwidth
shares, rates and times of launches are assumptions, and no figure was used to set them but those
that `RATES` and `Board` name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.build.verify_tree_size import GPUS, INT4_BITS, LARGEST
from edgellm.device_runtime.kernels.triton.catalog import PROMPT_TOKENS
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    MAX_SHARES,
    PARTIAL_ROWS,
)
from harness.gpu.published import LLAMA_8B, Shape

BITS = {"fp16": 16.0, "int4": INT4_BITS, "nvfp4": 4 + 8 / 16}  # of a weight, with its scales
# Of TensorRT-RTX 1.7.1 for compute capability 12.0, the engines of
# tests/support/tensorrt_bundles.py with 4 and 6 layers: kernels of a layer for one row and for
# many, those outside of layers; and those of a draft's step.
LAUNCHES = {"fp16": ((8, 12), 6), "int4": ((9, 15), 6), "nvfp4": ((17, 20), 5)}
DRAFT_LAUNCHES = {"fp16": 19, "int4": 22, "nvfp4": 27}
FEW_TOKENS = 64  # for which products have the lower rate
MAX_TOKENS = 128  # of a pass of several trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Bandwidth and latencies of a GPU; all except bandwidth and peaks are assumptions."""

    name: str
    gb_per_s: float  # of the memory, by its maker
    # TFLOP/s of products by precision, of few tokens and of many
    rates: Mapping[str, tuple[float, float]]
    mma_tflops: float  # peak of the matrix instructions of the attention kernels, in float16
    share: float = 0.85  # of the bandwidth that large kernels reach
    int4_share: float = 0.85  # and those that decode INT4 weights
    launch_us: float = 1.5  # between two kernels of a CUDA graph
    wait_us: float = 40.0  # the host waits, reads and launches again
    small_us: float = 10.0  # a kernel of one block: a level joins the pool, a tree is chosen
    # Of `mma_tflops` that attention over a prompt reaches, in tiles of 64 rows and of 16
    attention_shares: tuple[float, float] = (0.25, 0.15)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Return the precisions that the board has."""
        return tuple(self.rates)

    def rate(self, precision: str) -> float:
        """Return the GB/s at which weights of a precision are read."""
        return self.gb_per_s * (self.int4_share if precision == "int4" else self.share)


# Rates of products. NVFP4: those of a prompt of 2,048 tokens of Qwen3-1.7B on Thor, published for
# Edge-LLM 0.8 (66,929 tokens/s); its products are TensorRT's, as edgellm's are. INT4 of few tokens:
# `verify_tree_size`; of many on Thor: a prompt of 383 tokens of Llama-3.1-8B (215.5 ms). These are
# rates of Edge-LLM's own kernels, and stand in for TensorRT's. Elsewhere half of the peak.
THOR = Board(
    name="Thor",
    gb_per_s=273.0,
    rates={
        "nvfp4": (190.0, 190.0),
        "int4": (GPUS[110].int4_tflops, 24.8),
        "fp16": (130.0, 130.0),
    },
    mma_tflops=64.5,
)
ORIN = Board(
    name="Orin",
    gb_per_s=204.8,
    rates={"int4": (GPUS[87].int4_tflops, GPUS[87].int4_tflops), "fp16": (21.0, 21.0)},
    mma_tflops=42.5,
    int4_share=0.6,  # of issue 60 of TensorRT Edge-LLM: 57 %, where 85 % was expected
    wait_us=60.0,
)
H100 = Board(
    name="H100",
    gb_per_s=3350.0,
    rates={"int4": (130.0, 130.0), "fp16": (495.0, 495.0)},
    mma_tflops=495.0,
    share=0.75,
    int4_share=0.75,
    wait_us=15.0,
)
BOARDS = (THOR, ORIN, H100)


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
DRAFT_VOCAB, STEPS = 32000, 4
MTP_TOKENS = 3  # that an MTP layer drafts in a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its engine, and what it computes."""

    precision: str
    shape: Shape = LLAMA_8B
    way: Way = TODAY
    context: int = 1024  # tokens of a sequence
    capacity: int = 4096  # of its KV cache
    batch: int = 1
    nodes: int = LARGEST  # of a tree


@dataclass(frozen=True, slots=True)
class Pass:
    """Bytes by kind, products of the weights, and launches, of a forward pass."""

    precision: str
    gigabytes: Mapping[str, float]
    launches: int
    tokens: int
    tera: float = 0.0  # operations of the layers' products
    head: str = ""  # its precision, if not that of the weights

    def parts_ms(self, board: Board) -> dict[str, float]:
        """Return the time by kind. Products count as far as they take longer than reading."""
        rate = board.rate(self.precision)
        rates: dict[str, float] = {"weights": rate, "draft": rate}
        rates["head"] = board.rate(self.head or self.precision)
        parts = {
            kind: 1e3 * size / rates.get(kind, board.rate("fp16"))
            for kind, size in self.gigabytes.items()
        }
        few, many = board.rates[self.precision]
        products = 1e3 * self.tera / (few if self.tokens <= FEW_TOKENS else many)
        parts["products"] = max(0.0, products - parts.get("weights", 0.0))
        return {**parts, "launches": self.launches * board.launch_us / 1e3}


def base_pass(case: Case, tokens: int) -> Pass:
    """Return the base's forward pass over `tokens` tokens of all sequences together."""
    shape, way, precision = case.shape, case.way, case.precision
    few_and_many, outside = LAUNCHES[precision]
    # Without edgellm's kernels a copy of the KV cache is written and read; edgellm's kernels write
    # and read partial sums of the context instead, except in prompts.
    shared = min(MAX_SHARES, PARTIAL_ROWS // tokens) * tokens if tokens < PROMPT_TOKENS else 0
    sums = shape.caches * shared * shape.width * 4
    cached = 3 * case.capacity if way.attends_capacity else case.context
    return Pass(
        precision,
        {
            "weights": shape.linear * BITS[precision] / 8e9,
            "head": shape.hidden * shape.vocab * BITS[way.head or precision] / 8e9,
            "cache": case.batch * cached * shape.kv_token_bytes / 1e9,
            "sums": 0.0 if way.attends_capacity else 2 * sums / 1e9,
            # A pass reads the states, a commit reads and writes them
            "states": 3 * case.batch * shape.state_bytes / 1e9,
        },
        shape.layers * few_and_many[tokens > 1] + outside,
        tokens,
        2e-12 * shape.linear * tokens,
        way.head,
    )


def draft_pass(case: Case, *, fuses: bool) -> Pass:
    """Return the draft's forward pass: over accepted tokens, or a level of the tree.

    An EAGLE3 draft is one layer of the base's sizes, whose attention reads two hidden states.
    """
    shape, kind = case.shape, case.way.head or case.precision
    layer = shape.linear // shape.layers + shape.hidden * (shape.width + 2 * shape.kv_width)
    weights = layer + shape.hidden * DRAFT_VOCAB + (3 * shape.hidden**2 if fuses else 0)
    return Pass(kind, {"draft": weights * BITS[kind] / 8e9}, DRAFT_LAUNCHES[kind] + fuses, 1)


def _added(board: Board, passes: list[Pass]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in passes:
        for kind, ms in each.parts_ms(board).items():
            total[kind] = total.get(kind, 0.0) + ms
    return total


def plain_parts_ms(board: Board, case: Case) -> dict[str, float]:
    """Return the parts of the time of a plain token of each sequence."""
    step = base_pass(case, case.batch)
    return {**step.parts_ms(board), "waits": board.wait_us / 1e3}


def round_parts_ms(board: Board, case: Case) -> dict[str, float]:
    """Return the parts of the time of an EAGLE3 round of all sequences."""
    passes = [base_pass(case, case.batch * case.nodes)]
    passes += [draft_pass(case, fuses=level == 0) for level in range(1 + STEPS)]
    total = _added(board, passes)
    if case.way.waits == 1:
        kernels, copies = ROUND_KERNELS + STEPS, ROUND_COPIES + 2 * STEPS
        total["tree"] = (kernels * board.small_us + copies * board.launch_us) / 1e3
    else:
        total["tree"] = HOST_TREE_MS
    return {**total, "waits": case.way.waits * board.wait_us / 1e3}


def mtp_parts_ms(board: Board, case: Case) -> dict[str, float]:
    """Return the parts of a round with an MTP layer, on the host: a wait for each pass.

    The layer is one of the base's, with the base's head.
    """
    shape, precision = case.shape, case.precision
    weights = shape.linear // shape.layers + shape.hidden * (2 * shape.hidden + shape.vocab)
    draft = Pass(
        precision, {"draft": weights * BITS[precision] / 8e9}, DRAFT_LAUNCHES[precision], 1
    )
    total = _added(board, [base_pass(case, 1 + MTP_TOKENS), *[draft] * MTP_TOKENS])
    return {**total, "waits": (1 + MTP_TOKENS) * board.wait_us / 1e3}


def prompt_parts_ms(board: Board, case: Case, tokens: int) -> dict[str, float]:
    """Return the parts of the time of one prompt of `tokens` tokens, in one pass."""
    shape = case.shape
    parts = base_pass(replace(case, context=tokens), tokens).parts_ms(board)
    tera = 2e-12 * tokens**2 * shape.width * shape.caches  # half of the square
    attended = 1e3 * tera / board.mma_tflops / board.attention_shares[tokens < PROMPT_TOKENS]
    return {**parts, "attention": attended, "waits": board.wait_us / 1e3}


def tokens_per_s(parts_ms: Mapping[str, float], tokens: float = 1.0) -> float:
    return 1e3 * tokens / sum(parts_ms.values())


def roofline(board: Board, case: Case) -> float:
    """Return tokens/s of plain decoding if only weights and the used KV cache took time."""
    step = base_pass(replace(case, way=WAYS[-1]), 1)
    return board.gb_per_s / sum(step.gigabytes[kind] for kind in ("weights", "head", "cache"))


def read_launches(path: Path, layers: int) -> tuple[tuple[int, int], int]:
    """Return the launches of an engine's layer report, `<graph>.layers.json`; see `LAUNCHES`."""
    passes = json.loads(path.read_text("utf-8"))["passes"]
    few = passes["decode"]["kernels"]
    many = passes.get("verify", passes["decode"])["kernels"]
    return (few // layers, many // layers), max(few % layers, many % layers)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=Path, help="layer report of an engine, for its launches")
    parser.add_argument(
        "--depth", type=int, default=LLAMA_8B.layers, help="number of layers of that engine"
    )
    parser.add_argument(
        "--precision", choices=LAUNCHES, default="nvfp4", help="precision of that engine"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens in the KV cache")
    parser.add_argument("--capacity", type=int, default=4096, help="capacity of the KV cache")
    parser.add_argument("--results", type=Path, help="JSON file of the tables")
