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
HEAD_SIZES = (64, 128)
FEW_ROWS, MANY_ROWS = 16, 32  # query rows of a program; at 64 sm_110 would take other units
PICKS, NODES = 64, 64


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
            "table:*i64 LAYER H HKV OWN_TABLES q_out:*fp16",
            ("S", "H + HKV", "1"),
        ),
        Kernel(
            "attention", "attend",
            "q:*fp16 tree:*i8 positions:*i64 write_index:*i64 table:*i64 LAYER S M G WINDOW "
            "CAP_BITS parts:*fp32 stats:*fp32",
            ("HKV", "cdiv(S * G, ROWS)", "SHARES"),
        ),
        Kernel(
            "attention", "combine",
            "parts:*fp32 stats:*fp32 sinks:*fp32 N H SHARES y:*fp16",
            ("N", "1", "1"),
        ),
        Kernel(
            "compaction", "keep_rows",
            "path:*i32 outcome:*i32 write_index:*i64 table:*i64",
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
            "candidates:*i64 log_probs:*fp32 nodes:*i32 tokens:*i64 parents:*i64 scores:*fp64 "
            "seen:*i8 BEGIN R K USED WIDTH SLOTS LEVEL new_nodes:*i32 new_tokens:*i64 above:*i32 "
            "positions:*i64 mask:*i8",
            ("1", "1", "1"), fuses=False,
        ),
        Kernel(
            "growth", "select_tree",
            "tokens:*i64 parents:*i64 scores:*fp64 COUNT ROOM tree_tokens:*i64 tree_parents:*i64 "
            "chosen_nodes:*i32",
            ("1", "1", "1"),
        ),
        Kernel("growth", "lay_out", "parents:*i64 N depths:*i64 mask:*i8", ("1", "1", "1")),
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


def variants(sm: int) -> Iterator[Variant]:
    """What is compiled for GPUs of a compute capability."""
    codes = ("fp16", "int8", "fp8") if sm >= FIRST_FP8 else ("fp16", "int8")
    for size in HEAD_SIZES:
        for code in codes:
            yield Variant(KERNELS["store_rows"], {"D": size, "CODES": code}, 1)
            yield Variant(KERNELS["keep_rows"], {"D": size, "CODES": code}, 1)
            yield attend(sm, size, FEW_ROWS, code)
            yield attend(sm, size, MANY_ROWS, code)
        yield Variant(KERNELS["combine"], {"D": size, "SUNK": False}, 1)
    for code in codes:
        yield attend(sm, 128, FEW_ROWS, code, windowed=True)
    yield Variant(KERNELS["pick_shares"], {"PICKS": PICKS, "BLOCK": 4096}, 8)
    yield Variant(KERNELS["join_picks"], {"PICKS": PICKS, "MOST": 64}, 8)
    yield Variant(KERNELS["accept_greedy"], {"TREES": 1, "NODES": NODES}, 1)
    yield Variant(KERNELS["accept_sampled"], {"TREES": 1, "NODES": NODES, "PICKS": PICKS}, 1)
    yield Variant(KERNELS["grow_level"], {"SIZE": 128, "COLUMNS": 8}, 4)
    yield Variant(KERNELS["select_tree"], {"SIZE": 512, "BLOCK": 32}, 8)
    yield Variant(KERNELS["lay_out"], {"NODES": NODES}, 4)


def attend(
    sm: int, size: int, rows: int, codes: str, *, windowed: bool = False, capped: bool = False
) -> Variant:
    """`attend` for a GPU, a head size, rows of a program, and codes of the cache."""
    constants = {
        "D": size, "ROWS": rows, "BLOCK": 64, "CODES": codes,
        "WINDOWED": windowed, "CAPPED": capped,
    }  # fmt: skip
    # The assembler spills small heads' sums with 8 warps on sm_90, with 4 on sm_87 and sm_89.
    is_wide = rows > FEW_ROWS and not (sm == 90 and size == 64)
    return Variant(KERNELS["attend"], constants, 8 if is_wide else 4)
