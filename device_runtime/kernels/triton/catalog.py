"""The kernels that are compiled ahead of time, their GPUs, and how they are launched.

Needs no Triton: with the PTX it is all that a device has of the kernels.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# PTX version by compute capability, as numbers: the newest that all drivers of such boards support.
# 8.5: CUDA 12.6 of JetPack 6, and 12.5 elsewhere. 9.0: CUDA 13.0 of JetPack 7, the first with
# sm_110. 8.7: CUDA 12.8, the first with sm_120.
TARGETS = {87: 85, 89: 85, 90: 85, 110: 90, 120: 87}
FIRST_FP8 = 89  # compute capability that converts E4M3 numbers
LARGEST_SHARED_BYTES = 48 << 10  # the limit of a launch without an attribute
HEAD_DIM_STEP = 16  # head_dim is a multiple, so rows of all dtypes are read 16 bytes at a time
STATE_STEP = 8  # sizes of recurrent layers are multiples
WIDTH_STEP = 16  # widths of weights by address are multiples, and inputs that share a scale
# Arguments that are multiples of a number, and the number.
STEPS = {
    "head_dim": HEAD_DIM_STEP,
    "key_dim": STATE_STEP,
    "value_dim": STATE_STEP,
    "width": STATE_STEP,
    "hidden": WIDTH_STEP,
    "inner": WIDTH_STEP,
}
TILES = (64, 128, 256)  # values of D
SEQUENCES = 32  # of a pass at most
START = 5  # fields of a sequence's start, see `growth`
ROWS = 16  # query rows of a program
PROMPT_TOKENS = 128  # of a pass, from which `finish` attends, with PROMPT_ROWS rows of a program
PROMPT_ROWS = 64
CHANNELS = 256  # of a convolution, in a program
VALUES = 32  # of a head of a recurrent layer, in a program
KEYS = 64  # of such a head, in a step
EXPERT_OUTPUTS, EXPERT_INPUTS = 32, 128  # of an expert's matrix, in a program and in a step
SUMMED = 512  # numbers of a row of experts, in a program
LOOKED_UP = 512  # numbers of a row of embeddings, in a program
HEAD_OUTPUTS, HEAD_INPUTS = 64, 64  # of a head, in a program and in a step
HEAD_ROWS = (16, 64)  # tokens in a tile of a head: of few, and of more
PAIRS = 512  # of rows and experts, in a step
ROUTED_EXPERTS, CHOSEN_EXPERTS = (128, 512), 32  # of a layer, and of a row: at most
PICKS, SHARE, SHARES = 64, 4096, 64  # of a row of logits; numbers of a share; shares at most
# Supported sizes: nodes of a tree, candidates of a level, nodes of a pool.
NODES, LEVELS, POOLS = (64, 128), (128, 512, 1024), (512, 2048, 4096)
SCORES = ("draft", "rates", "places")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One function of a module, and its grid.

    Attributes:
        module: in this package.
        name: of the function.
        grid: expressions of sizes, arguments and constants; cdiv(a, b) rounds up.
        fuses: fused multiply-add is allowed; not where results must equal the host's.
    """

    module: str
    name: str
    grid: tuple[str, str, str]
    fuses: bool = True

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument that is no constant, in order."""
        return _signatures(self.module)[self.name]


@functools.cache
def _signatures(module: str) -> dict[str, dict[str, str]]:
    """Signatures of a module's functions, read from its source: its import needs Triton."""
    source = Path(__file__).with_name(f"{module}.py").read_text("utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {function.name: dict(_typed(function.args.args)) for function in functions}


def _typed(arguments: Sequence[ast.arg]) -> Iterator[tuple[str, str]]:
    """Names and types. Pointers are annotated with a string, int32 sizes are not annotated."""
    for argument in arguments:
        if argument.annotation is None:
            yield argument.arg, "i32"
        elif isinstance(argument.annotation, ast.Constant):  # else it is tl.constexpr
            yield argument.arg, str(argument.annotation.value)


_PARTS = "cdiv(value_dim, VALUES)"
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(module="attention", name="store_rows", grid=("num_rows", "heads + kv_heads", "1")),
        Kernel(
            module="attention",
            name="attend",
            grid=("kv_heads", "cdiv(num_rows * group, ROWS) + sequences", "shares"),
        ),
        Kernel(module="prompt_attention", name="finish", grid=("kv_heads", "tiles", "D / OUT")),
        Kernel(module="compaction", name="keep_rows", grid=("layers", "kv_heads", "2")),
        Kernel(module="picks", name="pick_shares", grid=("rows", "cdiv(vocab_size, BLOCK)", "1")),
        Kernel(module="picks", name="join_picks", grid=("rows", "1", "1")),
        Kernel(
            module="acceptance", name="accept_greedy", grid=("cdiv(num_trees, TREES)", "1", "1")
        ),
        Kernel(
            module="acceptance",
            name="accept_sampled",
            grid=("cdiv(num_trees, TREES)", "1", "1"),
            fuses=False,
        ),
        Kernel(module="growth", name="grow_level", grid=("sequences", "1", "1"), fuses=False),
        Kernel(module="growth", name="select_tree", grid=("sequences", "1", "1")),
        Kernel(module="growth", name="lay_out", grid=("sequences", "1", "1")),
        Kernel(
            module="recurrent", name="convolve_rows", grid=("num_rows", "cdiv(width, BLOCK)", "1")
        ),
        Kernel(
            module="recurrent", name="advance_window", grid=("cdiv(width, BLOCK)", "entries", "1")
        ),
        Kernel(module="recurrent", name="delta_rows", grid=("heads", _PARTS, "1")),
        Kernel(module="recurrent", name="advance_state", grid=("heads", _PARTS, "entries")),
        Kernel(module="routing", name="route_rows", grid=("num_rows", "1", "1")),
        Kernel(module="experts", name="group_rows", grid=("experts + 1", "1", "1")),
        Kernel(module="experts", name="expert_gates", grid=("experts", "cdiv(inner, OUT)", "1")),
        Kernel(module="experts", name="expert_downs", grid=("experts", "cdiv(hidden, OUT)", "1")),
        Kernel(module="experts", name="sum_experts", grid=("num_rows", "cdiv(hidden, BLOCK)", "1")),
        Kernel(module="vocabulary", name="look_up_rows", grid=("ids", "cdiv(hidden, STEP)", "1")),
        Kernel(
            module="vocabulary",
            name="head_rows",
            grid=("cdiv(num_rows, ROWS)", "cdiv(vocab, OUT)", "1"),
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel with its constants."""

    kernel: Kernel
    constants: Mapping[str, int | str | bool] = field(hash=False)
    warps: int
    stages: int = 2
    max_registers: int = 0  # of a thread; 0: the assembler's choice

    @property
    def name(self) -> str:
        """The name of its file, made of its constants."""
        shown = (f"{key.lower()}{value}".lower() for key, value in self.constants.items())
        return "-".join([self.kernel.name, *shown])


PICK_SHARES = Variant(
    kernel=KERNELS["pick_shares"], constants={"PICKS": PICKS, "BLOCK": SHARE}, warps=8
)
JOIN_PICKS = Variant(
    kernel=KERNELS["join_picks"], constants={"PICKS": PICKS, "MOST": SHARES}, warps=8
)
CONVOLVE_ROWS, ADVANCE_WINDOW = (
    Variant(kernel=KERNELS[name], constants={"BLOCK": CHANNELS}, warps=1)
    for name in ("convolve_rows", "advance_window")
)
_STATES = {"KEYS": KEYS, "VALUES": VALUES, "ROWS": ROWS}
ADVANCE_STATE = Variant(
    kernel=KERNELS["advance_state"], constants=_STATES, warps=8, max_registers=128
)
GROUP_ROWS = Variant(kernel=KERNELS["group_rows"], constants={"BLOCK": PAIRS}, warps=4)
SUM_EXPERTS = Variant(kernel=KERNELS["sum_experts"], constants={"BLOCK": SUMMED}, warps=2)


def variants(sm: int) -> Iterator[Variant]:
    """The variants that are compiled for GPUs of a compute capability."""
    codes = ("fp16", "int8", "fp8") if sm >= FIRST_FP8 else ("fp16", "int8")
    for size in TILES:
        for code in codes:
            yield keep_rows(size, code)
            for many in (False, True):
                yield store_rows(size, code, many=many)
            yield attend(size, code)
            yield finish(size, code)
    yield PICK_SHARES
    yield JOIN_PICKS
    for nodes in NODES:
        yield accept_greedy(nodes)
        yield accept_sampled(nodes)
        yield lay_out(nodes)
    for size in LEVELS:
        for scored in SCORES:
            yield grow_level(size, scored)
    for size in POOLS:
        yield select_tree(size)
    yield CONVOLVE_ROWS
    yield ADVANCE_WINDOW
    yield ADVANCE_STATE
    yield delta_rows(takes=True)
    yield delta_rows(takes=False)
    for experts in ROUTED_EXPERTS:
        yield route_rows(experts)
    yield GROUP_ROWS
    yield SUM_EXPERTS
    for code in (*codes, "int4", "fp4"):
        yield expert_gates(code)
        yield expert_downs(code)
        yield look_up_rows(code)
        yield head_rows(code)


def accept_greedy(nodes: int) -> Variant:
    """`accept_greedy` for a tree of at most so many nodes, one of `NODES`."""
    return Variant(kernel=KERNELS["accept_greedy"], constants={"TREES": 1, "NODES": nodes}, warps=1)


def accept_sampled(nodes: int) -> Variant:
    """`accept_sampled` for a tree of at most so many nodes, one of `NODES`."""
    return Variant(
        kernel=KERNELS["accept_sampled"],
        constants={"TREES": 1, "NODES": nodes, "PICKS": PICKS},
        warps=1,
    )


def grow_level(candidates: int, scored: str) -> Variant:
    """`grow_level` for at most so many candidates, one of `LEVELS`."""
    columns = 8 if candidates <= 512 else 2  # more would spill registers
    constants = {"SIZE": candidates, "COLUMNS": columns, "BLOCK": columns, "SCORED": scored}
    return Variant(
        kernel=KERNELS["grow_level"], constants=constants, warps=4 if candidates <= LEVELS[0] else 8
    )


def select_tree(pool: int) -> Variant:
    """`select_tree` for pools of at most so many nodes, one of `POOLS`."""
    block = {512: 32, 2048: 8}.get(pool, 2)
    return Variant(
        kernel=KERNELS["select_tree"],
        constants={"SIZE": pool, "BLOCK": block},
        warps=8 if block > 2 else 16,
    )


def lay_out(nodes: int) -> Variant:
    """`lay_out` for trees of at most so many nodes, one of `NODES`."""
    return Variant(
        kernel=KERNELS["lay_out"], constants={"NODES": nodes}, warps=4 if nodes <= NODES[0] else 8
    )


def tile(size: int) -> int:
    """The smallest of `TILES` that heads of `size` numbers fit into; 0 if none does."""
    fits = [each for each in TILES if each >= size > 0 and not size % HEAD_DIM_STEP]
    return min(fits, default=0)


def delta_rows(*, takes: bool) -> Variant:
    """`delta_rows` with the delta term or without."""
    constants = {**_STATES, "TAKES": takes}
    return Variant(kernel=KERNELS["delta_rows"], constants=constants, warps=8, max_registers=128)


def has_route_rows(experts: int, top_k: int) -> bool:
    """Whether `route_rows` supports this number of experts, and `top_k` of them for a row."""
    return 0 < top_k <= min(experts, CHOSEN_EXPERTS) and experts <= ROUTED_EXPERTS[-1]


def route_rows(experts: int) -> Variant:
    """`route_rows` for a layer with this number of experts."""
    maximum = next(each for each in ROUTED_EXPERTS if each >= experts)
    constants = {"EXPERTS": maximum, "CHOSEN": CHOSEN_EXPERTS}
    return Variant(kernel=KERNELS["route_rows"], constants=constants, warps=1)


def expert_gates(codes: str) -> Variant:
    """`expert_gates` for weights in these codes."""
    return _of_experts("expert_gates", codes)


def expert_downs(codes: str) -> Variant:
    """`expert_downs` for weights in these codes."""
    return _of_experts("expert_downs", codes)


def _of_experts(name: str, codes: str) -> Variant:
    constants = {"CODES": codes, "ROWS": ROWS, "OUT": EXPERT_OUTPUTS, "STEP": EXPERT_INPUTS}
    return Variant(kernel=KERNELS[name], constants=constants, warps=4, max_registers=128)


def look_up_rows(codes: str) -> Variant:
    """`look_up_rows` for a table in these codes."""
    constants = {"CODES": codes, "STEP": LOOKED_UP}
    return Variant(kernel=KERNELS["look_up_rows"], constants=constants, warps=2)


def head_rows(codes: str) -> Variant:
    """`head_rows` for weights in these codes."""
    few, rows = HEAD_ROWS
    constants = {"CODES": codes, "FEW": few, "ROWS": rows}
    return Variant(
        kernel=KERNELS["head_rows"],
        constants={**constants, "OUT": HEAD_OUTPUTS, "STEP": HEAD_INPUTS},
        warps=8,
        stages=3 if codes == "fp16" else 4,  # low-bit weights need more steps in flight
        max_registers=128,
    )


def store_rows(size: int, codes: str, *, many: bool = False) -> Variant:
    """`store_rows` for a head size and codes of the cache, of one sequence or many."""
    constants = {"D": tile(size), "CODES": codes, "MANY": SEQUENCES if many else 0}
    return Variant(kernel=KERNELS["store_rows"], constants=constants, warps=1)


def keep_rows(size: int, codes: str) -> Variant:
    """`keep_rows` for a head size and codes of the cache."""
    return Variant(
        kernel=KERNELS["keep_rows"], constants={"D": tile(size), "CODES": codes}, warps=1
    )


def attend(size: int, codes: str) -> Variant:
    """`attend` for a head size and codes of the cache."""
    of_tile = tile(size)
    constants = {"D": of_tile, "ROWS": ROWS, "BLOCK": 64 if of_tile == TILES[0] else 32}
    is_float = codes == "fp16"
    return Variant(
        kernel=KERNELS["attend"],
        constants={**constants, "CODES": codes},
        # Fewer would spill registers.
        warps=4 if of_tile == TILES[0] or (of_tile == TILES[1] and is_float) else 8,
        max_registers=128 if of_tile < TILES[-1] or is_float else 144,
    )


def finish(size: int, codes: str) -> Variant:
    """`finish` for a head size and codes of the cache.

    More slots at once, or more values of a head, would spill registers.
    """
    of_tile = tile(size)
    constants = {"D": of_tile, "ROWS": PROMPT_ROWS, "BLOCK": 32 if of_tile == TILES[0] else 16}
    constants |= {"OUT": min(of_tile, 128), "JOINED": ROWS}
    return Variant(
        kernel=KERNELS["finish"],
        constants={**constants, "CODES": codes},
        warps=4,
    )


def attend_tiles(op: Any, rows: Any, group: int) -> Any:
    """Tiles of `attend` in a pass of one sequence. In a prompt they return at once.

    Args:
        op: has `cdiv`, `max` and `min` of sizes.
        rows: tokens, a size.
        group: query heads of a KV head.
    """
    return op.min(op.cdiv(rows * group, ROWS), PROMPT_TOKENS * group // ROWS)


def finish_tiles(op: Any, rows: Any, group: int) -> Any:
    """Tiles of `finish` in a pass of one sequence, of joined rows or of a prompt's; at least those.

    The arguments are those of `attend_tiles`.
    """
    of_prompt = op.cdiv(rows * group, PROMPT_ROWS)
    most = op.max(of_prompt, PROMPT_TOKENS * group // ROWS)
    return op.min(op.cdiv(rows * group, ROWS), most)
