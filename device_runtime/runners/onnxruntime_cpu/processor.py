"""Instruction sets of this processor."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_X86 = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
_ARM = ("asimd", "asimddp", "i8mm", "sve", "bf16")


@cache
def instruction_sets() -> str:
    """Architecture and vector extensions, by which ONNX Runtime chooses kernels."""
    found = _flags()
    known = [flag for flag in (*_X86, *_ARM) if flag in found]
    return " ".join([platform.machine(), *known])


def has_fast_int8() -> bool:
    """Whether there are INT8 dot products that neither saturate nor are slower than FP32."""
    return bool(_flags() & {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"})


def has_bfloat_products() -> bool:
    """Whether edgellm's kernels have dot products of bfloat16, for attention."""
    return "avx512_bf16" in _flags()


@cache
def _flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    keys = ("flags", "Features")
    return frozenset(
        next((line.split(":", 1)[1].split() for line in lines if line.startswith(keys)), [])
    )
