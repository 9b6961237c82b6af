"""What the decoding loop asks of a backend: one pass over some rows with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.contract import LimitError

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

    @classmethod
    def none(cls, hidden_size: int, num_deepstack: int) -> ImageRows:
        """Those of a text, which are not looked at."""
        shape = 1, hidden_size
        zeros = np.zeros(shape, np.float32), np.zeros((num_deepstack, *shape), np.float32)
        return cls(*zeros, keys={})


class PassResult(Protocol):
    """Outputs of one pass; arrays are valid until the session runs again.

    A backend may fetch an array from its device when it is first read.
    """

    @property
    def token_ids(self) -> I64:
        """[R], argmax of the logits."""
        ...

    @property
    def highest(self) -> F32:
        """[R], the logit of each of `token_ids`."""
        ...

    @property
    def logits(self) -> F32:
        """[R, V]."""
        ...

    @property
    def taps(self) -> F32:
        """[S, T*H], features for a draft; [S, 0] when the engine gives none."""
        ...


@dataclass(frozen=True, slots=True)
class HostResult:
    """A `PassResult` that lies in the host's memory."""

    token_ids: I64
    logits: F32
    taps: F32

    @property
    def highest(self) -> F32:
        """See `PassResult.highest`."""
        return self.logits[np.arange(len(self.token_ids)), self.token_ids]


class DevicePassResult:
    """See `PassResult`; logits and features are fetched when they are read."""

    def __init__(self, token_ids: I64, highest: F32, fetch: Callable[[str], F32]) -> None:
        self.token_ids, self.highest, self._fetch = token_ids, highest, fetch
        self._fetched: dict[str, F32] = {}

    @property
    def logits(self) -> F32:
        """See `PassResult.logits`."""
        return self._read(contract.LOGITS)

    @property
    def taps(self) -> F32:
        """See `PassResult.taps`."""
        return self._read(contract.HIDDEN_TAPS)

    def _read(self, name: str) -> F32:
        if name not in self._fetched:
            self._fetched[name] = self._fetch(name)
        return self._fetched[name]


def require_room(capacity: int, write_index: int, rows: int) -> None:
    """Refuse rows that do not fit into a KV cache; raises `LimitError`."""
    if write_index + rows > capacity:
        raise LimitError(f"{write_index} + {rows} rows exceed the KV capacity of {capacity}")


class Session(Protocol):
    """A loaded engine with one KV cache of `capacity` rows."""

    capacity: int

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """Compute S new rows and write their keys and values at `write_index`.

        Args:
            token_ids: int64 [S].
            write_index: rows of the cache that are valid; the new ones follow.
            logits_index: int64 [R], the new rows that get logits.
            position_ids: int64 [S], counted as in text also where images give rows others; None
                counts on from `write_index`.
            tree_mask: bool [S, S], row i may see new row j; None is causal.

        Raises:
            LimitError: the rows do not fit into the cache.
        """
        ...

    def set_images(self, images: ImageRows) -> None:
        """Say what image rows of the next prompt stand for; holds until it is said again."""
        ...

    def compact(self, length: int, rows: I64) -> None:
        """Compact the cache: the rows `length + rows` become `length`, `length + 1`, ...

        Args:
            length: rows before, which stay.
            rows: int64, ascending; the accepted rows of the last pass.
        """
        ...

    def read_rows(self, length: int) -> NDArray[Any]:
        """A copy of the first `length` rows, in the cache's own type.

        Returns:
            [2 * num_layers, 1, num_kv_heads, length, head_dim].
        """
        ...

    def write_rows(self, rows: NDArray[Any]) -> None:
        """Write rows that `read_rows` copied, from row 0 on."""
        ...


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Outputs of one draft pass; arrays are valid until the session runs again."""

    token_ids: I64  # [R, K], of the base's vocabulary, best first
    log_probs: F32  # [R, K]
    hidden: F32  # [R, D], the `hidden` of these rows' children


class DraftSession(Protocol):
    """A loaded draft with a KV cache of its own."""

    capacity: int

    def set_images(self, images: ImageRows) -> None:
        """See `Session.set_images`."""
        ...

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `Session.read_rows`."""
        ...

    def write_rows(self, rows: NDArray[Any]) -> None:
        """See `Session.write_rows`."""
        ...

    def fuse(self, taps: F32) -> F32:
        """Features of the base [S, T*H] as the draft's hidden rows [S, D]."""
        ...

    def run(
        self,
        token_ids: I64,
        hidden: F32,
        write_index: int,
        output_rows: I64,
        *,
        top_k: int,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> DraftResult:
        """Compute S new rows, each from a token and the hidden row before it.

        Args:
            token_ids: int64 [S].
            hidden: float32 [S, D], fused features or recycled rows.
            write_index: where the rows go; the rows before are seen unless the mask rules them.
            output_rows: int64 [R], the rows that get candidates.
            top_k: candidates a row.
            position_ids: int64 [S]; None counts on from `write_index`.
            tree_mask: bool [S, M], M >= S, rules the last M rows, the new ones included; None is
                causal.

        Raises:
            LimitError: the rows do not fit into the cache.
        """
        ...


class HeadsSession(Protocol):
    """Loaded Medusa heads."""

    def candidates(self, feature: F32, top_k: int) -> tuple[I64, F32]:
        """What may follow the newest token, one head for each further token.

        Args:
            feature: float32 [H], of the newest row of the base's cache, whose logits gave the
                newest token.
            top_k: K, candidates of a head.

        Returns:
            Token ids int64 [N, K], best first, and their log-probabilities float32 [N, K].
        """
        ...


class VisualSession(Protocol):
    """A loaded visual encoder."""

    def encode(self, inputs: Mapping[str, np.ndarray]) -> tuple[F32, F32]:
        """Features of one image.

        Args:
            inputs: those of the encoder's graph by contract name.

        Returns:
            `image_embeds` float32 [N, H] and `deepstack_embeds` float32 [L, N, H]; L may be 0.
        """
        ...
