"""What passes cost on this machine; a tree is sized by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from edgellm.device_runtime.sessions import F32, I64
from edgellm.device_runtime.sessions.decoder import DecoderSession
from edgellm.device_runtime.sessions.draft import DraftSession
from edgellm.device_runtime.sessions.heads import HeadsSession
from edgellm.manifest import DecoderSpec, DraftSpec

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_ROWS = 512
_CANDIDATES = 10
_REPEATS = 7
_OTHERS_BYTES = 64 << 20  # what passes between two of a draft; more than caches hold


def fastest_ms(run: Callable[[], object], repeats: int) -> float:
    """Time of the fastest call after one that is not counted: what else runs only adds to it."""
    return fastest_each_ms({"": run}, repeats)[""]


def fastest_each_ms(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The same of several, in turns: what else runs then slows all of them, and none all the time.

    Args:
        runs: calls by name.
        repeats: timed calls of each.
        before: is called before each, untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for name, run in [*runs.items()] * repeats:
        before()
        start = time.perf_counter()
        run()
        samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(min(times), 4) for name, times in samples.items()}


def pass_costs(session: DecoderSession, spec: DecoderSpec, most_rows: int = 0) -> dict[str, float]:
    """Milliseconds of a base's pass by its rows, over a half-full context at most.

    Args:
        session: its cache is overwritten.
        spec: of the base.
        most_rows: of which all may get logits; 0: any number.
    """
    context = min(CONTEXT_ROWS, session.capacity // 2)

    def run(rows: int) -> None:
        session.run(np.arange(rows) % spec.vocab_size, context, np.arange(rows))

    measured = _measured(session.capacity - context, most_rows)
    return fastest_each_ms({str(rows): partial(run, rows) for rows in measured}, _REPEATS)


def draft_costs(
    session: DraftSession, spec: DraftSpec, most_rows: int = 0
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds by rows of growth passes, whose rows all get candidates, and of extensions.

    An extension follows a pass of the base, whose weights have taken the processor's caches; a
    growth pass follows an extension. From caches that hold the draft both take half as long.

    Args:
        session: its cache is overwritten.
        spec: of the draft.
        most_rows: that a round drafts, and candidates of a row; 0: any number.
    """
    context = min(CONTEXT_ROWS, session.capacity // 2)
    top_k = min(_CANDIDATES, spec.draft_vocab_size, most_rows or _CANDIDATES)
    taps = features(spec, max(MEASURED_ROWS))
    hidden = np.zeros((max(MEASURED_ROWS), spec.decoder.hidden_size), np.float32)
    others = np.ones(_OTHERS_BYTES // 4, np.float32)  # zeros would be one page

    def run(hidden: F32, outputs: I64) -> None:
        token_ids = np.arange(len(hidden)) % spec.decoder.vocab_size
        session.run(token_ids, hidden, context, outputs, top_k=top_k)

    def extend(rows: int) -> None:
        run(session.fuse(taps[:rows]), np.array([rows - 1]))

    def grow(rows: int) -> None:
        run(hidden[:rows], np.arange(rows))

    def come_from_the_base() -> None:
        others.sum()

    def come_from_extending() -> None:
        come_from_the_base()
        extend(1)

    measured = _measured(session.capacity - context, most_rows)
    step, extension = (
        fastest_each_ms({str(rows): partial(each, rows) for rows in measured}, _REPEATS, before)
        for each, before in ((grow, come_from_extending), (extend, come_from_the_base))
    )
    return step, extension


def heads_costs(session: HeadsSession, spec: DraftSpec, top_k: int) -> dict[str, float]:
    """Milliseconds of a pass of Medusa heads that gives `top_k` candidates."""
    run = partial(session.candidates, features(spec, 1)[0], top_k)
    return {"1": fastest_ms(run, _REPEATS)}


def features(spec: DraftSpec, rows: int) -> F32:
    """Random features of a base for `rows` rows of its draft, [rows, T*H]."""
    width = len(spec.hidden_taps) * spec.base_hidden_size
    return np.random.default_rng(1).standard_normal((rows, width), np.float32)


def _measured(room: int, most_rows: int) -> list[int]:
    most = min(room, most_rows or room)
    return [rows for rows in MEASURED_ROWS if rows <= most]
