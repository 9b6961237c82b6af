"""Energy from the machine's own counters: RAPL on x86, INA sensors on Jetson boards.

RAPL (Linux, Documentation/power/powercap) counts microjoules of each package and its DRAM. INA3221
and INA238 sensors (Linux, Documentation/hwmon; NVIDIA's Jetson Linux Developer Guide) measure the
watts of rails, which are integrated here. Standard library and `edgellm.core` only.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgellm.core.errors import EdgeLLMError

ROOT = Path("/")
_RAPL = "sys/class/powercap"
_SAMPLE_S = 0.05
_TOTALS = ("VIN", "VDD_IN", "POM_5V_IN")  # rails of the whole board or module
_WITHIN_OTHERS = ("VDDQ_VDD2_1V8AO",)  # of AGX Orin: VIN_SYS_5V0 feeds it
_CHIPS = ("ina3221", "ina238")


class Sensor(Protocol):
    """Counts the energy of a part of the machine."""

    name: str

    def joules(self, now: float) -> float:
        """Energy since the first call; `now` in seconds."""
        ...


@dataclass(slots=True, kw_only=True)
class Counter:
    """A RAPL zone, whose counter wraps around after `range_uj`."""

    name: str
    file: Path
    range_uj: int
    _last: int | None = None
    _total: int = 0

    def joules(self, now: float) -> float:  # noqa: ARG002 - of the protocol
        """Energy since the first call; a wrap-around counts once."""
        value = _number(self.file)
        last = value if self._last is None else self._last
        self._total += value - last if value >= last else value - last + self.range_uj
        self._last = value
        return self._total / 1e6


@dataclass(slots=True, kw_only=True)
class Wattmeter:
    """A power rail; its energy is the integral of the power over time."""

    name: str
    watts: Callable[[], float]
    _last: tuple[float, float] | None = None  # time, watts
    _total: float = 0.0

    def joules(self, now: float) -> float:
        """Energy since the first call, by trapezoids between the calls."""
        value = max(0.0, self.watts())  # an idle rail may read below zero
        if self._last is not None:
            before, other = self._last
            self._total += (now - before) * (value + other) / 2
        self._last = now, value
        return self._total


@dataclass(slots=True)
class Energy:
    """Energy, time and highest power of one or more windows."""

    joules: float = 0.0
    seconds: float = 0.0
    peak_watts: float = 0.0

    @property
    def average_watts(self) -> float:
        """Mean power; 0 without time."""
        return self.joules / self.seconds if self.seconds else 0.0

    def add(self, joules: float, seconds: float) -> None:
        """Add a span of time."""
        self.joules += joules
        self.seconds += seconds
        if seconds >= _SAMPLE_S / 2:  # shorter spans measure the counters' own steps
            self.peak_watts = max(self.peak_watts, joules / seconds)


def find_sensors(root: Path = ROOT) -> list[Sensor]:
    """The sensors whose sum is the machine's, or the processor's, energy.

    Args:
        root: of the file system; tests give another one.

    Raises:
        EdgeLLMError: there are none, or their files may not be read.
    """
    found: list[Sensor] = [*_rails(root)] or [*_rapl_zones(root)]
    if not found:
        raise EdgeLLMError(
            "this machine has no energy counter: neither RAPL in /sys/class/powercap nor an INA "
            "sensor in /sys/class/hwmon",
            hint="leave out --energy, or measure with a wattmeter; virtual machines have no RAPL",
        )
    try:
        for sensor in found:
            sensor.joules(time.monotonic())
    except PermissionError as error:
        raise EdgeLLMError(
            f"the energy counter {error.filename} may not be read",
            hint=f"allow it until the next start: sudo chmod a+r {error.filename}",
        ) from None
    except (OSError, ValueError) as error:
        raise EdgeLLMError(f"an energy counter cannot be read: {error}") from None
    return found


def _rapl_zones(root: Path) -> Iterator[Counter]:
    """Packages and their DRAM; cores and graphics are parts of packages, psys holds all."""
    for folder in sorted((root / _RAPL).glob("intel-rapl:*")):
        name = _text(folder / "name")
        if re.fullmatch(r"package-\d+(-die-\d+)?|dram", name):
            parent = f"{_text(folder.parent / folder.name.rpartition(':')[0] / 'name')} "
            label = f"{parent if name == 'dram' else ''}{name}"
            size = _text(folder / "max_energy_range_uj")
            yield Counter(
                name=label,
                file=folder / "energy_uj",
                range_uj=int(size) if size.isdigit() else 1 << 32,
            )


def _rails(root: Path) -> list[Wattmeter]:
    """The rail of the whole board if there is one, else all rails that hold no other."""
    rails = {each.name: each for each in (*_hwmon_rails(root), *_iio_rails(root))}
    for name in _TOTALS:
        if name in rails:
            return [rails[name]]
    return [each for name, each in rails.items() if name not in _WITHIN_OTHERS]


def _hwmon_rails(root: Path) -> Iterator[Wattmeter]:
    """Channels with a label and a current; the INA238 of Thor measures the board's input."""
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        chip = _text(folder / "name")
        if chip not in _CHIPS:
            continue
        if (folder / "power1_input").exists():
            name = _text(folder / "in1_label") or "VIN"
            yield Wattmeter(name=name, watts=_micro(folder / "power1_input"))
            continue
        for label in sorted(folder.glob("in[123]_label")):
            channel, name = label.name[2], _text(label)
            current = folder / f"curr{channel}_input"
            if name not in ("", "NC") and current.exists():
                watts = _product(folder / f"in{channel}_input", current)
                yield Wattmeter(name=name, watts=watts)


def _iio_rails(root: Path) -> Iterator[Wattmeter]:
    """Rails of JetPack 4's driver, in milliwatts."""
    places = (root / "sys/bus/i2c/drivers/ina3221x").glob("*/iio:device*/rail_name_*")
    for label in sorted(places):
        power = label.with_name(f"in_power{label.name[-1]}_input")
        if power.exists() and _text(label) not in ("", "NC"):
            yield Wattmeter(name=_text(label), watts=lambda power=power: _number(power) / 1e3)


def _micro(power: Path) -> Callable[[], float]:
    return lambda: _number(power) / 1e6


def _product(millivolts: Path, milliamperes: Path) -> Callable[[], float]:
    return lambda: _number(millivolts) * _number(milliamperes) / 1e6


class Meter:
    """Reads sensors in a thread of its own, and on request; use it as a context.

    Attributes:
        names: of the sensors that are added up.
        total: since the start.
    """

    def __init__(self, sensors: list[Sensor], root: Path = ROOT) -> None:
        self.names = tuple(each.name for each in sensors)
        self.total = Energy()
        self.clocks: dict[str, str] = {}  # at the newest sample of a window
        self._sensors, self._root = sensors, root
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._windows: list[Energy] = []
        self._time = time.monotonic()
        self._joules = self._sum(self._time)
        self._thread = threading.Thread(target=self._sample, name="energy", daemon=True)

    def start(self) -> Meter:
        """Start the thread, which ends with the process or the context."""
        self._thread.start()
        return self

    def __enter__(self) -> Meter:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def window(self, into: Energy) -> Iterator[None]:
        """Add what the block needs to `into`."""
        self.read()
        with self._lock:
            self._windows.append(into)
        try:
            yield
        finally:
            self.read()
            with self._lock:
                self._windows = [each for each in self._windows if each is not into]

    def read(self) -> None:
        """Read all sensors; a sensor that fails for a moment keeps its last value."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            now = time.monotonic()
            joules = self._sum(now)
            for each in (self.total, *self._windows):
                each.add(joules - self._joules, now - self._time)
            self._joules, self._time = joules, now

    def _sum(self, now: float) -> float:
        return sum(each.joules(now) for each in self._sensors)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.read()
            if self._windows:
                self.clocks = clocks(self._root)


def clocks(root: Path = ROOT) -> dict[str, str]:
    """Current clocks of processor and GPU, as far as the system shows them."""
    cpus = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    hertz = [int(text) * 1000 for text in map(_text, cpus) if text.isdigit()]
    gpus = (root / "sys/class/devfreq").glob("*gpu*/cur_freq")
    found = {
        "CPU clock under load": hertz,
        "GPU clock under load": [int(text) for text in map(_text, gpus) if text.isdigit()],
    }
    return {name: _range(values) for name, values in found.items() if values}


def _range(hertz: list[int]) -> str:
    low, high = (f"{value / 1e6:.0f}" for value in (min(hertz), max(hertz)))
    return f"{low} MHz" if low == high else f"{low} to {high} MHz"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.read_text("ascii"))
