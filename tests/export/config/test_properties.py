"""Any config: the exported logits equal those of transformers, or the export fails."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NORMS
from hypothesis import HealthCheck, Phase, given, note, settings
from model_configs import configs
from portable import open_commit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph
from edgellm.export import models
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.vlm import own_name
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.bundle_files import DTYPES, decoder_spec, write_graphs
from edgellm.export.graph.decoder import build_commit, build_decoder
from edgellm.export.pipeline.causal_lm import register_causal_lms

EXAMPLES = int(os.environ.get("CONFIG_EXAMPLES", "20"))  # of each architecture
TOLERANCE = 2e-4
CAPACITY, CHUNKS = 32, (9, 6, 1, 1, 1)
pytestmark = pytest.mark.usefixtures("one_thread")


class Tensors:
    """See `TensorSource`: a model in memory, in its saved form."""

    def __init__(self, model: PreTrainedModel) -> None:
        tied = model.config.tie_word_embeddings
        stored = revert_weight_conversion(model, model.state_dict())
        self._arrays = {
            own_name(name): value.numpy()
            for name, value in stored.items()
            if not (tied and name == "lm_head.weight")
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo("F32", array.shape) for name, array in self._arrays.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        yield memoryview(np.ascontiguousarray(self._arrays[name])).cast("B")


def reference(config: dict[str, Any]) -> PreTrainedModel | None:
    """Transformers' model; None if transformers rejects the config."""
    torch.manual_seed(0)
    register_causal_lms()
    with contextlib.suppress(Exception):
        hf_config = AutoConfig.for_model(**copy.deepcopy(config), initializer_range=0.2)
        model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith((*NORMS, "layer_scalar")):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(0, 0.2)
            model(torch.arange(4)[None])
        return model
    return None


def exported(config: dict[str, Any], model: PreTrainedModel, folder: Path) -> DecoderNetwork:
    facts, architecture = read(config)
    weights = Weights(source=Tensors(model))
    graph, op, recurrences = build_decoder(architecture, facts, weights, DTYPES["fp32"])
    assert not weights.unused()
    commit = {} if recurrences is None else {"commit": build_commit(recurrences)}
    write_graphs(folder, {"model": (graph, op), **commit}, None)
    spec = decoder_spec(
        facts,
        config["model_type"],
        [op],
        Tensors(model),
        recurrent=None if recurrences is None else recurrences.spec,
    )
    loaded = LoadedGraph(load_graph(folder / "model.onnx", GraphOptions(threads=1)))
    runner = OnnxRuntimeRunner(graphs=[loaded], kv=spec.kv, capacity=CAPACITY)
    return DecoderNetwork(
        runner=runner, spec=spec, capacity=CAPACITY, commit=open_commit(folder) if commit else None
    )


def read(config: dict[str, Any]) -> tuple[DecoderConfig, Any]:
    architecture = models.find(config["model_type"])
    reader = ConfigReader(copy.deepcopy(config))
    facts = architecture.Config.from_hf(reader)
    reader.finish()
    return facts, architecture


def compare(session: DecoderNetwork, model: PreTrainedModel, positions: int = CAPACITY) -> None:
    """Tokens up to the exported model's number of positions."""
    ids = np.random.default_rng(1).integers(4, 64, sum(CHUNKS))[:positions]
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    if not np.isfinite(expected).all():
        return
    found, begin = [], 0
    for size in CHUNKS:
        chunk = ids[begin : begin + size]
        if len(chunk):
            found.append(session.run(chunk, begin, np.arange(len(chunk))).logits.copy())
        begin += len(chunk)
    tolerance = TOLERANCE * max(1, np.abs(expected).max())
    np.testing.assert_allclose(np.concatenate(found), expected, atol=tolerance)


@pytest.mark.parametrize("model_type", models.supported())
def test_random_configs_equal_transformers_or_are_rejected(model_type, tmp_path_factory):
    folder = tmp_path_factory.mktemp(model_type)
    outcomes = []

    @settings(
        max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(configs(model_type, type(AutoConfig.for_model(model_type))))
    def run(config: dict[str, Any]) -> None:
        note(f"config: {config}")
        model = reference(config)
        try:
            if model is None:
                read(config)
                outcomes.append("no reference")
                return
            session = exported(config, model, folder)
        except EdgeLLMError:
            outcomes.append("stopped")
            return
        compare(session, model, read(config)[0].max_position_embeddings)
        outcomes.append("equal")

    run()
    assert "equal" in outcomes, {each: outcomes.count(each) for each in set(outcomes)}


def test_the_comparison_finds_an_ignored_key(tmp_path):
    """The comparison finds the errors that it is for."""
    config = {**models.find("gemma2").TINY, "vocab_size": 64, "num_hidden_layers": 2}
    model = reference(config)
    assert model is not None
    compare(exported(config, model, tmp_path), model)
    with pytest.raises(AssertionError, match="Not equal"):
        compare(exported({**config, "sliding_window": 5}, model, tmp_path), model)
