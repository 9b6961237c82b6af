"""Default limits of draft trees, by the weights and the GPU."""

from __future__ import annotations

import dataclasses

import pytest
from tensorrt_bundles import Bundles

from edgellm.build import verify_tree_size
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.verify_tree_size import GPUS, SIZES, best_size, default_size, verify_cost

THOR, ORIN = GPUS[110], GPUS[87]


# Published by TensorRT Edge-LLM with 60 nodes and INT4: plain tokens/s, those of EAGLE-3, and
# tokens of a round (Llama-3.1-8B on Thor, 0.4; Qwen3-8B on AGX Orin, 0.9).
@pytest.mark.parametrize(
    ("gpu", "plain", "drafted", "tokens"), [(THOR, 50.8, 81.0, 5.25), (ORIN, 32.5, 59.3, 4.22)]
)
def test_the_cost_of_60_nodes_is_the_published_one(gpu, plain, drafted, tokens):
    found = verify_cost(gpu, 60) + verify_tree_size.DRAFT_SHARE
    assert found == pytest.approx(tokens * plain / drafted, rel=0.15)


def test_sizes_follow_the_cost_model():
    assert best_size(THOR) == best_size(ORIN) == 16
    assert verify_cost(THOR, 16) == verify_cost(ORIN, 16) == 1.0
    costs = [verify_cost(THOR, size) for size in SIZES]
    assert costs == sorted(costs)
    fast, slow = (dataclasses.replace(THOR, int4_tflops=rate) for rate in (100.0, 5.0))
    assert (best_size(fast), best_size(slow)) == (60, 8)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"))


@pytest.mark.parametrize(
    ("precision", "sm", "fallback", "nodes"),
    [
        ("int4_awq", "11.0", "", 16),
        ("int4_awq", "8.7", "", 16),
        ("int4_awq", "12.0", "", 60),  # whose rates are not published
        ("nvfp4", "11.0", "", 60),
        ("nvfp4", "11.0", "int4", 60),  # which has NVFP4
        ("nvfp4", "8.7", "int4", 16),
    ],
)
def test_the_default_is_of_weights_and_gpu(bundles, precision, sm, fallback, nodes):
    options = TensorRtOptions(target_sm=sm, fallback_precision=fallback)
    assert default_size(bundles.make("base", precision), options) == nodes


def test_cpus_have_the_largest_limit(bundles):
    assert default_size(bundles.make("base", "int4_awq"), CpuOptions()) == 60


def test_llm_build_announces_a_smaller_limit(bundles, command_here, tmp_path):
    """No library here compiles for Thor, which is found after the limit."""
    flags = ("--backend", "tensorrt", "--gpu", "11.0", "--eagleBase", "--engineDir", tmp_path / "e")
    build = ("llm_build", "--onnxDir", bundles.make("base", "int4_awq"), *flags)
    assert "trees of at most 16 nodes" in command_here(*build).stdout
    assert "trees of at most" not in command_here(*build, "--maxVerifyTreeSize", 60).stdout
