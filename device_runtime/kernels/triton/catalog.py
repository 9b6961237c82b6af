"""Which kernels are compiled ahead of time, for which GPUs, and how they are launched.

Needs no Triton: it is what a device knows of the kernels beside their PTX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# PTX version by compute capability, as numbers: the newest that every driver of such boards takes.
# 8.5: CUDA 12.6 of JetPack 6, and 12.5 elsewhere. 9.0: CUDA 13.0 of JetPack 7, the first with
# sm_110. 8.7: CUDA 12.8, the first with sm_120.
TARGETS = {87: 85, 89: 85, 90: 85, 110: 90, 120: 87}
FIRST_FP8 = 89  # compute capability that converts E4M3 numbers
LARGEST_SHARED_BYTES = 48 << 10  # what a launch may ask for without more ado
SIZE = "SIZE"  # the argument that says how many numbers a head has
SIZE_STEP = 16  # what it is a multiple of, so that rows of any codes are read 16 bytes at a time
TILES = (64, 128, 256)  # numbers of a head that a program computes with
OWN_SIZES = (64, 128)  # heads with an `attend` of their own
SEQUENCES = 32  # of a pass at most
START = 5  # entries of a sequence whose tree grows, see `growth`
ROWS = 16  # query rows of a program; at 64 sm_110 would take other units
PICKS, SHARE, SHARES = 64, 4096, 64  # of a row of logits; numbers of a share; shares at most
# Sizes that there are kernels for: nodes of a tree, candidates of a level, nodes of a pool.
NODES, LEVELS, POOLS = (64, 128), (128, 512, 1024), (512, 2048, 4096)
SCORES = ("draft", "rates", "places")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function of a module and how it is called."""

    module: str
    name: str
    arguments: str  # name:type for all but constants, in order; int32 sizes have no type
    grid: tuple[str, str, str]  # expressions of sizes and constants; cdiv(a, b) rounds up
    # Whether products and sums may be rounded at once; not where the host's numbers are wanted.
    fuses: bool = True

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        pairs = (each.partition(":") for each in self.arguments.split())
        return {name: kind or "i32" for name, _, kind in pairs}


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "attention", "store_rows",
            "q:*fp16 k:*fp16 v:*fp16 cos:*fp16 sin:*fp16 positions:*i64 write_index:*i64 "
            "table:*i64 LAYER H HKV OWN_TABLES SIZE q_out:*fp16",
            ("S", "H + HKV", "1"),
        ),
        Kernel(
            "attention", "attend",
            "q:*fp16 tree:*i8 positions:*i64 write_index:*i64 table:*i64 LAYER S M G WINDOW "
            "CAP_BITS SIZE parts:*fp32 stats:*fp32",
            ("HKV", "cdiv(S * G, ROWS) + MANY", "SHARES"),
        ),
        Kernel(
            "attention", "combine",
            "parts:*fp32 stats:*fp32 sinks:*fp32 N H SHARES SIZE y:*fp16",
            ("N", "1", "1"),
        ),
        Kernel(
            "compaction", "keep_rows",
            "path:*i32 outcome:*i32 write_index:*i64 table:*i64 SIZE",
            ("LAYERS", "HKV", "2"),
        ),
        Kernel(
            "picks", "pick_shares", "logits:*fp32 V keys:*i64 sums:*fp32",
            ("R", "cdiv(V, BLOCK)", "1"),
        ),
        Kernel(
            "picks", "join_picks",
            "keys:*i64 sums:*fp32 V SHARES values:*fp32 ids:*i32 argmax:*i64 log_sums:*fp32",
            ("R", "1", "1"),
        ),
        Kernel(
            "acceptance", "accept_greedy",
            "tokens:*i64 parents:*i64 argmax:*i64 highest:*fp32 COUNT N path:*i32 outcome:*i32",
            ("cdiv(COUNT, TREES)", "1", "1"),
        ),
        Kernel(
            "acceptance", "accept_sampled",
            "tokens:*i64 parents:*i64 values:*fp32 ids:*i32 rules:*fp64 uniforms:*fp64 COUNT N V "
            "path:*i32 outcome:*i32",
            ("cdiv(COUNT, TREES)", "1", "1"), fuses=False,
        ),
        Kernel(
            "growth", "grow_level",
            "candidates:*i64 log_probs:*fp32 nodes:*i32 start:*i64 table:*fp64 tokens:*i64 "
            "parents:*i64 scores:*fp64 own:*fp32 seen:*i8 STRIDE BEGIN R K USED WIDTH SLOTS LEVEL "
            "AXES POOL MANY new_nodes:*i32 new_tokens:*i64 above:*i32 positions:*i64 slot:*i64 "
            "mask:*i8",
            ("B", "1", "1"), fuses=False,
        ),
        Kernel(
            "growth", "select_tree",
            "tokens:*i64 parents:*i64 scores:*fp64 own:*fp32 start:*i64 COUNT ROOM POOL "
            "tree_tokens:*i64 tree_parents:*i64 tree_own:*fp32 chosen_nodes:*i32",
            ("B", "1", "1"),
        ),
        Kernel(
            "growth", "lay_out",
            "parents:*i64 start:*i64 N AXES MANY positions:*i64 slot:*i64 mask:*i8",
            ("B", "1", "1"),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its constants."""

    kernel: Kernel
    constants: Mapping[str, int | str | bool] = field(hash=False)
    warps: int
    stages: int = 2

    @property
    def name(self) -> str:
        """Of its file, by what its constants are."""
        shown = (f"{key.lower()}{value}".lower() for key, value in self.constants.items())
        return "-".join([self.kernel.name, *shown])


PICK_SHARES = Variant(KERNELS["pick_shares"], {"PICKS": PICKS, "BLOCK": SHARE}, 8)
JOIN_PICKS = Variant(KERNELS["join_picks"], {"PICKS": PICKS, "MOST": SHARES}, 8)


def variants(sm: int) -> Iterator[Variant]:
    """What is compiled for GPUs of a compute capability."""
    codes = ("fp16", "int8", "fp8") if sm >= FIRST_FP8 else ("fp16", "int8")
    for size in TILES:
        for code in codes:
            yield keep_rows(size, code)
            for many in (False, True):
                yield store_rows(size, code, many=many)
                yield attend(size, code, windowed=True, capped=True, many=many)
        yield combine(size, sunk=False)
        yield combine(size, sunk=True)
    for code in codes:
        for many in (False, True):
            for size in OWN_SIZES:
                yield attend(size, code, many=many)
        yield attend(128, code, windowed=True)
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


def accept_greedy(nodes: int) -> Variant:
    """`accept_greedy` for a tree of at most so many nodes, one of `NODES`."""
    return Variant(KERNELS["accept_greedy"], {"TREES": 1, "NODES": nodes}, 1)


def accept_sampled(nodes: int) -> Variant:
    """`accept_sampled` for a tree of at most so many nodes, one of `NODES`."""
    return Variant(KERNELS["accept_sampled"], {"TREES": 1, "NODES": nodes, "PICKS": PICKS}, 1)


def grow_level(candidates: int, scored: str) -> Variant:
    """`grow_level` for at most so many candidates, one of `LEVELS`."""
    columns = 8 if candidates <= 512 else 2  # more are spilled
    constants = {"SIZE": candidates, "COLUMNS": columns, "BLOCK": columns, "SCORED": scored}
    return Variant(KERNELS["grow_level"], constants, 4 if candidates <= LEVELS[0] else 8)


def select_tree(pool: int) -> Variant:
    """`select_tree` for pools of at most so many nodes, one of `POOLS`."""
    block = {512: 32, 2048: 8}.get(pool, 2)
    return Variant(KERNELS["select_tree"], {"SIZE": pool, "BLOCK": block}, 8 if block > 2 else 16)


def lay_out(nodes: int) -> Variant:
    """`lay_out` for trees of at most so many nodes, one of `NODES`."""
    return Variant(KERNELS["lay_out"], {"NODES": nodes}, 4 if nodes <= NODES[0] else 8)


def tile(size: int) -> int:
    """The smallest of `TILES` that heads of `size` numbers fit into; 0 where there is none."""
    fits = [each for each in TILES if each >= size > 0 and not size % SIZE_STEP]
    return min(fits, default=0)


def store_rows(size: int, codes: str, *, many: bool = False) -> Variant:
    """`store_rows` for a head size and codes of the cache, of one sequence or many."""
    constants = {"D": tile(size), "CODES": codes, "MANY": SEQUENCES if many else 0}
    return Variant(KERNELS["store_rows"], constants, 1)


def keep_rows(size: int, codes: str) -> Variant:
    """`keep_rows` for a head size and codes of the cache."""
    return Variant(KERNELS["keep_rows"], {"D": tile(size), "CODES": codes}, 1)


def combine(size: int, *, sunk: bool) -> Variant:
    """`combine` for a head size, with sinks or without."""
    return Variant(KERNELS["combine"], {"D": tile(size), "SUNK": sunk}, 1)


def attend(
    size: int, codes: str, *, windowed: bool = False, capped: bool = False, many: bool = False
) -> Variant:
    """`attend` for a head size and codes of the cache: the leanest that can do it.

    Heads of 64 and 128 without cap, and those of 128 in windows of one sequence, have kernels of
    their own; a general one for each tile does the rest.
    """
    general = capped or size not in OWN_SIZES or (windowed and (size != 128 or many))
    block = 64 if tile(size) <= 128 else 32
    constants = {
        "D": tile(size), "ROWS": ROWS, "BLOCK": block, "CODES": codes,
        "WINDOWED": windowed or general, "GENERAL": general, "MANY": SEQUENCES if many else 0,
    }  # fmt: skip
    warps = 8 if many and general and tile(size) == 128 else 4  # registers of 4 are too few
    return Variant(KERNELS["attend"], constants, warps)
