"""Gemma 4: shared keys and values, heads of two sizes, and per-layer embeddings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from lora_adapters import ALL, logits_of, reference, write_adapter
from model_configs import GEMMA4_EXPERTS
from portable import TOLERANCE
from transformers import AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError, UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.core.model_spec import cache_bytes
from edgellm.device_runtime.api.llm import LLM
from edgellm.export import models
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.tools.inspection.sources.detect import inspect

TINY = models.find("gemma4_text").TINY
SLIDING, FULL = "sliding_attention", "full_attention"
PLAN = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto")
pytestmark = pytest.mark.usefixtures("one_thread")


def export(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint and its float32 bundle."""
    checkpoint = make_checkpoint(folder / "checkpoint", **{**TINY, **changes})
    export_llm(open_checkpoint(str(checkpoint)), folder / "bundle", ExportOptions(dtype="fp32"))
    return checkpoint, folder / "bundle"


CONFIGS = {
    "nothing shared": {"num_kv_shared_layers": 0},
    "one shared": {"num_kv_shared_layers": 1},
    "all but the first two shared": {
        "num_kv_shared_layers": 4,
        "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
    },
    "shared by all of one type": {"num_kv_shared_layers": 5, "layer_types": [FULL] * 6},
    "single width": {"use_double_wide_mlp": False},
    "default pattern": {"layer_types": None, "num_kv_shared_layers": 0},
    "equal keys and values": {"attention_k_eq_v": True},
    "fewer global heads": {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "heads of one size": {"global_head_dim": 32},
    "no per-layer embeddings": {"hidden_size_per_layer_input": 0},
    "as 26B-A4B": {
        **GEMMA4_EXPERTS,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "top_k_experts": 3,
    },
    "larger per-layer vocabulary": {"vocab_size_per_layer_input": 100},
    "wide heads": {
        "global_head_dim": 96,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.3},
            SLIDING: {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    },
}


@pytest.mark.each_change(
    "one shared",
    "single width",
    "equal keys and values",
    "no per-layer embeddings",
    "as 26B-A4B",
    "wide heads",
)
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_configs_equal_transformers(tmp_path, changes):
    checkpoint, bundle = export(tmp_path, **changes)
    ids = np.random.default_rng(1).integers(9, 96, 30)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
        # Without hidden states, transformers slices per-layer inputs that may not exist.
        outputs = model(torch.from_numpy(ids)[None], output_hidden_states=True)
    expected = outputs.logits[0].numpy()
    found = run_portable(bundle, load_bundle(bundle, LLM_BUNDLE), ids, 26)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


def test_the_hubs_keys_equal_those_that_transformers_saves():
    """`per_layer_config` is derived from `global_head_dim` and `num_global_key_value_heads`."""
    from transformers import AutoConfig

    given = {**TINY, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    saved = AutoConfig.for_model(**given).to_dict()
    assert "global_head_dim" not in saved
    read = [
        models.find("gemma4_text").Config.from_hf(ConfigReader(each)) for each in (given, saved)
    ]
    one, other = ([config.heads_of(layer) for layer in range(6)] for config in read)
    assert one == other == [(2, 32), (2, 32), (1, 48)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6, so some layers have no earlier"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4, so some layers have no earlier"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1"),
        ({"vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input = 95 is below"),
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input = -8 is negative"),
        ({"use_bidirectional_attention": "all"}, "only 'vision'"),
        ({"enable_moe_block": True}, "config.json has no num_experts"),
        ({**GEMMA4_EXPERTS, "top_k_experts": 7}, "top_k_experts = 7, but num_experts = 6"),
        (
            {**GEMMA4_EXPERTS, "hidden_activation": "gelu"},
            "hidden_activation = 'gelu' is not supported",
        ),
        ({"per_layer_config": {"6": {"head_dim": 8}}}, "per_layer_config has '6', which is no"),
        ({"per_layer_config": {"2": {"sliding_window": 8}}}, "does not understand: sliding_window"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "several sizes of heads in sliding"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "4 attention heads cannot share 3",
        ),
    ],
)
def test_wrong_configs_are_rejected_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        models.find("gemma4_text").Config.from_hf(ConfigReader({**TINY, **changes}))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return export(tmp_path_factory.mktemp("gemma4"))[1]


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime_cuda"])
def test_gpu_backends_reject_it_before_the_build(bundle, tmp_path, backend):
    with pytest.raises(EdgeLLMError, match="on cuda does not compute layers with shared KV, or"):
        build_engine("llm", bundle, tmp_path / "engine", PLAN, backend, lambda _: None)
    assert not (tmp_path / "engine").exists()


def test_only_layers_with_own_keys_have_a_cache(bundle):
    """A token takes the bytes of four layers, three of them with small heads."""
    spec = load_bundle(bundle, LLM_BUNDLE).decoder
    assert (spec.num_layers, spec.kv.num_layers) == (6, 4)
    assert spec.kv.heads == ((2, 32), (2, 32), (2, 48), (2, 32))
    assert spec.kv.bytes_per_token == 2 * 2 * (3 * 32 + 48) * 4
    assert cache_bytes(spec.kv, 10) == 10 * spec.kv.bytes_per_token


def test_a_token_reads_some_experts(tmp_path):
    """Two of six in each of six layers."""
    report = inspect(make_checkpoint(tmp_path / "checkpoint", **GEMMA4_EXPERTS))
    whole = sum(each.loaded_bytes for each in report.tensors if each.is_read_whole)
    of_expert = 2 * 3 * TINY["hidden_size"] * GEMMA4_EXPERTS["moe_intermediate_size"]
    assert whole - report.read_bytes == pytest.approx(6 * 4 * of_expert, abs=1)


def test_tensors_of_shared_layers_are_ignored(tmp_path):
    """As in transformers: the hub's files have keys and values of all layers."""
    from safetensors.numpy import load_file, save_file

    checkpoint, bundle = export(tmp_path)
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.4.self_attn.k_proj.weight"
    assert name not in tensors
    save_file({**tensors, name: np.ones((64, 96), np.float32)}, checkpoint / "model.safetensors")
    again = tmp_path / "again"
    export_llm(open_checkpoint(str(checkpoint)), again, ExportOptions(dtype="fp32"))
    ids = np.arange(9, 30)
    one, other = (
        run_portable(each, load_bundle(each, LLM_BUNDLE), ids, 20) for each in (bundle, again)
    )
    np.testing.assert_array_equal(one, other)


def test_adapters_equal_merged_weights(tmp_path):
    """Of all linear layers of the layers; some have no keys and values."""
    checkpoint, bundle = export(tmp_path)
    names = (*ALL, "per_layer_input_gate", "per_layer_projection")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, targets=names)
    plan = dataclasses.replace(PLAN, max_lora_rank=4)
    build_engine("llm", bundle, tmp_path / "engine", plan, "onnxruntime", lambda _: None)
    ids = np.arange(12) * 7 % 90
    expected = logits_of(reference(checkpoint, adapter, {"": 2.0}), ids)
    with LLM(tmp_path / "engine") as llm:
        llm.load_adapter("own", adapter)
        kv = llm.base.new_kv()
        kv.adapter = llm._adapters.find("own")
        found = llm.base.run(ids, 0, np.arange(12), kv=kv).logits
        kv.free()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


_MEASURE = """
import sys
from pathlib import Path
import numpy as np
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder

def read(name):
    return Path("/proc/self", name).read_text()

session = open_decoder(Path(sys.argv[1]), load_engine(Path(sys.argv[1]), LLM_ENGINE))
session.run(np.arange(9, 40), 0, np.arange(31))
mapped, size, rows = False, 0, 0
for words in map(str.split, read("smaps").splitlines()):
    if "-" in words[0] and not words[0].endswith(":"):
        mapped = words[-1].endswith("decode.data")
    elif words[0] == "Size:":
        size = int(words[1])
    elif words[0] == "VmFlags:" and mapped and "rr" in words:
        rows += size
anonymous = next(line for line in read("status").splitlines() if line.startswith("RssAnon"))
print(int(anonymous.split()[1]) << 10, rows << 10)
"""


def _measured(engine: Path) -> tuple[int, int]:
    """Anonymous bytes of a process after a pass, and bytes of weights that are read by rows."""
    command = [sys.executable, "-c", _MEASURE, str(engine)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(found[0]), int(found[1])


@pytest.mark.each_change("int8")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_per_layer_embeddings_stay_in_the_mapped_file(bundle, tmp_path, quantize):
    """A table of 123 MB in float32 adds no anonymous memory.

    Quantized ones are mapped for reads of rows; ONNX Runtime maps files with weights that it packs.
    """
    large = export(tmp_path, vocab_size_per_layer_input=160_000)[1]
    plan, found = dataclasses.replace(PLAN, quantize=quantize), []
    for name, source in (("small", bundle), ("large", large)):
        build_engine("llm", source, tmp_path / name, plan, "onnxruntime", lambda _: None)
        found.append(_measured(tmp_path / name))
    table = (160_000 - 96) * 192 * (4 if quantize == "none" else 1)
    assert found[1][0] - found[0][0] < table / 10
    assert found[0][1] == 0
    if quantize == "none":
        assert found[1][1] == 0
    else:
        assert table * 0.98 < found[1][1] < table * 1.2
