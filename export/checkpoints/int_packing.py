"""Integers packed into 32-bit words, as compressed-tensors, AutoAWQ and GPTQ store them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unpack(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """int32 [rows, columns] -> unsigned [rows, columns * 32 / bits], the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return values.astype(np.uint8).reshape(len(words), -1)
