"""`make arm`: what counts as a difference, and what it says where it cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

sys.path.append(str(Path(__file__).parent))
import device_on_arm
import userland


@pytest.fixture
def outputs(tmp_path):
    """Bundles and equal outputs of two machines; a function that writes those of one."""
    engines = [{"engine": "int4", "is_exact": True}, {"engine": "fp32", "is_exact": False}]
    (tmp_path / "engines.json").write_text(json.dumps(engines))

    def write(
        machine: str,
        *,
        error: float = 0.0,
        shared: float = 0.0,
        text: str = "w1",
        names=("int4", "fp32"),
    ):
        folder = tmp_path / machine
        folder.mkdir(exist_ok=True)
        for name in names:
            np.save(folder / f"{name}.npy", np.float32([[1, 1 + error]]))
            np.save(folder / f"{name}_shared.npy", np.float32([[1, 1 + shared]]))
        (folder / "served.json").write_text(json.dumps([text]))

    write("here")
    write("there")
    return write


def found(tmp_path: Path) -> list[str]:
    return device_on_arm.compare(tmp_path, tmp_path / "here", tmp_path / "there")


def test_equal_outputs_have_no_faults(outputs, tmp_path):
    outputs("there")
    assert not found(tmp_path)


def test_bits_of_kernels_and_float_sums(outputs, tmp_path):
    outputs("there", error=1e-6)
    assert not found(tmp_path)
    outputs("there", shared=1e-6)
    assert found(tmp_path) == ["int4: bits differ on equal tables"]
    outputs("there", error=1e-3)
    assert found(tmp_path) == ["fp32: logits differ by 1.0e-03"]
    outputs("there", error=1.0)
    assert found(tmp_path) == [f"{name}: logits differ by 1.0e+00" for name in ("int4", "fp32")]
    outputs("there", error=float("nan"))
    assert len(found(tmp_path)) == 2


def test_differing_weights_have_names(tmp_path):
    weights = {"Cos": [1.0, 2.0], "packed": [3.0]}
    for machine, changes in (("here", {}), ("there", {"Cos": [1.0, 2.5], "more": [1.0]})):
        (tmp_path / machine).mkdir()
        made = [
            numpy_helper.from_array(np.float32(values), name)
            for name, values in (weights | changes).items()
        ]
        graph = helper.make_graph([], "decode", [], [], made)
        path = tmp_path / machine / "decode.onnx"
        options = {"save_as_external_data": True, "location": "decode.data", "size_threshold": 0}
        onnx.save(helper.make_model(graph), path, **options)
    differ = device_on_arm.differing_weights(tmp_path / "here", tmp_path / "there")
    assert differ == {"Cos", "more"}


def test_texts_are_equal(outputs, tmp_path):
    outputs("there", text="w2")
    assert found(tmp_path) == ['served: ["w2"] is not ["w1"]']


def test_missing_programs_have_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(userland, "CACHE", tmp_path)
    monkeypatch.setattr(userland, "_IS_ARM", False)
    with pytest.raises(userland.UserlandError, match="apt-get install mmdebstrap, or give --root"):
        userland.open_userland(None, {})
    with pytest.raises(userland.UserlandError, match="apt-get install qemu-user-static"):
        userland.open_userland(tmp_path, {})
