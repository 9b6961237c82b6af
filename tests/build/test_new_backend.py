"""A new backend is two packages of one name, and both commands run with it."""

from __future__ import annotations

import json
import sys

import pytest
from added_files import added

import edgellm.build
from edgellm.build import cli as build_cli
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions, runners
from edgellm.device_runtime import cli as inference_cli

BUILD = '''
"""Engines that are the portable graphs."""

import shutil
from pathlib import Path

from edgellm.build.plan import Compiled, Estimate, Options, Origin
from edgellm.device_runtime.runners import copying
from edgellm.core.manifest import GraphSpec

LABEL, DEVICE, TAKES_STATES, TAKES_MIXED_LAYERS = "Copying", "cpu", False, False
__all__ = ["DEVICE", "LABEL", "Options", "compile", "estimate", "origin"]


def origin(options):
    return Origin(copying.available(), "any")


def estimate(source, bundle, plan):
    size = sum(record.num_bytes for record in bundle.files.values())
    kv_bytes = plan.kv_capacity * bundle.cache.bytes_per_token
    return Estimate(
        engine_bytes=size, kv_bytes=kv_bytes, peak_build_bytes=size, decode_bytes=size
    )


def compile(source, bundle, plan, folder, report):
    report("copying")
    graphs = {}
    for role, graph in bundle.graphs.items():
        for name in bundle.files:
            if Path(name).stem.split(".")[0] == Path(graph.path).stem:
                shutil.copyfile(source / name, folder / name)
        graphs[role] = (GraphSpec(graph.path, precision=bundle.dtype),)
    return Compiled(graphs=graphs, kv_dtype=bundle.cache.dtype, prefill_rows=4)
'''
RUN = '''
"""Runs portable graphs as they are, with caches that are copied in every pass."""

import numpy as np

from edgellm.core import graph_io
from edgellm.device_runtime.runners import runner, slot_kv_cache


def available():
    import onnxruntime

    return onnxruntime.__version__


def open_engine(folder, engine):
    return {
        role: Runner(folder / graphs[-1].path, engine.cache_of(role), engine.max_kv_cache_capacity)
        for role, graphs in engine.graphs.items()
    }


class Cache:
    def __init__(self, kv, capacity):
        self.rows = {}
        for layer in range(kv.num_layers):
            for part in ("key", "value"):
                shape = 1, kv.num_kv_heads, capacity, kv.head_dim
                self.rows[layer, part] = np.zeros(shape, kv.dtype)

    def compact(self, slot, length, rows):
        for array in self.rows.values():
            array[:, :, length : length + len(rows)] = array[:, :, length + rows]

    def read(self, slot, length):
        return np.stack([array[:, :, :length] for array in self.rows.values()])

    def write(self, slot, values):
        for array, own in zip(self.rows.values(), values):
            array[:, :, : own.shape[-2]] = own


class Runner(runner.Runner):
    def __init__(self, path, kv, capacity):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.cache = Cache(kv, capacity)
        self.kv_pool = slot_kv_cache.SlotPool(self.cache, 1, capacity)
        self.session = onnxruntime.InferenceSession(path, options)

    def run(self, inputs):
        rows = inputs[graph_io.INPUT_IDS].shape[1]
        causal = {graph_io.TREE_MASK: np.tri(rows, dtype=bool)}
        own = {graph_io.past_name(*at): array for at, array in self.cache.rows.items()}
        names = [output.name for output in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(names, {**causal, **inputs, **own})))
        for at in self.cache.rows:
            self.cache.rows[at] = found.pop(graph_io.present_name(*at)).copy()
        return found
'''
PROMPT = "w20 w30 w40 w50 w60 w70"


@pytest.fixture
def engine(tmp_path, tiny_bundle, monkeypatch, capsys):
    """An engine built by the command with the new backend."""
    with (
        added(edgellm.build, tmp_path / "build", copying__init__=BUILD),
        added(runners, tmp_path / "runners", copying__init__=RUN),
    ):
        flags = "--backend", "copying", "--maxInputLen", 32, "--maxKVCacheCapacity", 48
        folders = "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "engine"
        _run(build_cli, monkeypatch, "llm_build", *folders, *flags, "--maxVerifyTreeSize", 8)
        assert "engine: copying 1." in capsys.readouterr().out
        yield tmp_path / "engine"


def _run(command, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0


def test_two_packages_make_a_backend(engine, tiny_engine, tmp_path, monkeypatch):
    greedy = SamplingParams(temperature=0)
    for spec in (None, SpecOptions(network=None, lookups=("suffix",), tree="fixed")):
        answers = [
            LLM(folder, spec=how).generate(PROMPT, sampling=greedy, max_generate_length=20)
            for folder, how in ((engine, spec), (tiny_engine, None))
        ]
        for answer in answers:
            list(answer)
        found, expected = (answer.token_ids for answer in answers)
        assert found == expected
        assert bool(answers[0].profile.rounds) == (spec is not None)
    request, output = tmp_path / "input.json", tmp_path / "output.json"
    messages = [{"role": "user", "content": PROMPT}]
    request.write_text(json.dumps({"requests": [{"messages": messages}], "temperature": 0}))
    files = "--inputFile", request, "--outputFile", output
    _run(inference_cli, monkeypatch, "llm_inference", "--engineDir", engine, *files)
    assert json.loads(output.read_text())["responses"][0]["generated_token_count"] > 0


@pytest.mark.usefixtures("engine")
def test_flags_of_other_backends_are_rejected(tmp_path, tiny_bundle, monkeypatch, capsys):
    folders = "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "other"
    more = "--backend", "copying", "--kernels", "edgellm"
    monkeypatch.setattr(sys, "argv", list(map(str, ("llm_build", *folders, *more))))
    with pytest.raises(SystemExit):
        build_cli.main()
    error = capsys.readouterr().err
    assert "--kernels is not for Copying" in error
    assert "it goes with --backend onnxruntime" in error


def test_a_backend_without_packages_is_unknown():
    with pytest.raises(EdgeLLMError, match="unknown backend 'copying'"):
        runners.resolve("copying")
