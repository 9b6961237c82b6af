"""Memory of a build, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from harness.models.random_weights import SHAPES, write
from harness.timing import Cost, folder_bytes, module_command, run_process

from edgellm.build.plan import Plan
from edgellm.build.tensorrt import builder
from edgellm.build.tensorrt.memory_trim import MappedFile, memory_returned
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

SMALL = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16,
         "num_hidden_layers": 5, "vocab_size": 512, "eos_token_id": 1}  # fmt: skip
MEGABYTE = 1 << 20


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"Rss{kind}"))


def _reaches(kind: str, maximum: int) -> bool:
    """Whether a kind of memory falls to this size after a while."""
    deadline = time.monotonic() + 20
    while _resident(kind) > maximum and time.monotonic() < deadline:
        time.sleep(0.05)
    return _resident(kind) <= maximum


def test_mapped_pages_are_dropped_after_reading(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(range(256)) * (64 * MEGABYTE // 256))
    weights = MappedFile(tmp_path / "weights")
    content = (ctypes.c_ubyte * (64 * MEGABYTE)).from_address(weights.address)
    array = np.frombuffer(content, np.uint8)
    before = _resident("File")
    total = int(array.sum(dtype=np.int64))
    assert _resident("File") > before + 60 * MEGABYTE
    with memory_returned(weights):
        assert _reaches("File", before + 8 * MEGABYTE)
        assert int(array.sum(dtype=np.int64)) == total  # they come back when they are read
    del array, content


def test_malloc_returns_free_memory():
    before = _resident("Anon")
    blocks = [np.ones(2000, np.uint8) for _ in range(40_000)]
    kept = blocks[::500]  # keeps the heap from shrinking
    del blocks
    gc.collect()
    if _resident("Anon") < before + 40 * MEGABYTE:
        pytest.skip("this malloc gives memory back by itself")
    with memory_returned():
        assert _reaches("Anon", before + 24 * MEGABYTE)
    assert len(kept) == 80


class Parser:
    """TensorRT's parser as it takes weights: their addresses, which are read later."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[int, int]] = {}

    def load_model_proto(self, model: bytes, path: str) -> bool:
        self.size = len(model)
        return Path(path).stat().st_size == len(model)

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        assert name not in self.weights
        self.weights[name] = (address, size)
        return True

    def parse_model_proto(self) -> bool:
        return True


def _mapping(address: int) -> str:
    """The file of a mapping of this process; "" for memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, end = (int(each, 16) for each in fields[0].split("-"))
        if first <= address < end:
            return fields[5] if len(fields) > 5 else ""
    return ""


def test_weights_are_passed_once_and_stay_in_their_file(tmp_path):
    """A parser that takes addresses, as from TensorRT 10.13 on."""
    arrays = [np.arange(at, at + 5000, dtype=np.float32) for at in range(3)]
    stored = [ir.tensor(array, name=f"w{at}") for at, array in enumerate(arrays)]
    values = [ir.Value(name=each.name, const_value=each) for each in stored]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 21})
    path = tmp_path / "graph.onnx"
    ir.save(ir.Model(graph, ir_version=11), path, external_data="weights", size_threshold_bytes=0)
    model, parser = ir.load(path), Parser()
    weights = builder._map_weights(model)
    target = SimpleNamespace(library=SimpleNamespace(label="TensorRT"))
    builder._parse(parser, path, model, weights, target, None)  # type: ignore[arg-type]
    assert parser.size < 2000  # the graph alone
    for at, array in enumerate(arrays):
        address, size = parser.weights[f"w{at}"]
        assert ctypes.string_at(address, size) == array.tobytes()
        assert _mapping(address) == str(tmp_path / "weights")
    assert len(parser.weights) == 3


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> tuple[Path, Cost]:
    pytest.importorskip("tensorrt_rtx", reason="engines are compiled with tensorrt_rtx")
    folder = tmp_path_factory.mktemp("memory")
    write({**SHAPES["qwen2.5-0.5b"], **SMALL}, folder / "checkpoint", "BF16")
    source, bundle = open_checkpoint(str(folder / "checkpoint"), tokenizer=False), folder / "bundle"
    export_llm(source, bundle, ExportOptions(dtype="fp16"))
    flags = "--onnxDir", bundle, "--engineDir", folder / "engine", "--backend", "tensorrt"
    return bundle, run_process(*module_command("edgellm.build.cli", *flags, "--gpu", "12.0"))


def test_a_build_holds_one_copy_of_the_weights(watched):
    """Beyond the weights, memory is the same for all models: libraries, interpreter, buffers.

    Only the benchmark measures resident memory: the eviction of mapped pages depends on other
    processes.
    """
    bundle, peak = watched
    weights_bytes = folder_bytes(bundle)
    assert 230e6 < weights_bytes < 300e6
    assert peak.anonymous_bytes < weights_bytes + 350e6


def test_the_prediction_covers_the_build(watched):
    from edgellm.build.artifact_kinds import read_bundle
    from edgellm.build.backends import find

    bundle, peak = watched
    plan = Plan(
        max_input_len=1024,
        kv_capacity=4096,
        threads=0,
        prefill="auto",
        options=TensorRtOptions(target_sm="12.0"),
    )
    predicted = find("tensorrt").estimate(bundle, read_bundle("llm", bundle, plan), plan)
    assert peak.anonymous_bytes < predicted.peak_build_bytes < 1.25 * peak.anonymous_bytes
