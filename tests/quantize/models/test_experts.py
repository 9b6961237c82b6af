"""Experts: recorded inputs, quantization, and experts with few tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quantize_cases import load, make_job, make_model, write_text

from edgellm.core.errors import EdgeLLMError
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.formats.quantized_linear import decode_linear
from edgellm.quantize.formats.schemes import SCHEMES, Recipe
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.models.expert_rounding import Products, round_weight
from edgellm.quantize.models.experts import FEW, ObservedExperts, read_canonical, watch
from edgellm.quantize.models.families import family_of
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job
from edgellm.quantize.report.notes import few_line

pytestmark = pytest.mark.usefixtures("one_thread")
RANDOM = torch.Generator().manual_seed(3)


def _normal(*shape):
    return torch.randn(shape, generator=RANDOM)


@pytest.fixture
def experts():
    """Return four experts of width 8; the last is never chosen."""
    place = ObservedExperts(torch.nn.SiLU())
    place.networks = [(_normal(8, 16), _normal(8, 16), _normal(16, 8)) for _ in range(4)]
    return place


def test_experts_record_routed_tokens_and_rare_ones_all(experts):
    x, shares = _normal(100, 16), torch.full((100, 2), 0.5)
    ids = torch.stack([torch.arange(100) % 2, torch.full((100,), 2)], 1)
    ids[:3] = torch.tensor([0, 1])
    alone = experts(x, ids, shares)
    seen, few = watch(experts, lambda: experts(x, ids, shares))
    assert few == {3: 0}
    assert [each.tokens for each in seen] == [51, 52, 97, 100]
    sent = x[(ids == 2).any(1)]
    torch.testing.assert_close(seen[2].outer.squares, sent.double().square().sum(0))
    gate, up, _ = experts.networks[3]
    inner = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(seen[3].inner.squares, inner.double().square().sum(0))
    assert seen[3].inner.largest == pytest.approx(float(inner.abs().max()))
    torch.testing.assert_close(experts(x, ids, shares), alone)
    assert FEW > 0
    assert experts.seen is None


@pytest.mark.parametrize("name", ["int4_awq", "nvfp4", "fp8", "int8_sq"])
def test_quantized_weights_are_near(name):
    weight, x = _normal(32, 64), _normal(200, 64)
    recipe = Recipe(scheme=SCHEMES[name], block_size=32, alpha_step=0.1)
    inputs = Products.none(64, weight.device)
    inputs.add(x)
    found = round_weight(weight, inputs, recipe, float(weight.abs().max()), inputs.largest)
    named = {f"w.{part}": tensor for part, tensor in found.items()}
    decoded = decode_linear(named, "w", (32, 64), recipe.scheme.rounds_input)
    error = np.linalg.norm(decoded.weight - weight.numpy()) / np.linalg.norm(weight.numpy())
    assert error < {"int4_awq": 0.13, "nvfp4": 0.11, "fp8": 0.03, "int8_sq": 0.01}[name]
    if recipe.scheme.rounds_input:
        tops = {"nvfp4": 6 * 448, "fp8": 448, "int8_sq": 127}
        assert decoded.input_scale == pytest.approx(float(x.abs().max()) / tops[name])


@pytest.mark.parametrize("name", ["int4_awq", "nvfp4"])
def test_calibration_reduces_the_output_error(name):
    """Every fourth input channel is 20 times larger."""
    weight, x = _normal(64, 128), _normal(400, 128)
    x[:, ::4] *= 20
    recipe = Recipe(scheme=SCHEMES[name], block_size=32, alpha_step=0.1)

    def error(seen: torch.Tensor) -> float:
        inputs = Products.none(128, weight.device)
        inputs.add(seen)
        found = round_weight(weight, inputs, recipe, float(weight.abs().max()), 1.0)
        named = {f"w.{part}": tensor for part, tensor in found.items()}
        decoded = decode_linear(named, "w", (64, 128), rounds_input=False).weight
        return float((x @ (torch.from_numpy(decoded) - weight).T).square().mean())

    assert error(x) < 0.85 * error(torch.ones(1, 128))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a Granite model, with fused experts."""
    return make_model(tmp_path_factory.mktemp("experts") / "model", "granitemoe")


def test_a_run_names_experts_with_few_tokens(model, tmp_path):
    text = write_text(tmp_path / "text.jsonl")
    options = {"num_samples": 2, "seq_len": 24, "keep_layers": (2,)}
    report = run_job(make_job(model, text, tmp_path / "out", "nvfp4", **options), lambda *_: None)
    moe = "model.layers.1.block_sparse_moe"
    name, tokens = min(report.few.items(), key=lambda item: item[1])
    assert tokens < FEW
    assert not any("layers.2" in name for name in report.few)
    assert f"{name} ({tokens})" in few_line(report.few)
    tensors = load(tmp_path / "out")
    joined = [name for name in tensors if "put_linear" in name]
    assert sorted(joined) == [
        f"model.layers.2.block_sparse_moe.{way}put_linear.weight" for way in ("in", "out")
    ]
    assert tensors[f"{moe}.experts.2.gate_proj.weight"].dtype == np.uint8
    scales = {
        float(tensors[f"{moe}.experts.{index}.{part}.input_scale"])
        for index in range(5)
        for part in ("gate_proj", "up_proj")
    }
    assert len(scales) == 1
    pair = [tensors[f"{moe}.experts.0.{part}.weight_scale_2"] for part in ("gate_proj", "up_proj")]
    assert pair[0] == pair[1]
    original = load(model)[f"{moe}.router.layer.weight"]
    assert tensors[f"{moe}.router.layer.weight"].tobytes() == original.tobytes()
    export_llm(
        open_checkpoint(str(tmp_path / "out")), tmp_path / "bundle", ExportOptions(dtype="fp32")
    )


def test_autoround_rejects_experts(model, tmp_path):
    pytest.importorskip("auto_round")
    text = write_text(tmp_path / "text.jsonl")
    with pytest.raises(EdgeLLMError, match="autoround does not support mixture-of-experts models"):
        make_plan(make_job(model, text, tmp_path / "out", "int4_awq", algo="autoround"))


@pytest.mark.parametrize("is_turned", [False, True])
def test_joined_experts_are_split_in_both_orders(is_turned):
    """[E, 2 I, H] of Qwen3.5's published files, [E, H, 2 I] of Qwen3-VL's."""
    hidden, inner = 8, 4  # gates and ups of an expert are square together
    random = np.random.default_rng(3)
    both, down = (random.random((3, *sizes), np.float32) for sizes in ((8, 8), (hidden, inner)))
    stored = {"gate_up_proj": both, "down_proj": down}
    tensors = {"input_layernorm.weight": _tensor(np.ones(hidden, np.float32))}
    for name, array in stored.items():
        turned = array.swapaxes(1, 2) if is_turned else array
        tensors[f"mlp.experts.{name}"] = _tensor(np.ascontiguousarray(turned))
    found = read_canonical(tensors, family_of({"model_type": "qwen3_moe"}))
    expected = {"gate_proj": both[1, :inner], "up_proj": both[1, inner:], "down_proj": down[1]}
    for part, values in expected.items():
        np.testing.assert_array_equal(found[f"mlp.experts.1.{part}.weight"].floats(), values)


def _tensor(array):
    return Tensor(TensorInfo("F32", array.shape), array.tobytes())
