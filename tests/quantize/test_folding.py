"""Smoothing that goes into what makes the inputs, where makers are smoothed themselves."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.quantize.families import FAMILIES
from edgellm.quantize.folding import fold_smoothing
from edgellm.quantize.smoothing import int8_rows, plain_tensor

WIDTH, HEAD_DIM = 32, 8
CHAINS = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))


@pytest.mark.parametrize("kind", ["olmo2", "llama"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_maker_that_is_rounded_anew_keeps_what_its_reader_gave_it(kind, chain):
    """The product of both, with factors of inputs of up to two."""
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
