"""KV caches of a network's sequences, in the memory of its runner or swapped out to the host.

`SequenceKV` is the handle of one sequence; a `KVSwapper` knows those of a network that have
memory. If no block is free, it swaps out others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from edgellm.core.errors import LimitError
from edgellm.device_runtime.arrays import (
    I64,
    ImageRows,
    LoadedAdapter,
    RowKey,
)
from edgellm.device_runtime.networks.recurrent_state import CHECKPOINT_ROWS, States
from edgellm.device_runtime.prefix_cache.pinned_prefixes import (
    PinnedKV,
    count_common,
    marked,
    row_keys,
)
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.runner import Runner, require_pool
from edgellm.device_runtime.runners.state_store import StateMemory


class SequenceKV:
    """The KV cache of one sequence in a network, with the prefix cache keys of its positions.

    Keys are truncated before their positions are overwritten, and appended after positions are
    written. So they are valid after an error at any point, whatever code runs the passes.

    Attributes:
        keys: of the first positions.
        length: positions to keep.
        images: of the prompt.
        adapter: LoRA adapter of its tokens.
        window: place of the audio that it transcribes, see `Runner.hold_window`.
        cache: memory in the runner's pool; None: swapped out, or empty.
        swapped: host copy while it is swapped out.
        min_length: minimum prefix length, other than 0, that can be continued: sliding windows
            free earlier positions.
        states: of recurrent layers, if there are any.
    """

    def __init__(self, swapper: KVSwapper, states: States | None = None) -> None:
        """An empty sequence; `states` are those of the network's recurrent layers."""
        self.keys: list[RowKey] = []
        self.length = self.min_length = 0
        self.images: ImageRows | None = None
        self.adapter: LoadedAdapter | None = None
        self.window = 0
        self.cache: KVCache | None = None
        self.swapped: NDArray[Any] | None = None
        self.states: StateMemory | None = None
        self._written: list[RowKey] = []  # by the last pass
        self._swapper, self._states = swapper, states

    def fork(self) -> SequenceKV:
        """A copy that shares the positions; both may be extended."""
        new = SequenceKV(self._swapper, self._states)
        new.keys, new.length, new.min_length = list(self.keys), self.length, self.min_length
        new.swapped = self.swapped
        if self.cache is not None:
            self._swapper.add(new, self.cache.fork())
        if self._states is not None and self.states is not None:
            new.states = self._states.fork(self.states)
        return new

    def free(self) -> None:
        """Free all memory; the sequence is then empty."""
        if self._states is not None:
            self._states.release(self.states)
        self._swapper.remove(self)
        self.swapped = self.states = None
        self.keys, self.length, self.min_length = [], 0, 0

    def swap_out(self) -> None:
        """Copy it to the host, so that others can use its memory."""
        if self.cache is not None:
            self._swapper.swap_out(self)

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions."""
        if self._states is not None and self.states is not None:
            self._states.cut(self.states, length)
        del self.keys[length:]
        self.length = min(self.length, length)
        if not length:
            self.min_length = 0

    def compact(self, length: int, rows: I64) -> None:
        """Keep the accepted nodes of the last pass's tree.

        Args:
            length: number of positions before, which stay.
            rows: int64, ascending; `length + rows` become `length`, `length + 1`, ...
        """
        if self._states is not None:
            self._states.accept(self.state_memory(), rows)
        del self.keys[length:]
        self._swapper.swap_in(self).compact(length, rows)
        self.length = length + len(rows)
        self._append(length, [self._written[row] for row in rows.tolist()])

    def read(self, length: int) -> NDArray[Any]:
        """See `KVCache.read`."""
        return self._swapper.swap_in(self).read(length)

    def write(self, values: NDArray[Any], keys: Sequence[RowKey] = (), min_length: int = 0) -> None:
        """Replace the content by values that `read` returned; others may be swapped out.

        Args:
            values: the first positions of what was read.
            keys: of a prompt with this prefix.
            min_length: of the sequence when it was read.
        """
        self.keys = []
        self.length, self.min_length = 0, min_length
        self._swapper.write(self, values, [self])
        self.length = values.shape[-2]
        self.keys = list(keys[: self.length])
        if self._states is not None:
            self._states.release(self.states)
            self.states = self._states.new()

    def pin(self, keys: Sequence[RowKey]) -> PinnedKV:
        """See `CachedSequence.pin`."""
        held, states = self.num_cached(keys[:-1]), ()
        values = self.read(held)
        if self._states is not None and self.states is not None:
            states = self._states.read(self.states, held)
        return PinnedKV(values=values, states=states, min_length=self.min_length)

    def restore(self, pinned: PinnedKV, length: int, keys: Sequence[RowKey]) -> None:
        """See `CachedSequence.restore`."""
        self.write(pinned.values[..., :length, :], keys, pinned.min_length)
        if self._states is not None and pinned.states:
            self._states.write(self.state_memory(), pinned.states, length)

    def num_cached(self, keys: Sequence[RowKey]) -> int:
        """See `CachedSequence.num_cached`."""
        return self._reach(count_common(self.keys, keys))

    def _reach(self, length: int) -> int:
        """The longest prefix, up to `length`, from which a pass can continue.

        Recurrent states cannot be truncated; windows do not attend to freed positions.
        """
        length = length if self.states is None else self.states.reach(length)
        return length if length >= self.min_length else 0

    def begin(self, prompt_tokens: int, cached: int, checkpoints: Iterable[int] = ()) -> int:
        """Prepare prefill; return the number of positions from which it can continue.

        Args:
            prompt_tokens: of the prompt; the last is always computed.
            cached: cached positions of the prompt, perhaps without states.
            checkpoints: prefix lengths whose states are kept for later prompts, besides the
                default ones.
        """
        if self._states is not None:
            every = range(CHECKPOINT_ROWS, prompt_tokens, CHECKPOINT_ROWS)
            self.state_memory().marks = {*checkpoints, *every, prompt_tokens - 1}
        return self._reach(cached)

    def end(self, length: int) -> None:
        """End a text after `length` positions; rejected tokens of a tree may follow them.

        Must precede the next pass, since recurrent states cannot be truncated after it.
        """
        if self._states is not None and length < self.length:
            self.truncate(length)

    def state_memory(self) -> StateMemory:
        """The states of recurrent layers, made at first use."""
        assert self._states is not None
        if self.states is None:
            self.states = self._states.new()
        return self.states

    def record(self, token_ids: I64, begin: int, *, is_tree: bool) -> None:
        """Record the tokens that a pass has written from position `begin` on.

        Keys of a tree are appended when `compact` has chosen a path.
        """
        ids = token_ids.tolist()
        keys = ids if self.images is None else row_keys(ids, self.images.keys)
        self._written = keys if begin or self.adapter is None else marked(keys, self.adapter)
        self.length = begin + len(ids)
        if not is_tree:
            self._append(begin, self._written)

    def _append(self, length: int, keys: list[RowKey]) -> None:
        if len(self.keys) == length:  # not after positions without keys
            self.keys += keys


class KVSwapper:
    """The sequences of a network that have memory in the runner's pool."""

    def __init__(self, runner: Runner) -> None:
        self.pool = require_pool(runner)
        self._resident: list[SequenceKV] = []  # the least recently used first
        # Called before others are swapped out; frees blocks of finished sequences, if any.
        self.evict: Callable[[], bool] = lambda: False

    def num_free_without(self, sequences: Iterable[SequenceKV]) -> int:
        """Free positions if these sequences were freed."""
        return self.pool.num_free_without([one.cache for one in sequences if one.cache is not None])

    def allocate(self, parts: Sequence[tuple[SequenceKV, int, int]]) -> list[KVCache]:
        """Allocate positions for a pass of several sequences; return their memory.

        Args:
            parts: sequences, positions to keep of each, and new tokens.

        Raises:
            LimitError: blocks do not suffice, even with all others swapped out.
        """
        staying, caches = [part[0] for part in parts], list[KVCache]()
        for kv, length, count in parts:
            cache = self.swap_in(kv, staying)
            self._with_room(staying, cache.allocate, length, count)
            if self.pool.max_pass_tokens:  # windows free blocks
                kv.min_length = cache.min_length
            kv.length = length
            caches.append(cache)
        return caches

    def swap_in(self, kv: SequenceKV, staying: Sequence[SequenceKV] = ()) -> KVCache:
        """Give a sequence memory, with its content; `staying` are not swapped out for it."""
        if kv.cache is not None:
            if self._resident[-1] is not kv:
                self._resident.remove(kv)
                self._resident.append(kv)
            return kv.cache
        self.add(kv, self.pool.new_cache())
        if kv.swapped is not None:
            self.write(kv, kv.swapped, [*staying, kv])
            kv.swapped = None
        assert kv.cache is not None
        return kv.cache

    def write(self, kv: SequenceKV, values: NDArray[Any], staying: Sequence[SequenceKV]) -> None:
        """Replace the content of a sequence; see `KVCache.write`."""
        if kv.cache is None:
            self.add(kv, self.pool.new_cache())
            kv.swapped = None
        assert kv.cache is not None
        self._with_room(staying, kv.cache.write, values, kv.min_length)
        kv.min_length = kv.cache.min_length

    def add(self, kv: SequenceKV, cache: KVCache) -> None:
        """Add a sequence with its memory."""
        kv.cache = cache
        self._resident.append(kv)

    def remove(self, kv: SequenceKV) -> None:
        """Free the memory of a sequence."""
        if kv.cache is not None:
            self._resident.remove(kv)
            kv.cache.free()
            kv.cache = None

    def swap_out(self, kv: SequenceKV) -> None:
        """Copy a sequence to the host, and free its memory."""
        assert kv.cache is not None
        if kv.length:
            kv.swapped = kv.cache.read(kv.length)
        self.remove(kv)

    def _with_room(
        self, staying: Sequence[SequenceKV], action: Callable[..., None], *arguments: Any
    ) -> None:
        """Free memory until it suffices for `action`."""
        while not _succeeds(action, arguments):
            if not self.pool.swaps_first and self.evict():
                continue
            others = [one for one in self._resident if one not in staying]
            if not others:
                action(*arguments)  # raises
                return
            self.swap_out(others[0])


def _succeeds(action: Callable[..., None], arguments: Sequence[Any]) -> bool:
    """Whether an action has enough memory."""
    try:
        action(*arguments)
    except LimitError:
        return False
    return True
