"""Energy counters on simulated machines; the layouts are those of Linux' and NVIDIA's documents."""

from __future__ import annotations

import json
import re
import time

import pytest
from conftest import assert_one_line_error
from numpy_llama import write_llama
from prometheus_client.parser import text_string_to_metric_families

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools import energy
from edgellm.tools.bench import measure
from edgellm.tools.energy import Energy, Meter, clocks, find_sensors
from edgellm.tools.serve.engines.metrics import Registry

RANGE = 262143328850
RAPL = "sys/class/powercap/intel-rapl"
X86 = {
    "sys/class/powercap/intel-rapl/enabled": "1",
    **{f"{RAPL}:{n}/name": f"package-{n}" for n in (0, 1)},
    **{f"{RAPL}:{n}/energy_uj": "5000000" for n in (0, 1)},
    **{f"{RAPL}:{n}/max_energy_range_uj": f"{RANGE}" for n in (0, 1)},
    f"{RAPL}:0:0/name": "core",
    f"{RAPL}:0:0/energy_uj": "1",
    f"{RAPL}:0:1/name": "dram",
    f"{RAPL}:0:1/energy_uj": "1000000",
    f"{RAPL}:0:1/max_energy_range_uj": "65712999613",
    f"{RAPL}:2/name": "psys",
    f"{RAPL}:2/energy_uj": "9",
    "sys/class/powercap/intel-rapl-mmio:0/name": "package-0",  # the first package once more
    "sys/class/powercap/intel-rapl-mmio:0/energy_uj": "5000000",
}


def _ina3221(number: int, *rails: tuple[str, int, int]) -> dict[str, str]:
    """Label, millivolts and milliamperes of each channel."""
    folder = f"sys/class/hwmon/hwmon{number}"
    files = {f"{folder}/name": "ina3221", f"{folder}/in7_label": "Sum of shunt voltages"}
    for channel, (label, millivolts, milliamperes) in enumerate(rails, 1):
        files[f"{folder}/in{channel}_label"] = label
        files[f"{folder}/in{channel}_input"] = str(millivolts)
        files[f"{folder}/curr{channel}_input"] = str(milliamperes)
    return files


ORIN_NX = _ina3221(1, ("VDD_IN", 5000, 1200), ("VDD_CPU_GPU_CV", 5000, 400), ("VDD_SOC", 5000, 300))
AGX_ORIN = {
    **_ina3221(
        3, ("VDD_GPU_SOC", 20000, 100), ("VDD_CPU_CV", 20000, 200), ("VIN_SYS_5V0", 5000, 800)
    ),
    **_ina3221(4, ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 100), ("NC", 0, 0)),
}
THOR = {
    **_ina3221(
        5, ("VDD_GPU", 20000, 500), ("VDD_CPU_SOC_MSS", 20000, 200), ("VIN_SYS_5V0", 5000, 900)
    ),
    "sys/class/hwmon/hwmon6/name": "ina238",
    "sys/class/hwmon/hwmon6/power1_input": "25500000",  # microwatts
    "sys/class/hwmon/hwmon6/in1_input": "20000",
}
_IIO = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
NANO = {  # JetPack 4
    f"{_IIO}/rail_name_0": "POM_5V_IN",
    f"{_IIO}/in_power0_input": "3100",
    f"{_IIO}/rail_name_1": "POM_5V_GPU",
    f"{_IIO}/in_power1_input": "700",
}
OTHERS = {"sys/class/hwmon/hwmon0/name": "nvme", "sys/class/hwmon/hwmon0/in1_label": "x"}


@pytest.fixture
def root(tmp_path):
    def make(files: dict[str, str]):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return tmp_path

    return make


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set."""
    now = [100.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: now[0])
    return now


def test_packages_and_their_memory_are_added_up(root):
    folder = root(X86)
    meter = Meter(find_sensors(folder))
    assert meter.names == ("package-0", "package-0 dram", "package-1")
    root({f"{RAPL}:0/energy_uj": "8000000", f"{RAPL}:0:1/energy_uj": "1500000"})
    meter.read()
    assert meter.total.joules == pytest.approx(3.5)


def test_a_counter_that_starts_again_counts_on(root):
    folder = root({**X86, f"{RAPL}:1/energy_uj": str(RANGE - 1000000)})
    meter = Meter(find_sensors(folder))
    for value in (RANGE - 500000, 2000000, 2000000, 2500000):
        root({f"{RAPL}:1/energy_uj": str(value)})
        meter.read()
    assert meter.total.joules == pytest.approx(0.5 + 2.5 + 0.5)


@pytest.mark.parametrize(
    ("files", "names", "watts"),
    [
        (ORIN_NX, ("VDD_IN",), 6.0),
        (AGX_ORIN, ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), 2.0 + 4.0 + 4.0),
        (THOR, ("VIN",), 25.5),
        (NANO, ("POM_5V_IN",), 3.1),
    ],
    ids=["orin_nx", "agx_orin", "thor", "nano"],
)
def test_rails_of_jetson_boards(root, clock, files, names, watts):
    """The rail of the whole board, else those that hold no other."""
    meter = Meter(find_sensors(root({**OTHERS, **files})))
    assert meter.names == names
    clock[0] += 2.0
    meter.read()
    assert meter.total.joules == pytest.approx(2 * watts)
    assert meter.total.average_watts == meter.total.peak_watts == pytest.approx(watts)


def test_power_is_integrated_by_trapezoids_and_peaks_are_kept(root, clock):
    folder, need = root(ORIN_NX), Energy()
    meter = Meter(find_sensors(folder))
    with meter.window(need):
        for milliamperes in (2000, 1000):
            root({"sys/class/hwmon/hwmon1/curr1_input": str(milliamperes)})
            clock[0] += 1.0
            meter.read()
    clock[0] += 5.0
    meter.read()  # outside of the window
    assert (need.joules, need.seconds) == pytest.approx(((6 + 10) / 2 + (10 + 5) / 2, 2.0))
    assert need.peak_watts == pytest.approx(8.0)
    assert meter.total.seconds == pytest.approx(7.0)


def test_an_idle_rail_below_zero_is_zero(root, clock):
    meter = Meter(find_sensors(root({**_ina3221(1, ("VDD_IN", 5000, -80))})))
    clock[0] += 1.0
    meter.read()
    assert meter.total.joules == 0


def test_the_thread_reads_by_itself(root):
    folder, need = (
        root({**ORIN_NX, "sys/class/devfreq/17000000.gpu/cur_freq": "612000000"}),
        Energy(),
    )
    with Meter(find_sensors(folder), folder) as meter, meter.window(need):
        deadline = time.monotonic() + 20
        while not meter.clocks and time.monotonic() < deadline:
            time.sleep(0.01)
    assert meter.clocks == {"GPU clock under load": "612 MHz"}
    assert need.average_watts == pytest.approx(6.0, rel=1e-3)


def test_clocks_of_cores_that_differ(root):
    cpu = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq"
    folder = root({cpu.format(0): "1510400", cpu.format(10): "2201600"})
    assert clocks(folder) == {"CPU clock under load": "1510 to 2202 MHz"}


def test_no_counter_and_no_permission_are_one_line(root, monkeypatch):
    with pytest.raises(EdgeLLMError, match="no energy counter") as missing:
        find_sensors(root(OTHERS))
    assert "leave out --energy" in missing.value.hint
    folder, read = root(X86), energy._number

    def refuse(path):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(energy, "_number", refuse)  # root reads everything
    with pytest.raises(EdgeLLMError, match="may not be read") as forbidden:
        find_sensors(folder)
    assert re.search(r"sudo chmod a\+r \S+/intel-rapl:0/energy_uj", forbidden.value.hint)


def test_the_servers_page_shows_joules_and_watts(root, clock):
    folder, registry = root(ORIN_NX), Registry()
    meter = Meter(find_sensors(folder))
    registry.show_energy(meter)
    clock[0] += 3.0
    families = text_string_to_metric_families(registry.page().decode())
    found = {sample.name: sample.value for each in families for sample in each.samples}
    assert found["edgellm:energy_joules_total"] == pytest.approx(18.0)
    assert found["edgellm:power_watts"] == pytest.approx(6.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("energy")
    checkpoint = open_checkpoint(str(write_llama(folder / "checkpoint")))
    export_llm(checkpoint, folder / "bundle", ExportOptions(dtype="fp32"))
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1)
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)
    return folder / "engine"


def test_the_benchmark_prints_energy_beside_speed(engine, root, command_here, monkeypatch):
    monkeypatch.setattr(energy, "find_sensors", lambda: find_sensors(root(ORIN_NX)))
    flags = ("--engineDir", engine, "--prompt", 16, "--generate", 16, "--repetitions", 2)
    result = command_here("edgellm-bench", *flags, "--energy", "--output", "json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["machine"]["energy of"] == "VDD_IN"
    for series in content["series"]:  # a board of 6 W; the window holds what the clock measures
        assert series["average_watts"] == pytest.approx(6.0, rel=1e-2)
        assert series["joules_per_token"] * series["mean_tokens_per_s"] > 5.9
    shown = command_here("edgellm-bench", *flags, "--energy").stdout
    assert "joules a token" in shown
    plain = command_here("edgellm-bench", *flags, "--output", "json").stdout
    assert "joules" not in plain


def test_energy_of_decoding_leaves_the_prefill_out(engine):
    windows, steps = [], []

    class Window:
        def __init__(self, into):
            self.into = into

        def __enter__(self):
            windows.append((self.into, len(steps)))

        def __exit__(self, *_):
            windows.append((self.into, len(steps)))

    with LLM(engine) as llm:
        run_batch = llm.base.run_batch
        llm.base.run_batch = lambda parts: steps.append(1) or run_batch(parts)
        need = Energy()
        measure.decode_rate(llm, 8, 4, need, Window)
    assert [count for into, count in windows if into is need] == [1, 5]


def test_a_machine_without_counters_gets_one_line(engine, command):
    if any((energy.ROOT / "sys/class/powercap").glob("intel-rapl:*")):
        pytest.skip("this machine has counters")
    result = command("edgellm-bench", "--engineDir", engine, "--energy")
    assert_one_line_error(result, "no energy counter", "leave out --energy")
    result = command("edgellm-serve", "--engineDir", engine, "--energy", "--port", 0)
    assert_one_line_error(result, "no energy counter", "leave out --energy")
