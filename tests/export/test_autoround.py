"""Checkpoints of AutoRound and GPTQ: what auto-round packs and dequantizes, and contradictions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from graph_weights import graph_weights
from quantized_layouts import Layout, gptq, write_checkpoint
from safetensors.torch import load_file, save_file

from edgellm.core.errors import UnsupportedModelError
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"
_AUTO_ROUND = {"quant_method": "auto-round"}


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Widths that auto-round's words divide: multiples of 32."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tiny = {**models.find("llama").TINY, **sizes, **heads}
    return make_checkpoint(tmp_path_factory.mktemp("floats"), **tiny)


def packed(kind, bits, group, *, symmetric):
    """A writer that lets auto-round pack a layer and multiply with it."""

    def write(weight, random):
        del random
        rows = weight.reshape(len(weight), -1, weight.shape[1] if group == -1 else group)
        top = 2**bits - 1
        if symmetric:  # the largest weight of a group takes the lowest code, whichever its side
            scales = np.where(rows.max(-1) > -rows.min(-1), -rows.max(-1), -rows.min(-1))
            scales, zeros = scales / (top // 2 + 1), np.full(rows.shape[:2], top // 2 + 1.0)
        else:
            scales = (rows.max(-1) - rows.min(-1)) / top
            zeros = np.clip(np.rint(-rows.min(-1) / scales), 1, top)
        linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
        linear.weight.data = torch.from_numpy(weight)
        module = kind(bits, group, linear)
        module.pack(linear, *(torch.from_numpy(each).float() for each in (scales, zeros)))
        tensors = {name: value.numpy() for name, value in module.state_dict().items()}
        with torch.no_grad():
            y = module(torch.eye(weight.shape[1])).float().numpy()
        return tensors, np.ascontiguousarray(y.reshape(weight.shape[::-1]).T)

    return write


def _auto_gptq(bits, group, linear):
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    return QuantLinear(bits, group, linear.in_features, linear.out_features, bias=False)


def _native(bits, group, linear):
    from auto_round_extension.torch.qlinear_torch import QuantLinear

    layer = QuantLinear(bits, group, linear.in_features, linear.out_features, bias=False)
    layer.device = "cpu"
    return layer


def _awq(bits, group, linear):
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM

    class Layer(WQLinear_GEMM):
        def pack(self, linear, scales, zeros):
            made = WQLinear_GEMM.from_linear(
                linear,
                bits,
                self.group_size,
                scales=scales.T.contiguous(),
                zeros=zeros.T.contiguous(),
            )
            self.load_state_dict(made.state_dict())

        def forward(self, x):
            from auto_round.export.export_to_awq.utils import dequantize_gemm

            return x @ dequantize_gemm(
                self.qweight, self.qzeros, self.scales.float(), bits, self.group_size
            )

    return Layer(bits, group, linear.in_features, linear.out_features, False, "cpu")


PACKINGS = {
    "auto_round:auto_gptq": (_auto_gptq, {"packing_format": "auto_round:auto_gptq"}),
    "auto_round:gptqmodel": (_native, {"packing_format": "auto_round:gptqmodel"}),
    "auto_round": (_native, {"packing_format": "auto_round"}),
    "auto_round:auto_awq": (_awq, {"packing_format": "auto_round:auto_awq"}),
    "auto_gptq": (_auto_gptq, {"quant_method": "gptq"}),
    "auto_awq": (_awq, {"quant_method": "awq", "version": "gemm"}),
    "gptq_v2": (_native, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "as transformers writes it": (_native, {"quant_method": "gptq", "format": "GPTQ_V2"}),
}
CASES = [
    (name, bits, group, symmetric)
    for name, (kind, _) in PACKINGS.items()
    for bits, group, symmetric in [
        (4, 32, True),
        (4, 64, False),
        (4, -1, False),
        (8, 128, True),
        (8, 32, False),
    ]
    if bits == 4 or kind is not _awq
]


def found_weights(folder):
    """All quantized layers, computed by a bundle's graph."""
    export_llm(open_checkpoint(str(folder)), folder.parent / "bundle", ExportOptions(dtype="fp32"))
    return graph_weights(folder.parent / "bundle")


@pytest.mark.each_change("*-4-32-True", "*-4--1-False", "as transformers writes it-8-*")
@pytest.mark.parametrize(("name", "bits", "group", "symmetric"), CASES)
def test_weights_equal_those_that_auto_round_dequantizes(
    floats, tmp_path, name, bits, group, symmetric
):
    kind, config = PACKINGS[name]
    config = {"quant_method": "auto-round", "bits": bits, "group_size": group, **config}
    layout = Layout(
        packed(kind, bits, group, symmetric=symmetric),
        {**config, "sym": symmetric, "zero_point": not symmetric},
    )
    meant = write_checkpoint(floats, tmp_path / "checkpoint", layout)
    found = found_weights(tmp_path / "checkpoint")
    assert found.keys() == meant.keys()
    for key, expected in meant.items():  # auto-round's products are float16
        step = np.abs(expected).max() / 2 ** (bits - 1)
        np.testing.assert_allclose(found[key], expected, atol=step / 8, rtol=0)
    tensors = load_file(tmp_path / "checkpoint" / WEIGHTS)
    signs = [(value < 0).any() for key, value in tensors.items() if key.endswith("scales")]
    assert any(signs) == symmetric


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_scales_that_are_not_numbers_are_rejected(floats, tmp_path, value):
    folder = tmp_path / "checkpoint"
    write_checkpoint(floats, folder, Layout(gptq(4, symmetric=True), {"quant_method": "gptq"}))
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(Exception, match="not a number other than zero"):
        export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("version", "symmetric", "config", "message"),
    [
        (2, True, {"sym": True}, "says symmetric, but zero points are 9, not 8"),
        (2, True, {}, "does not say asymmetric, but zero points are 9"),
        (2, True, {"checkpoint_format": "gptq"}, "zero points are 9"),
        (1, True, {"checkpoint_format": "gptq_v2"}, "zero points are 7"),
        (1, True, {"checkpoint_format": "gptq_v2", "sym": True}, "zero points are 7"),
        (1, False, {"sym": True}, "says symmetric, but zero points go from"),
        (1, True, {"checkpoint_format": "marlin"}, "says checkpoint_format 'marlin'"),
        (2, True, {**_AUTO_ROUND, "sym": True}, "zero points are 9"),
        (1, True, {**_AUTO_ROUND, "packing_format": "auto_round:gptqmodel"}, "are 7"),
        (1, True, {**_AUTO_ROUND, "packing_format": "mlx"}, "packing_format 'mlx'"),
    ],
)
def test_contradicting_settings_are_rejected(floats, tmp_path, version, symmetric, config, message):
    layout = Layout(
        gptq(4, symmetric=symmetric, version=version), {"quant_method": "gptq", **config}
    )
    write_checkpoint(floats, tmp_path / "checkpoint", layout)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        export_llm(
            open_checkpoint(str(tmp_path / "checkpoint")),
            tmp_path / "bundle",
            ExportOptions(dtype="fp32"),
        )
    assert caught.value.hint
    assert not (tmp_path / "bundle").exists()


def test_layers_may_differ_from_the_configs_default(floats, tmp_path):
    config = {"sym": True, "extra_config": {"model.layers.0.mlp.up_proj": {"sym": False}}}
    layout = Layout(gptq(4, symmetric=False), {"quant_method": "auto-round", **config})
    meant = write_checkpoint(floats, tmp_path / "checkpoint", layout)
    for key, found in found_weights(tmp_path / "checkpoint").items():
        np.testing.assert_allclose(found, meant[key], rtol=3e-7, atol=0)


def test_groups_that_do_not_divide_the_inputs_are_rejected(floats, tmp_path):
    """128 inputs in groups of 96 have two scales, as if groups were of 64."""
    layout = Layout(gptq(4, symmetric=True, group=64), {"quant_method": "gptq", "group_size": 96})
    write_checkpoint(floats, tmp_path / "checkpoint", layout)
    tensors = load_file(tmp_path / "checkpoint" / WEIGHTS)
    kept = {name: value for name, value in tensors.items() if not name.endswith("g_idx")}
    save_file(kept, tmp_path / "checkpoint" / WEIGHTS)
    with pytest.raises(UnsupportedModelError, match="groups of 96 do not divide 128 inputs"):
        found_weights(tmp_path / "checkpoint")


def test_symmetric_compressed_tensors_with_zero_points_are_rejected(tmp_path, floats):
    """Zero points contradict a config without them, too."""
    from quantized_layouts import ct_int

    weights = {"num_bits": 4, "symmetric": True, "group_size": 16}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    write_checkpoint(floats, tmp_path / "checkpoint", Layout(ct_int(4, symmetric=False), config))
    with pytest.raises(UnsupportedModelError, match="says symmetric, but zero points go from"):
        found_weights(tmp_path / "checkpoint")
    edited = json.loads((tmp_path / "checkpoint/config.json").read_text())
    edited["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "checkpoint/config.json").write_text(json.dumps(edited))
    assert found_weights(tmp_path / "checkpoint")


@pytest.mark.each_change("None-*", "value4-*")
@pytest.mark.parametrize("key", ["extra_config", "dynamic", "config_groups"])
@pytest.mark.parametrize("value", [None, True, [1], {"a": None}, {"a": 3}])
def test_settings_without_effect_are_ignored(floats, tmp_path, key, value):
    layout = Layout(gptq(4, symmetric=True), {"quant_method": "gptq", "sym": True, key: value})
    meant = write_checkpoint(floats, tmp_path / "checkpoint", layout)
    assert found_weights(tmp_path / "checkpoint").keys() == meant.keys()
