"""An engine's weights are mapped from their file."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kernel_calls import product, quantized_case
from kernel_sessions import F32, open_session
from onnx import helper

from edgellm.core.resources import forget
from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets
from edgellm.device_runtime.runners import onnxruntime_graphs as graphs


def mappings(file: Path) -> list[str]:
    """Linux's flags of each."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    return [part.split("VmFlags:")[1] for part in parts if str(file) in part]


def _has_large_pages() -> bool:
    """Whether a mapped file keeps the advice; emulators drop it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    with Path(__file__).open("rb") as stream:
        area = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with area, contextlib.suppress(OSError):
        if advice is not None:
            area.madvise(advice)
        return any("hg" in flags.split() for flags in mappings(Path(__file__)))
    return False


def _reads_without_waiting(file: Path) -> bool:
    """Whether there are such reads; emulators lack them."""
    try:
        with file.open("rb") as stream:
            os.preadv(stream.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except (AttributeError, OSError):
        return False
    return True


HAS_LARGE_PAGES = _has_large_pages()
HAS_LENDING = graphs._version() >= graphs._BORROWS


@pytest.fixture
def case():
    return quantized_case(np.random.default_rng(1), "int8", 64, 64, 32)


@pytest.fixture
def path(case, tmp_path):
    node = helper.make_node("QuantLinear", ("x", "w"), ("y",), domain=DOMAIN)
    file = tmp_path / "m.onnx"
    open_session(node, [("x", F32, None)], [("y", F32, None)], [("w", case.packed)], path=file)
    return file


@pytest.mark.skipif(not HAS_LARGE_PAGES, reason="this system has no large pages")
@pytest.mark.skipif(not HAS_LENDING, reason="before 1.31 ONNX Runtime maps them itself")
def test_weights_are_mapped_once_for_the_sessions_lifetime(case, path):
    session = graphs.load_graph(path, graphs.GraphOptions(optimize=False, own_kernels=True))
    (flags,) = mappings(path.with_suffix(".data"))
    assert "hg" in flags.split()
    x = np.random.default_rng(2).standard_normal((1, 3, 64), np.float32)
    expected = product(instruction_sets()[0], case, x[0])
    assert session.run(None, {"x": x})[0].tobytes() == expected.tobytes()
    del session
    assert not mappings(path.with_suffix(".data"))


def test_weights_that_are_packed_in_the_file_are_not_packed_in_memory_again(tiny_engine):
    """ONNX Runtime would pack weights that it gets as external memory."""
    graph = tiny_engine / "decode.onnx"
    assert b"prepacked" in graph.read_bytes()
    session = graphs.load_graph(graph, graphs.GraphOptions(optimize=False, own_kernels=True))
    assert not any("hg" in flags.split() for flags in mappings(graph.with_suffix(".data")))
    del session


def test_an_older_runtime_maps_them_itself(case, path, monkeypatch):
    """It would copy external memory."""
    monkeypatch.setattr(graphs.ort, "__version__", "1.30.2")
    monkeypatch.setattr(graphs, "_lend", None)
    session = graphs.load_graph(path, graphs.GraphOptions(optimize=False, own_kernels=True))
    x = np.ones((1, 1, 64), np.float32)
    expected = product(instruction_sets()[0], case, x[0])
    assert session.run(None, {"x": x})[0].tobytes() == expected.tobytes()


@pytest.mark.skipif(not _reads_without_waiting(Path(__file__)), reason="no such reads here")
def test_evicted_file_is_read_from_disk_again(tmp_path):
    found = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, check=True)
    if found.stdout.strip() == b"tmpfs":
        pytest.skip("these files lie in memory alone")
    file, written = tmp_path / "weights", bytes(range(256)) * 4096
    file.write_bytes(written)
    read = bytearray(4096)
    with file.open("rb") as stream:
        assert os.preadv(stream.fileno(), [read], 0, os.RWF_NOWAIT) == len(read)
        forget(file)
        with pytest.raises(BlockingIOError):
            os.preadv(stream.fileno(), [read], 0, os.RWF_NOWAIT)
    assert file.read_bytes() == written
