"""AWQ of layers that do not use an input which another layer of the same input uses."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_checkpoint
from safetensors.torch import load_file, save_file

from edgellm.export import models
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.reference_weights import read_input, read_weight

MLP, NORM = "model.layers.0.mlp", "model.layers.0.post_attention_layernorm.weight"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_an_unused_input_takes_no_range_of_the_other_layer(command, tmp_path, name):
    """Smoothing is common to gate and up; ModelOpt's scale of the unused input is 10,000."""
    source = make_checkpoint(tmp_path / "source", **{**models.find("llama").TINY, **SIZES})
    floats = load_file(source / "model.safetensors")
    floats[f"{MLP}.{name}.weight"][:, 5] = 0
    save_file(floats, source / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.txt"
    numbers = np.random.default_rng(0).integers(10, 90, (200, 6))
    text.write_text("\n\n".join(" ".join(f"w{number}" for number in row) for row in numbers))
    done = command(
        "edgellm-quantize", "llm", "--model_dir", source, "--output_dir", tmp_path / "out",
        "--quantization", "int4_awq", "--algo", "awq", "--calib_dataset", text,
        "--num_samples", 4, "--seq_len", 16,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = open_checkpoint(str(tmp_path / "out"))
    norm = load_file(tmp_path / "out" / "model.safetensors")[NORM].float() / floats[NORM]
    for part in ("gate_proj", "up_proj"):
        wanted = floats[f"{MLP}.{part}.weight"].numpy()
        weight = read_weight(found.tensors, found.quant_config, f"{MLP}.{part}", wanted.shape)
        smooth = read_input(found.tensors, f"{MLP}.{part}").smooth
        weight = weight * norm.numpy() * (1 if smooth is None else smooth)
        assert np.linalg.norm(weight - wanted) < 0.15 * np.linalg.norm(wanted)
        if part == name:
            assert not weight[:, 5].any()
