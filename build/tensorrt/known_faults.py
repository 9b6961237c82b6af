"""Wrong fusions of TensorRT's compiler, by version, and switches that disable them.

Its compiler reads switches from an environment variable that NVIDIA does not document; its own
TensorRT Edge-LLM (0.11, `cpp/builder/llmBuilder.cpp`) sets it for engines of batch size 1,
by version. Two switches for 10.13 are a user's findings on a Jetson Thor, which wrote rubbish
without them: https://github.com/NVIDIA/TensorRT-Edge-LLM/issues/151 (and 105) for products of one
input, and for NVFP4 the branch fixes/garbled-output of hungho77/TensorRT-Edge-LLM.

What TensorRT then refuses may be known, too: https://github.com/NVIDIA/TensorRT/issues/4832, where
10.16.2 compiles a graph of ModelOpt's INT8 for a Thor, and not for an Orin; and Edge-LLM's 192,
where 10.13.3 and 10.14.1 do not compile an engine with plugins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.build.tensorrt.lowering.op_table import Version
from edgellm.build.tensorrt.target import Target
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import ONLY_KERNELS

SWITCHES = "__LUNOWUD"
_NEVER = (99, 0)
_ORIN = 87
# As in https://github.com/NVIDIA/TensorRT/issues/4258, of 10.3
_NO_MEMORY = re.compile(r"out ?of ?memory|allocator error|could not be allocated", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A switch of the compiler."""

    word: str
    since: Version
    before: Version = _NEVER
    of_fp4: bool = False  # for graphs with NVFP4 alone


_SWITCHES = (
    Switch(word="-peep:match_dual_gemm=off", since=(10, 13), before=(10, 15)),  # Edge-LLM
    # Edge-LLM from 10.15 on, a user for 10.13
    Switch(word="-peep:fc_h_fusion=off", since=(10, 13)),
    # a user
    Switch(word="-cask_fusion:max_num_epilogues=1", since=(10, 13), before=(10, 14), of_fp4=True),
    Switch(word="-mlir:autotune:num_threads=1", since=(10, 15)),  # Edge-LLM
    Switch(word="-mlir:collective:fp4=off", since=(10, 15)),  # Edge-LLM
    Switch(word="-cask_fusion:async_policy=1", since=(10, 15)),  # Edge-LLM
)


def switches(version: Version, *, has_fp4: bool) -> str:
    """Switches for a TensorRT version; "" before 10.13.

    Args:
        version: major and minor.
        has_fp4: the graph has weights of NVFP4.
    """
    return " ".join(
        each.word
        for each in _SWITCHES
        if each.since <= version < each.before and (has_fp4 or not each.of_fp4)
    )


def has_fp4(model: ir.Model) -> bool:
    """Whether a lowered graph has weights of NVFP4."""
    stored = model.graph.initializers.values()
    return any(value.dtype == ir.DataType.FLOAT4E2M1 for value in stored)


def known_refusal(target: Target, model: ir.Model, words: str, larger: str = "") -> str:
    """A hint for a graph that was not compiled; "" if none is known.

    Args:
        target: library and GPU.
        model: the graph.
        words: the library's messages.
        larger: what to do where memory is too small; "": unknown.
    """
    if larger and _NO_MEMORY.search(words):
        return f"TensorRT had too little memory: {larger}"
    if "PLUGIN_V3" in words:
        names = {node.op_type for node in model.graph}
        way = "--backend onnxruntime --device cpu" if names & ONLY_KERNELS else "--kernels tensorrt"
        return f"NVIDIA/TensorRT-Edge-LLM#192 reports such plugins: {way} needs none"
    types = {node.inputs[0].dtype for node in model.graph if node.inputs and node.inputs[0]}
    is_new = target.library.version >= (10, 16)
    if target.sm == _ORIN and is_new and ir.DataType.INT8 in types:
        return (
            "it may be NVIDIA/TensorRT#4832, about INT8 on this GPU: quantize with int4_awq "
            "instead of int8_sq, or export in fp16"
        )
    return ""


@contextmanager
def compiler_switches(words: str) -> Iterator[str]:
    """Set the compiler's switches in the block; a user's own setting, even "", takes precedence."""
    if not words or SWITCHES in os.environ:
        yield os.environ.get(SWITCHES, "")
        return
    os.environ[SWITCHES] = words  # which reaches the environment that libraries read
    try:
        yield words
    finally:
        del os.environ[SWITCHES]
