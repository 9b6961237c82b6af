"""Power, clocks and temperature of a board or card while it computes."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.energy import Energy, Meter, Sensor, Wattmeter, clocks, find_sensors

ROOT = Path("/")
_SAMPLE_S = 0.2
_ZONES = "sys/class/thermal"
_GPU_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE = 1, 2, 0  # NVML_CLOCK_SM, _MEM, NVML_TEMPERATURE_GPU


class Card:
    """The first GPU as NVML shows it (nvml.h); functions give None if it does not."""

    def __init__(self) -> None:
        """Open the library.

        Raises:
            EdgeLLMError: there is none, or no such GPU.
        """
        self._device = ctypes.c_void_p()
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
            statuses = (
                self._library.nvmlInit_v2(),
                self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)),
            )
        except (OSError, AttributeError) as error:
            raise EdgeLLMError(f"NVML is missing: {error}", hint="it comes with drivers") from None
        if any(statuses):
            raise EdgeLLMError(f"NVML fails: {statuses}", hint="see that nvidia-smi works")

    def watts(self) -> float | None:
        """Power of the whole card."""
        found = self._number("nvmlDeviceGetPowerUsage")
        return None if found is None else found / 1e3

    def temperature(self) -> int | None:
        """Degrees Celsius of the GPU."""
        return self._number("nvmlDeviceGetTemperature", _GPU_TEMPERATURE)

    def clock_mhz(self, kind: int = _GPU_CLOCK) -> int | None:
        """Clock of the GPU or its memory."""
        return self._number("nvmlDeviceGetClockInfo", kind)

    def _number(self, function: str, *arguments: int) -> int | None:
        value, call = ctypes.c_uint(), getattr(self._library, function, None)
        if call is None or call(self._device, *arguments, ctypes.byref(value)):
            return None
        return value.value


class Watch:
    """Samples the machine in a thread; use it as a context.

    Attributes:
        meter: of energy; None: the machine has no sensor.
        lacks: why it has none; "": it has.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.meter: Meter | None = None
        self._root, self._card, self.lacks = root, None, ""
        with contextlib.suppress(EdgeLLMError):
            self._card = Card()
        try:
            self.meter = Meter(self._sensors(), root)
        except EdgeLLMError as error:
            self.lacks = str(error)
        self._ranges: dict[str, tuple[float, float]] = {}
        self._clocks: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="readings", daemon=True)

    def _sensors(self) -> list[Sensor]:
        """The card's if it measures power, else the board's."""
        card = self._card
        if card is None or card.watts() is None:
            return find_sensors(self._root)
        return [Wattmeter(name="NVML", watts=lambda: card.watts() or 0.0)]

    def __enter__(self) -> Watch:
        """Start the threads."""
        if self.meter is not None:
            self.meter.start()
        self._thread.start()
        return self

    def __exit__(self, *arguments: object) -> None:
        """Stop them."""
        self._stop.set()
        self._thread.join()
        if self.meter is not None:
            self.meter.__exit__(*arguments)

    def window(self, into: Energy) -> contextlib.AbstractContextManager[None]:
        """Add what the block needs to `into`; nothing without a sensor."""
        return contextlib.nullcontext() if self.meter is None else self.meter.window(into)

    def figures(self) -> dict[str, Any]:
        """Ranges of temperatures and clocks so far, and what measures energy."""
        found: dict[str, Any] = {
            name: f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
            for name, (low, high) in sorted(self._ranges.items())
        }
        found |= self._clocks
        found["energy of"] = " + ".join(self.meter.names) if self.meter else self.lacks
        return found

    def _sample(self) -> None:
        while True:
            for name, value in self._values():
                low, high = self._ranges.get(name, (value, value))
                self._ranges[name] = min(low, value), max(high, value)
            self._clocks |= clocks(self._root)
            if self._stop.wait(_SAMPLE_S):
                return

    def _values(self) -> Iterator[tuple[str, float]]:
        """Degrees and megahertz by name."""
        for zone in sorted((self._root / _ZONES).glob("thermal_zone*")):
            with contextlib.suppress(OSError, ValueError):  # a zone that is off cannot be read
                name = (zone / "type").read_text("utf-8").strip()
                yield f"{name}, °C", int((zone / "temp").read_text("ascii")) / 1e3
        if self._card is not None:
            of_card = {
                "GPU, °C": self._card.temperature(),
                "GPU clock, MHz": self._card.clock_mhz(),
                "memory clock, MHz": self._card.clock_mhz(_MEMORY_CLOCK),
            }
            yield from ((name, value) for name, value in of_card.items() if value is not None)
