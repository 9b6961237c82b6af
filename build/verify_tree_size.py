"""Default limit of draft trees: the number of nodes that yields the most tokens a second.

A cost model chooses it before anything is measured. A forward pass over n tokens reads each weight
once and multiplies it n times; it takes as long as the slower of both. Where reading is slower,
more nodes are free. For INT4 the products are slow on Jetsons: of 60 nodes they take 2 to 3.5 times
as long as reading. Rates are those that TensorRT Edge-LLM's published figures imply; edgellm has
measured none. Its own kernels take as long for 8 tokens as for 60, by its figures for batches; if
TensorRT's do, too, 60 nodes are better. `--eagleTree cost` chooses within the limit by measured
times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import log2
from pathlib import Path

from edgellm.build.plan import Options
from edgellm.build.tensorrt.options import TensorRtOptions

SIZES = (8, 16, 32, 60)
LARGEST = SIZES[-1]
INT4_BITS = 4 + 16 / 128  # of a weight, with its scale
# Tokens of a round: 5.2 with 60 nodes as published for Llama-3.1-8B with EAGLE-3, 4.2 with 16
# assumed, and between them by the logarithm.
TOKENS, FEWER_TOKENS = 5.2, 1.0 / log2(60 / 16)
DRAFT_SHARE = 0.25  # of a plain token's time: that head's weights in five passes
NEARLY = 0.98  # of the best speed, for which fewer nodes do


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates of a GPU.

    Attributes:
        gb_per_s: memory bandwidth that decoding with INT4 weights reaches.
        int4_tflops: rate of INT4 products of up to 64 tokens.
    """

    gb_per_s: float
    int4_tflops: float


# By compute capability. Thor: 85 % of 273 GB/s, and prompts of eight sequences (Llama-3.1-8B, 3,064
# tokens in 2,737 ms). AGX Orin: 60 % of 204.8 GB/s (Edge-LLM issue 60), and a round of Qwen3-8B
# (71 ms, 8 of them the draft's).
GPUS = {110: Gpu(232.0, 15.6), 87: Gpu(123.0, 13.2)}


def accepted(nodes: int) -> float:
    """Expected tokens of a round with a tree of so many nodes."""
    return TOKENS - FEWER_TOKENS * log2(LARGEST / nodes)


def verify_cost(gpu: Gpu, nodes: int) -> float:
    """Time of verifying a tree with INT4 weights, as a multiple of a plain token's."""
    read = INT4_BITS / 8 / gpu.gb_per_s
    return max(1.0, 2 * nodes / (1e3 * gpu.int4_tflops) / read)


def best_size(gpu: Gpu) -> int:
    """The fewest nodes whose rounds are nearly the fastest with INT4 weights."""
    rates = {size: accepted(size) / (verify_cost(gpu, size) + DRAFT_SHARE) for size in SIZES}
    return min(size for size, rate in rates.items() if rate >= NEARLY * max(rates.values()))


def default_size(source: Path, options: Options) -> int:
    """The default limit of a base engine.

    Args:
        source: the bundle.
        options: of the backend; only TensorRT's have a GPU of the table.

    Raises:
        BrokenArtifactError: the bundle is damaged.
        EdgeLLMError: a driver that fails.
    """
    gpu = GPUS.get(_capability(options))
    return best_size(gpu) if gpu is not None and _is_int4(source, options) else LARGEST


def _capability(options: Options) -> int:
    """Compute capability of the GPU that an engine is for; 0: none, or not known."""
    from edgellm.build.tensorrt.target import parse_sm
    from edgellm.device_runtime.gpu import compute_capability

    if not isinstance(options, TensorRtOptions):
        return 0
    return parse_sm(options.target_sm) if options.target_sm else compute_capability() or 0


def _is_int4(source: Path, options: Options) -> bool:
    """Whether most weights of the engine's linear layers are INT4."""
    import onnx_ir as ir

    from edgellm.build.artifact_kinds import look_at
    from edgellm.build.lowering.linears.weights import linear_layers
    from edgellm.core.graph_roles import DECODER
    from edgellm.core.manifest import LLM_BUNDLE, load_bundle
    from edgellm.device_runtime.kernels.triton.catalog import FIRST_FP8

    bundle = load_bundle(source, LLM_BUNDLE)
    look_at(source, bundle.files)
    counts: Counter[str] = Counter()
    for _, weight in linear_layers(ir.load(source / bundle.graphs[DECODER].path).graph):
        counts[weight.kind] += weight.count
    kinds = ["int4"]
    if getattr(options, "fallback_precision", "") == "int4" and _capability(options) < FIRST_FP8:
        kinds += ["fp8", "fp4"]  # which are replaced
    return 2 * sum(counts[kind] for kind in kinds) > counts.total()
