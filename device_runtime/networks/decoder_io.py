"""Inputs of all passes with a KV cache: tokens, positions, masks and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import AudioSpec, DecoderSpec
from edgellm.device_runtime.arrays import (
    I64,
    Bool,
    ImageRows,
    require_room,
)
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.runners.runner import Runner, require_pool


class PassInputs:
    """Makes the inputs of a runner's passes, with M-RoPE positions for images."""

    def __init__(self, runner: Runner, spec: DecoderSpec, capacity: int) -> None:
        self._runner, self._capacity = runner, capacity
        self._max_tokens = require_pool(runner).max_pass_tokens
        self._axes, self._images, self._vocab_size = (
            spec.position_axes,
            spec.images,
            spec.vocab_size,
        )
        images = spec.images
        self._is_bidirectional = images is not None and images.bidirectional_tokens > 0
        self._has_parents = spec.recurrent is not None
        self.takes_adapters = False
        if self._images is not None:
            count = self._images.num_deepstack
            self._give([ImageRows.none(spec.hidden_size, count)])
        self._has_audio = spec.audio is not None
        if spec.audio is not None:
            self._runner.hold(_silence(spec, spec.audio))

    def listen(self, cross: Mapping[str, NDArray], place: int) -> None:
        """See `Runner.hold_window`."""
        self._runner.hold_window(cross, place)

    def hold(self, parts: Sequence[tuple[SequenceKV, I64]]) -> list[int]:
        """Set the image embeddings of a pass: those of all sequences, concatenated.

        A pass without images leaves the previous ones, which it does not use.

        Args:
            parts: sequences with the tokens of the pass.

        Returns:
            Offsets to add to the ids of image tokens, for each sequence.
        """
        shifts, shown, first = [0] * len(parts), list[ImageRows](), 0
        if self._images is None:
            return shifts
        for at, (kv, token_ids) in enumerate(parts):
            rows = token_ids[token_ids >= self._vocab_size] - self._vocab_size
            if kv.images is None or not len(rows):
                continue
            begin, end = int(rows.min()), int(rows.max()) + 1
            shown.append(kv.images.between(begin, end))
            shifts[at] = first - begin
            first += end - begin
        if shown:
            self._give(shown)
        return shifts

    def _give(self, some: Sequence[ImageRows]) -> None:
        assert self._images is not None
        held = {graph_io.IMAGE_EMBEDS: np.concatenate([one.embeds for one in some])}
        if self._images.num_deepstack:
            levels = [one.deepstack for one in some]
            held[graph_io.DEEPSTACK_EMBEDS] = np.concatenate(levels, axis=1)
        self._runner.hold(held)

    def of(
        self,
        kv: SequenceKV,
        token_ids: I64,
        write_index: int,
        output_rows: I64,
        position_ids: I64 | None,
        tree_mask: Bool | None,
        *,
        image_shift: int = 0,
    ) -> dict[str, NDArray]:
        """By input name; raises `LimitError` if the cache is too small.

        Args:
            kv: of the sequence.
            token_ids: see `DecoderNetwork.run`, as the others.
            write_index: number of positions before.
            output_rows: positions with outputs.
            position_ids: None counts on.
            tree_mask: None is causal.
            image_shift: see `hold`.
        """
        rows = len(token_ids)
        if image_shift:
            is_image = token_ids >= self._vocab_size
            token_ids = np.where(is_image, token_ids + image_shift, token_ids)
        require_room(self._capacity, write_index, rows, self._max_tokens)
        if position_ids is None:
            position_ids = np.arange(write_index, write_index + rows)
        inputs = {
            graph_io.INPUT_IDS: token_ids[None],
            graph_io.POSITION_IDS: (
                position_ids[None] if self._axes == 1 else self._positions(kv, position_ids)
            ),
            graph_io.WRITE_INDEX: np.array([write_index]),
            graph_io.LOGITS_INDEX: output_rows,
        }
        if self.takes_adapters:
            slot = 0 if kv.adapter is None else kv.adapter.slot
            inputs[graph_io.ADAPTER] = np.array([slot])
        if self._has_audio:
            inputs[graph_io.WINDOW_PLACES] = np.array([kv.window])
        if tree_mask is None and self._is_bidirectional:
            tree_mask = image_mask(token_ids >= self._vocab_size)
        if tree_mask is not None:
            inputs[graph_io.TREE_MASK] = tree_mask
        if self._has_parents:
            inputs[graph_io.PARENT_ROWS] = parent_rows(rows, tree_mask)
        return inputs

    def start(self, kv: SequenceKV, row: int, rows: int) -> tuple[int, int]:
        """Write index of `rows` tokens after a prompt, and the first position, equal on all axes.

        Raises:
            LimitError: the cache is too small.
        """
        require_room(self._capacity, row, rows)
        if self._axes == 1:
            return row, row
        return row, int(self._positions(kv, np.array([row])).flat[0])

    def _positions(self, kv: SequenceKV, rows: I64) -> I64:
        """Positions [A, S] for A axes, from positions counted as in text."""
        places = None if kv.images is None else kv.images.positions
        if places is None:
            return np.broadcast_to(rows, (self._axes, len(rows)))
        prompt = places.shape[1]
        known = places[:, np.minimum(rows, prompt - 1)]
        behind = rows + (places.max() + 1 - prompt)
        return np.where(rows < prompt, known, behind)


def _silence(spec: DecoderSpec, audio: AudioSpec) -> dict[str, NDArray[np.float32]]:
    """Keys and values of no audio, for passes before the first window."""
    rows = np.zeros(
        (1, audio.num_heads, audio.num_positions, spec.hidden_size // audio.num_heads), np.float32
    )
    layers = range(spec.num_layers)
    return {graph_io.cross_name(n, part): rows for n in layers for part in ("key", "value")}


def image_mask(is_image: Bool) -> Bool | None:
    """Causal mask [S, S] in which consecutive image tokens also attend to later ones.

    Args:
        is_image: bool [S], of the tokens of a pass.

    Returns:
        None if no two image tokens are consecutive.
    """
    if not np.any(is_image[1:] & is_image[:-1]):
        return None
    run = np.cumsum(np.diff(is_image, prepend=False))  # odd numbers are runs of image tokens
    return np.tri(len(is_image), dtype=np.bool_) | (is_image & (run[:, None] == run))


def parent_rows(rows: int, tree_mask: Bool | None) -> I64:
    """Parent of each new token, int64 [S]; -1 if it is not new. A mask [S, S] is of a tree."""
    if tree_mask is None:
        return np.arange(-1, rows - 1)
    before = np.tril(tree_mask, -1)
    newest = rows - 1 - before[:, ::-1].argmax(axis=1)
    return np.where(before.any(axis=1), newest, -1)
