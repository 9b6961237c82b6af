"""A disk that is full while ONNX Runtime writes what it made of a graph, whatever its words are."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edgellm.build.onnxruntime_cpu import optimize as optimizing
from edgellm.core import resources
from edgellm.core.errors import LimitError

WIDTH = 512
WEIGHTS = 4 * WIDTH * WIDTH  # bytes: 1 MiB
Small = Callable[[int], Path]


@pytest.fixture
def lowered(tmp_path) -> Path:
    """One product of float32 with its weights in a file of their own."""
    weight = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    shape = onnx.TensorProto.FLOAT, (None, WIDTH)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [onnx.helper.make_tensor_value_info("x", *shape)],
        [onnx.helper.make_tensor_value_info("y", *shape)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    opsets = [onnx.helper.make_opsetid("", 21)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path = tmp_path / "lowered.onnx"
    onnx.save(model, path, save_as_external_data=True, location="lowered.data")
    return path


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Small]:
    """Mount a file system of so many bytes."""
    place = tmp_path / "small"
    place.mkdir()

    def mount(num_bytes: int) -> Path:
        line = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
        try:
            subprocess.run(line, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no right to mount a small file system")
        return place

    yield mount
    subprocess.run(["umount", str(place)], check=False, capture_output=True)


def _optimized(lowered: Path, folder: Path) -> ort.InferenceSession:
    with resources.explain_full_disk(folder):
        return optimizing.optimize(lowered, folder / "saved.onnx", 1, prepacks=True)


def _fails_with(monkeypatch, message: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(optimizing.ort, "InferenceSession", fail)


def test_a_disk_with_room_for_two_copies_suffices(lowered, small_disk):
    """Weights as they were and as kernels read them: what is compared is not too much."""
    folder = small_disk(5 * WEIGHTS // 2)
    (y,) = _optimized(lowered, folder).run(None, {"x": np.ones((1, WIDTH), np.float32)})
    assert y.shape == (1, WIDTH)
    assert sum(path.stat().st_size for path in folder.iterdir()) >= 2 * WEIGHTS


def test_a_disk_that_is_too_small_is_reported_before_the_work(lowered, small_disk, monkeypatch):
    """The bytes are known before ONNX Runtime begins."""
    folder = small_disk(WEIGHTS // 2)
    _fails_with(monkeypatch, "is not asked")
    with pytest.raises(LimitError, match=rf"No space left on device in .*: {WEIGHTS} bytes"):
        _optimized(lowered, folder)


def test_a_disk_that_fills_while_weights_are_written_is_reported(lowered, small_disk):
    """It takes the weights, but not what is prepacked."""
    folder = small_disk(3 * WEIGHTS // 2)
    with pytest.raises(LimitError, match=r"No space left on device in .*: more than "):
        _optimized(lowered, folder)


def test_a_full_disk_is_recognised_by_any_error_text(lowered, small_disk, monkeypatch):
    folder = small_disk(3 * WEIGHTS // 2)
    _fails_with(monkeypatch, "basic_ios::clear: iostream error")
    with pytest.raises(LimitError, match="No space left on device"):
        _optimized(lowered, folder)


def test_other_errors_are_not_reported_as_a_full_disk(lowered, tmp_path, monkeypatch):
    """Where there is room."""
    _fails_with(monkeypatch, "basic_ios::clear: iostream error")
    with pytest.raises(RuntimeError, match="iostream"):
        _optimized(lowered, tmp_path)


def test_a_limit_of_file_sizes_is_reported(lowered, tmp_path, monkeypatch):
    """Free space says nothing of a limit or a quota: the system is asked for the bytes."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, "quota")

    _fails_with(monkeypatch, "basic_ios::clear: iostream error")
    monkeypatch.setattr(resources.os, "posix_fallocate", refuse)
    with pytest.raises(LimitError, match=f"{tmp_path}: more than"):
        _optimized(lowered, tmp_path)


def test_free_space_is_compared_without_posix_fallocate(lowered, small_disk, monkeypatch):
    """Not Linux: free space is compared."""
    folder = small_disk(3 * WEIGHTS // 2)
    monkeypatch.delattr(resources.os, "posix_fallocate")
    _fails_with(monkeypatch, "basic_ios::clear: iostream error")
    with pytest.raises(LimitError, match=f"{2 * WEIGHTS} bytes are needed"):
        _optimized(lowered, folder)
