"""What a round asks of the runners of a base and of its draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.tensorrt.bound_pass import PlacedPass
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import TensorInfo
from edgellm.device_runtime.runners.tensorrt.shapes import Sizes


class Network(Protocol):
    """`TensorRtRunner`, for passes over what lies on the device already.

    Attributes:
        num_sequences: of a pass; where more than one, a table says whose rows it has.
    """

    num_sequences: int

    @property
    def tree_rows(self) -> int:
        """Of a pass over trees, those of all sequences."""
        ...

    def first_row(self, cache: KVCache | None) -> int:
        """The row of the engine's cache that is a sequence's first, which writes there next."""
        ...

    def expire(self) -> None:
        """A pass begins, which overwrites what the one before gave."""
        ...

    def on_synchronized(self) -> None:
        """Called after a synchronization with the device."""
        ...

    def tensor(self, name: str) -> TensorInfo:
        """Of the engine."""
        ...

    def kept_address(self, name: str) -> int:
        """Where the latest pass left an output that stays on the device."""
        ...

    def pick_addresses(self) -> Mapping[str, int]:
        """Where the latest pass left them that was not placed."""
        ...

    def place(
        self, sizes: Sizes, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> PlacedPass:
        """A pass over what lies on the device, without images; see `PassRunner.place`."""
        ...

    def placed_outputs(self, sizes: Sizes, addresses: Mapping[str, int]) -> Outputs:
        """Those of a placed pass, which was the latest; with addresses of its own outputs."""
        ...
