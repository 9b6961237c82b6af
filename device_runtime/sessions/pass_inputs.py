"""What every pass over a cache is told: tokens, where they stand, and the images among them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import Runner
from edgellm.device_runtime.sessions import I64, Bool, ImageRows, require_room
from edgellm.manifest import DecoderSpec


class PassInputs:
    """Makes the inputs of a runner's passes; M-RoPE counts a picture's rows and columns."""

    def __init__(self, runner: Runner, spec: DecoderSpec, capacity: int) -> None:
        self._runner, self._capacity = runner, capacity
        self._axes, self._images = spec.position_axes, spec.images
        self._known: I64 | None = None  # positions of a prompt's rows
        if self._images is not None:
            self.set_images(ImageRows.none(spec.hidden_size, self._images.num_deepstack))

    def set_images(self, images: ImageRows) -> None:
        """The images of the next prompt."""
        self._known = images.positions
        if self._images is None:
            return
        held = {contract.IMAGE_EMBEDS: images.embeds}
        if self._images.num_deepstack:
            held[contract.DEEPSTACK_EMBEDS] = images.deepstack
        self._runner.hold(held)

    def of(
        self,
        token_ids: I64,
        write_index: int,
        output_rows: I64,
        position_ids: I64 | None,
        tree_mask: Bool | None,
    ) -> dict[str, NDArray]:
        """By contract name; raises `LimitError` if the rows do not fit into the cache."""
        rows = len(token_ids)
        require_room(self._capacity, write_index, rows)
        if position_ids is None:
            position_ids = np.arange(write_index, write_index + rows)
        inputs = {
            contract.INPUT_IDS: token_ids[None],
            contract.POSITION_IDS: self._positions(position_ids),
            contract.WRITE_INDEX: np.array([write_index]),
            contract.LOGITS_INDEX: output_rows,
        }
        if tree_mask is not None:
            inputs[contract.TREE_MASK] = tree_mask
        return inputs

    def start(self, row: int, rows: int) -> tuple[int, int]:
        """Where `rows` rows go behind a prompt, and the first one's position, the same on all axes.

        Raises:
            LimitError: they do not fit into the cache.
        """
        require_room(self._capacity, row, rows)
        return row, int(self._positions(np.array([row])).flat[0])

    def _positions(self, rows: I64) -> I64:
        """[A, S], for A axes, of rows counted as in text."""
        if self._axes == 1:
            return rows[None]
        if self._known is None:
            return np.broadcast_to(rows, (self._axes, len(rows)))
        prompt = self._known.shape[1]
        known = self._known[:, np.minimum(rows, prompt - 1)]
        behind = rows + (self._known.max() + 1 - prompt)
        return np.where(rows < prompt, known, behind)
