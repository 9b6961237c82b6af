"""A long run with draft trees: memory must not grow, and repeated requests get equal tokens."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.gpu import compute_capability, memory_bytes
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.scripts.proof_folder.steps.outputs import Result, passed, row
from edgellm.scripts.proof_folder.steps.pair import build_pair

_MIB = 1 << 20
_GREEDY = SamplingParams(temperature=0)
_PERIOD = 8  # requests; the first of each period is always the same
_TOKENS, _LONGEST = 24, 80  # of an output, of a prompt
_ABANDONED = 3  # steps after which some requests are abandoned
_WARM = 0.5  # share of the time whose growth is not counted
_LEAST = 8  # samples, however short the time is
_DRY_LEAST, _DRY_TOKENS = 2, 4
# Fragments of malloc, and other programs on a board, whose GPU shares the system's memory. A KV
# cache that a request does not give back has a megabyte, and there are thousands of requests.
_ALLOWED_MIB = {"host memory": 16.0, "GPU memory": 32.0}


@dataclass
class _Samples:
    """Memory in MiB by kind, after each period."""

    warm: dict[str, list[float]] = field(default_factory=dict)
    late: dict[str, list[float]] = field(default_factory=dict)

    def add(self, share: float) -> None:
        into = self.warm if share < _WARM else self.late
        for name, value in _memory().items():
            into.setdefault(name, []).append(value)

    def rows(self, *, dry: bool) -> dict[str, dict[str, Any]]:
        """Medians of both halves of the time; a dry run is too short to judge host memory."""
        found = {}
        for name, limit in _ALLOWED_MIB.items():
            if name in self.warm and name in self.late:
                before, after = median(self.warm[name]), median(self.late[name])
                allowed = None if dry else limit
                found[f"{name}, MiB"] = row([after], [before], after - before, allowed)
        return found


def run_long(base: Path, draft: Path, backend: str, seconds: float, *, dry: bool) -> Result:
    """Answer random requests for a time; compare memory in both halves of it."""
    samples, wanted, different = _Samples(), None, 0
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine")
        build_pair(base, draft, engine, backend)
        with LLM(engine, spec=SpecOptions(tree="fixed")) as llm:
            start = time.monotonic()
            least, length = (_DRY_LEAST, _DRY_TOKENS) if dry else (_LEAST, _TOKENS)
            for share in _shares(seconds, least):
                tokens = _period(llm, count, length)
                wanted = wanted or tokens
                different += tokens != wanted
                count += 1
                samples.add(share)
            took = time.monotonic() - start
    rows = samples.rows(dry=dry)
    rows["requests with other tokens than before"] = row(different, 0, different, 0)
    said = [f"{count * _PERIOD} requests in {took:.0f} s"]
    return passed(rows), {"said": said, "outputs": rows}


def _shares(seconds: float, least: int) -> Iterator[float]:
    """Shares of the time that have passed; some, however short it is."""
    start, count = time.monotonic(), 0
    while (share := (time.monotonic() - start) / seconds) < 1 or count < least:
        yield min(share, count / least)
        count += 1


def _period(llm: LLM, number: int, length: int) -> list[int]:
    """Run the requests of a period; return the tokens of the first."""
    random = np.random.default_rng(number)
    first = _run(llm, "red blue square row 1", _GREEDY, length)
    for at in range(1, _PERIOD):
        digits = random.integers(10, size=int(random.integers(1, _LONGEST)))
        sampling = SamplingParams(temperature=1.0, seed=at) if at % 2 else _GREEDY
        _run(llm, " ".join(map(str, digits)), sampling, length, abandons=at % 4 == 0)
    return first


def _run(
    llm: LLM, prompt: str, sampling: SamplingParams, length: int, *, abandons: bool = False
) -> list[int]:
    output = llm.generate(prompt, sampling=sampling, max_generate_length=length)
    steps = iter(output)
    for at, _ in enumerate(steps):
        if abandons and at == _ABANDONED:
            steps.close()
            break
    return output.token_ids


def _memory() -> dict[str, float]:
    """Used MiB of this process, and of the GPU if there is one."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    found = {"host memory": pages * os.sysconf("SC_PAGE_SIZE") / _MIB}
    used = _gpu_bytes()
    return found if used is None else {**found, "GPU memory": used / _MIB}


def _gpu_bytes() -> int | None:
    if compute_capability() is None:
        return None
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device

    try:
        return memory_bytes() - open_device().free_bytes()
    except EdgeLLMError:  # cuda-python is missing, which only TensorRT's engines need
        return None
