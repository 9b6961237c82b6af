"""Positions of rows whose prompt has images (M-RoPE counts a picture's rows and columns)."""

from __future__ import annotations

import numpy as np

from edgellm.device_runtime.session import I64, ImageRows


class PromptPositions:
    """The positions of a prompt's rows, and of those behind it."""

    def __init__(self) -> None:
        self._known: I64 | None = None

    def set_images(self, images: ImageRows) -> None:
        """The images of the next prompt."""
        self._known = images.positions

    def place(self, rows: I64, out: I64) -> None:
        """Write positions.

        Args:
            rows: int64 [S], counted as in text.
            out: int64 [A, S], for A axes.
        """
        if self._known is None or len(out) == 1:  # a draft may count them as in text
            out[:] = rows
            return
        prompt = self._known.shape[1]
        known = self._known[:, np.minimum(rows, prompt - 1)]
        behind = rows + (self._known.max() + 1 - prompt)
        out[:] = np.where(rows < prompt, known, behind)
