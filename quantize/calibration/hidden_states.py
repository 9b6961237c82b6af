"""Hidden states on disk: float32 [samples, S, H], read and written in batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class States:
    """The hidden states of samples before one layer.

    Reads instead of a memory map limit memory to a batch.
    """

    path: Path
    shape: tuple[int, int, int]
    batch_rows: int

    def batches(self, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield batches [B, S, H] in order."""
        rows, length, width = self.shape
        for begin in range(0, rows, self.batch_rows):
            count = min(self.batch_rows, rows - begin)
            values = np.fromfile(
                self.path, np.float32, count * length * width, offset=4 * begin * length * width
            )
            yield torch.from_numpy(values.reshape(count, length, width)).to(device)

    def write(self, batches: Iterator[torch.Tensor]) -> States:
        """Write the file atomically."""
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as stream:
            for batch in batches:
                stream.write(np.ascontiguousarray(batch.cpu().numpy(), np.float32).data)
        partial.replace(self.path)
        return self

    def advance(
        self, after: States, step: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> States:
        """Write `after`: these states after one more layer."""
        return after.write(step(batch) for batch in self.batches(device))


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)
