"""Readings of a board, and the speed of random models, as far as no GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from harness.gpu import readings, shape_speed
from harness.models.random_weights import SHAPES, int4_tensors, num_bytes, write_int4

from edgellm.core.errors import EdgeLLMError, LimitError
from edgellm.tools.energy import Energy


class Nvml:
    """The functions of nvml.h, of a card that draws 30.5 W; `lacking` ones are unsupported."""

    def __init__(self, *lacking: str) -> None:
        self._lacking = lacking

    def __getattr__(self, name):
        values = {
            "nvmlInit_v2": (),
            "nvmlDeviceGetHandleByIndex_v2": (),
            "nvmlDeviceGetPowerUsage": {(): 30500},  # milliwatts
            "nvmlDeviceGetTemperature": {(0,): 61},
            "nvmlDeviceGetClockInfo": {(1,): 1980, (2,): 2619},
        }[name]

        def call(*arguments):
            if values:
                arguments[-1]._obj.value = values[arguments[1:-1]]
            return 3 if name in self._lacking else 0  # NVML_ERROR_NOT_SUPPORTED

        return call


@pytest.fixture
def board(tmp_path):
    """A Jetson with two thermal zones, of which one is off, and a power rail."""
    files = {
        "class/thermal/thermal_zone0/type": "gpu-thermal\n",
        "class/thermal/thermal_zone0/temp": "48500\n",
        "class/thermal/thermal_zone1/type": "cv0-thermal\n",
        "class/hwmon/hwmon1/name": "ina3221\n",
        "class/hwmon/hwmon1/in1_label": "VDD_IN\n",
        "class/hwmon/hwmon1/in1_input": "5000\n",
        "class/hwmon/hwmon1/curr1_input": "1200\n",
        "class/devfreq/17000000.gpu/cur_freq": "918000000\n",
    }
    for name, text in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_board_shows_its_rail_clock_and_temperature(board, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)

    energy = Energy()
    with readings.Watch(board) as watch:
        with watch.window(energy):
            watch._stop.wait(0.06)
        watch._stop.wait(0.06)
    assert energy.average_watts == pytest.approx(6.0)
    assert watch.figures() == {
        "gpu-thermal, °C": "48",
        "GPU clock under load": "918 MHz",
        "energy of": "VDD_IN",
    }


def test_a_card_shows_what_nvml_does(monkeypatch, tmp_path):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Nvml())
    card = readings.Card()
    assert (card.watts(), card.temperature(), card.clock_mhz()) == (30.5, 61, 1980)
    with readings.Watch(tmp_path) as watch:
        watch._stop.wait(0.06)
    assert watch.figures() == {
        "GPU clock, MHz": "1980",
        "GPU, °C": "61",
        "memory clock, MHz": "2619",
        "energy of": "NVML",
    }


def test_a_machine_without_sensors_says_so(monkeypatch, tmp_path):
    """Integrated GPUs have NVML without power; then the board's rails count, which are missing."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Nvml("nvmlDeviceGetPowerUsage"))
    watch, energy = readings.Watch(tmp_path), Energy()
    with watch, watch.window(energy):
        pass
    assert energy.seconds == 0
    assert "no energy counter" in watch.figures()["energy of"]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Nvml("nvmlInit_v2"))
    with pytest.raises(EdgeLLMError, match="NVML fails") as caught:
        readings.Card()
    assert caught.value.hint


def test_int4_checkpoints_have_their_predicted_size(tmp_path):
    config = {**SHAPES["small"], "vocab_size": 512}
    folder = write_int4(config, tmp_path / "new")
    size = num_bytes(int4_tensors(config))
    assert size < (folder / "model.safetensors").stat().st_size < size + 8192


@pytest.mark.parametrize(("free", "why"), [(1e9, "of disk, 1.0 are free"), (1e12, "of memory")])
def test_a_shape_that_does_not_fit_is_skipped(monkeypatch, free, why):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(shape_speed, "available_memory_bytes", lambda: 1e9)
    monkeypatch.setattr(shape_speed, "measured_bandwidths", lambda: {"copy": 1.0})
    passed, found = shape_speed.measure_speed("8b", "tensorrt", dry=False)
    assert passed
    assert why in found["skipped"]


def test_speed_is_judged_by_the_bandwidth(monkeypatch):
    monkeypatch.setattr(shape_speed, "_lack_of_space", lambda *_: "")
    monkeypatch.setattr(shape_speed, "measured_bandwidths", lambda: {"copy": 100.0, "bus": 50.0})
    monkeypatch.setattr(shape_speed, "_make", lambda *_: ("engine", 1e9))
    monkeypatch.setattr(shape_speed, "LLM", lambda _: nullcontext())
    for rate, passes in ((60.0, True), (45.0, False)):
        monkeypatch.setattr(shape_speed, "_measure", lambda *_, r=rate: {"decoding, tokens/s": r})
        passed, found = shape_speed.measure_speed("1b", "tensorrt", dry=False)
        assert passed == passes
        (row,) = found["outputs"].values()
        assert row["expected"] == [10.0]
        assert row["error"] == pytest.approx(100 / rate - 1)
        assert found["figures"]["share of the bandwidth"] == pytest.approx(rate / 100)

    def too_large(*_):
        raise LimitError("the build needs about 30 GB of memory")

    monkeypatch.setattr(shape_speed, "_make", too_large)
    found = shape_speed.measure_speed("1b", "tensorrt", dry=False)
    assert found == (True, {"skipped": "the build needs about 30 GB of memory"})
