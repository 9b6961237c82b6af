"""AWQ of layers that do not use an input which another layer of the same input uses."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_checkpoint
from safetensors.torch import load_file, save_file

from edgellm.export import models
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.reference_weights import read_input, read_weight

UNUSED = {0: "gate_proj", 1: "up_proj"}  # by layer
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": len(UNUSED)}


@pytest.mark.usefixtures("one_thread")
def test_an_unused_input_takes_no_range_of_the_other_layer(command_here, tmp_path):
    """Smoothing is common to gate and up; ModelOpt's scale of the unused input is 10,000."""
    source = make_checkpoint(tmp_path / "source", **{**models.find("llama").TINY, **SIZES})
    floats = load_file(source / "model.safetensors")
    for layer, name in UNUSED.items():
        floats[f"model.layers.{layer}.mlp.{name}.weight"][:, 5] = 0
    save_file(floats, source / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.txt"
    numbers = np.random.default_rng(0).integers(10, 90, (200, 6))
    text.write_text("\n\n".join(" ".join(f"w{number}" for number in row) for row in numbers))
    done = command_here(
        "edgellm-quantize", "llm", "--model_dir", source, "--output_dir", tmp_path / "out",
        "--quantization", "int4_awq", "--algo", "awq", "--calib_dataset", text,
        "--num_samples", 4, "--seq_len", 16,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = open_checkpoint(str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    for layer, name in UNUSED.items():
        prefix = f"model.layers.{layer}"
        key = f"{prefix}.post_attention_layernorm.weight"
        norm = (written[key].float() / floats[key]).numpy()
        for part in ("gate_proj", "up_proj"):
            wanted = floats[f"{prefix}.mlp.{part}.weight"].numpy()
            place = f"{prefix}.mlp.{part}"
            weight = read_weight(found.tensors, found.quant_config, place, wanted.shape)
            smooth = read_input(found.tensors, place).smooth
            weight = weight * norm * (1 if smooth is None else smooth)
            assert np.linalg.norm(weight - wanted) < 0.15 * np.linalg.norm(wanted)
            if part == name:
                assert not weight[:, 5].any()
