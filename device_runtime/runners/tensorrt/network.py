"""What a round asks of the runners of a base and of its draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edgellm.device_runtime.runners import Outputs
from edgellm.device_runtime.runners.tensorrt.bound_pass import PlacedPass
from edgellm.device_runtime.runners.tensorrt.device import TensorInfo
from edgellm.device_runtime.runners.tensorrt.shapes import Sizes


class Network(Protocol):
    """`TensorRtRunner`, for passes over what lies on the device already."""

    def expire(self) -> None:
        """A pass begins, which overwrites what the one before gave."""
        ...

    def settled(self) -> None:
        """Somebody waited for the device."""
        ...

    def tensor(self, name: str) -> TensorInfo:
        """Of the engine."""
        ...

    def kept_address(self, name: str) -> int:
        """Where the latest pass left an output that stays on the device."""
        ...

    def pick_addresses(self) -> Mapping[str, int]:
        """Where the latest pass with a single row of picks left them."""
        ...

    def place(
        self, sizes: Sizes, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> PlacedPass:
        """A pass over what lies on the device, without images; see `PassRunner.place`."""
        ...

    def placed_outputs(self, sizes: Sizes, addresses: Mapping[str, int]) -> Outputs:
        """Those of a placed pass, which was the latest; with addresses of its own outputs."""
        ...
