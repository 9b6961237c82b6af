"""Passes over the loaded graphs of an engine, on any backend.

A module for each role that an engine may be for (`edgellm.core.graph_roles`), found by the role's
name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from edgellm.core.contract import LimitError
from edgellm.core.manifest import Spec
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.runners.pass_timing import Budget

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
RowKey = int | str  # what a row stands for: a token, or an image by the hash of its content


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The images of a prompt as a decoder sees them: token id V + n stands for row n."""

    embeds: F32  # [N, H], N >= 1
    deepstack: F32  # [L, N, H]; L may be 0
    # [3, S]: of the prompt's rows, M-RoPE; rows behind it follow the largest. None: as in text.
    positions: I64 | None = None
    keys: Mapping[int, RowKey] = field(kw_only=True)  # of the token ids V + n: row n's image

    def between(self, begin: int, end: int) -> ImageRows:
        """The rows [begin, end) alone, without what is said of the prompt."""
        return ImageRows(self.embeds[begin:end], self.deepstack[:, begin:end], keys={})

    @classmethod
    def none(cls, hidden_size: int, num_deepstack: int) -> ImageRows:
        """Those of a text, which are not looked at."""
        shape = 1, hidden_size
        zeros = np.zeros(shape, np.float32), np.zeros((num_deepstack, *shape), np.float32)
        return cls(*zeros, keys={})


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter that a decoder holds."""

    name: str
    slot: int  # in `ADAPTER_TABLE`
    mark: str  # of what it computes: the same for equal weights, and no other's
    is_loaded: bool = True  # False: others have its place


def require_room(capacity: int, write_index: int, rows: int, pass_rows: int = 0) -> None:
    """Refuse rows that do not fit into a KV cache, or into a pass; raises `LimitError`."""
    if write_index + rows > capacity:
        raise LimitError(f"{write_index} + {rows} rows exceed the KV capacity of {capacity}")
    if pass_rows and rows > pass_rows:
        raise LimitError(
            f"a pass of {rows} rows: the cache keeps windows only, with room for {pass_rows}",
            hint="give them in pieces",
        )


class Module(Protocol):
    """What the module of a role has."""

    def session(self, opened: Mapping[str, Runner], spec: Spec, capacity: int) -> Any:
        """A session over the runners of an engine, whose caches have `capacity` rows."""
        ...

    def costs(
        self, session: Any, spec: Spec, most_rows: int = 0, budget: Budget | None = None
    ) -> dict[str, dict[str, float]]:
        """Milliseconds of passes on this machine, by kind and rows.

        Args:
            session: its cache is overwritten.
            spec: of the engine.
            most_rows: of a pass, and candidates of a row, where there is such a bound; 0: any.
            budget: of the time that it takes; None: one of its own.
        """
        ...


def find(role: str) -> Module:
    """The module of a role."""
    return cast(Module, importlib.import_module(f"{__name__}.{role}"))
