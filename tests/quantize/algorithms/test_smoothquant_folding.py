"""Folding of smoothing factors into norms and linear layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantize_cases import make_model

from edgellm.quantize.algorithms.cross_layer_equalization import equalize_columns, input_squares
from edgellm.quantize.algorithms.smoothquant import int8_rows
from edgellm.quantize.algorithms.smoothquant_folding import fold_smoothing
from edgellm.quantize.formats.tensors import plain_tensor
from edgellm.quantize.models.families import FAMILIES
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.models.one_layer_model import linears, run_layer

WIDTH, HEAD_DIM = 32, 8
CHAINS = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))


@pytest.mark.parametrize("kind", ["olmo2", "llama"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_layer_quantized_again_keeps_the_factors_folded_into_it(kind, chain):
    """The product of both layers stays, with factors of up to 2."""
    chance = np.random.default_rng(0)
    source, tensors, smooth = {}, {}, {}
    for name in ("mlp.gate_proj", *CHAINS[0], *CHAINS[1]):
        weight = chance.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        factor = np.exp(chance.uniform(-0.7, 0.7, WIDTH)).astype(np.float32)
        source[f"{name}.weight"], smooth[name] = weight, factor
        tensors |= int8_rows(f"{name}.weight", weight / factor)
        tensors[f"{name}.pre_quant_scale"] = plain_tensor(factor)
    folded = fold_smoothing(tensors, source, FAMILIES[kind], HEAD_DIM)
    assert not any(name.endswith("pre_quant_scale") for name in folded)
    maker, reader = (
        folded[f"{name}.weight"].floats() * folded[f"{name}.weight_scale"].floats()[:, None]
        for name in chain
    )
    wanted = source[f"{chain[1]}.weight"] @ source[f"{chain[0]}.weight"]
    assert np.linalg.norm(reader @ maker - wanted) < 0.04 * np.linalg.norm(wanted)


def test_o_proj_without_v_proj_is_quantized_again():
    """Latent attention expands keys and values from a shared latent."""
    chance = np.random.default_rng(0)
    weight = chance.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    factor = np.exp(chance.uniform(-0.7, 0.7, WIDTH)).astype(np.float32)
    name = "self_attn.o_proj"
    tensors = int8_rows(f"{name}.weight", weight / factor)
    tensors[f"{name}.pre_quant_scale"] = plain_tensor(factor)
    folded = fold_smoothing(tensors, {f"{name}.weight": weight}, FAMILIES["minicpm3"], HEAD_DIM)
    assert set(folded) == {f"{name}.weight", f"{name}.weight_scale"}
    found = folded[f"{name}.weight"].floats() * folded[f"{name}.weight_scale"].floats()[:, None]
    assert np.linalg.norm(found - weight) < 0.02 * np.linalg.norm(weight)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("kind", "equalize"),
    [
        ("llama", ("q_proj", "o_proj", "gate_proj", "down_proj")),
        ("gemma2", ("q_proj", "o_proj", "gate_proj", "down_proj")),
        ("cohere2", ("q_proj", "o_proj", "up_proj", "down_proj")),
        ("olmo2", ("o_proj", "down_proj")),
        ("starcoder2", ("q_proj", "o_proj")),
        ("phi3", ("qkv_proj", "gate_up_proj")),
        ("qwen3_moe", ()),
    ],
)
def test_equalized_columns_compute_the_same(tmp_path, kind, equalize, reads):
    """For every producer of inputs; columns without one stay unchanged."""
    subject = LanguageModel.open(str(make_model(tmp_path, kind)), ())
    source = {name: each.floats() for name, each in subject.layer_source(0).items()}
    chance = np.random.default_rng(0)
    for name, value in source.items():
        if value.ndim == 2:
            source[name] = value * np.exp(chance.standard_normal(value.shape[1])).astype(np.float32)
    states = torch.randn(2, 9, subject.config.hidden_size, generator=torch.manual_seed(0))
    squares = None
    if reads:
        model = subject.layer_model(0, source, states.device)
        weights = dict.fromkeys(linears(model), torch.ones(9))
        squares = input_squares(model, [states], subject.family, weights)
    found = equalize_columns(source, subject.family, subject.config.head_dim, squares)
    wanted, got = (
        run_layer(subject.layer_model(0, values, states.device), states) - states
        for values in (source, found)
    )
    assert torch.dist(got, wanted) < 1e-4 * wanted.norm()
    if not equalize:
        assert all((found[name] == value).all() for name, value in source.items())
    for name in equalize:
        key = next(key for key in source if key.endswith(f"{name}.weight"))
        assert _spread(found[key]) < 0.95 * _spread(source[key])


def test_columns_around_float_layers_stay_unchanged(tmp_path):
    """No factor is folded into a float linear layer."""
    subject = LanguageModel.open(str(make_model(tmp_path, "llama")), ())
    source = {name: each.floats() for name, each in subject.layer_source(0).items()}
    floats = ("self_attn.k_proj", "mlp.up_proj")
    found = equalize_columns(source, subject.family, subject.config.head_dim, floats=floats)
    changed = {name for name, value in source.items() if (found[name] != value).any()}
    assert changed == {"self_attn.v_proj.weight", "self_attn.o_proj.weight"}


def _spread(weight: np.ndarray) -> float:
    """Return the spread of the logarithms of column norms."""
    return float(np.log(np.linalg.norm(weight, axis=0)).std())
