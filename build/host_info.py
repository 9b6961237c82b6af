"""Resources of this machine: disk, memory bandwidth."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np


def free_disk_bytes(folder: Path) -> int:
    """Free space of the file system that will hold `folder`."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def read_bandwidth_bytes_per_s() -> float:
    """Memory read bandwidth of all cores: the best of a few sums over 256 MB."""
    from concurrent.futures import ThreadPoolExecutor

    workers = os.cpu_count() or 1
    block = np.ones((256 << 20) // 8 // workers, np.int64)
    blocks = [block.copy() for _ in range(workers)]
    best = float("inf")
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, blocks))
            best = min(best, time.perf_counter() - start)
    return workers * block.nbytes / best
