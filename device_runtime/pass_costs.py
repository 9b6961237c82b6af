"""What passes cost on this machine; a tree is sized by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from edgellm.contract import DecoderSpec, DraftSpec
from edgellm.device_runtime.session import F32, DraftSession, HeadsSession, Session

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_ROWS = 512
_CANDIDATES = 10
_REPEATS = 7


def fastest_ms(run: Callable[[], object], repeats: int) -> float:
    """Time of the fastest call after one that is not counted: what else runs only adds to it."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e3)
    return round(min(samples), 4)


def pass_costs(session: Session, spec: DecoderSpec, most_rows: int = 0) -> dict[str, float]:
    """Milliseconds of a base's pass by its rows, over a half-full context at most.

    Args:
        session: its cache is overwritten.
        spec: of the base.
        most_rows: of which all may get logits; 0: any number.
    """
    context = min(CONTEXT_ROWS, session.capacity // 2)
    costs = {}
    for rows in _measured(session.capacity - context, most_rows):
        token_ids, head_rows = np.arange(rows) % spec.vocab_size, np.arange(rows)
        run = partial(session.run, token_ids, context, head_rows)
        costs[str(rows)] = fastest_ms(run, _REPEATS)
    return costs


def draft_costs(
    session: DraftSession, spec: DraftSpec, *, fused: bool, most_rows: int = 0
) -> dict[str, float]:
    """Milliseconds by rows: growth passes, whose rows all get candidates, or extensions.

    Args:
        session: its cache is overwritten.
        spec: of the draft.
        fused: measure extensions, whose features are fused first.
        most_rows: that a round drafts, and candidates of a row; 0: any number.
    """
    context = min(CONTEXT_ROWS, session.capacity // 2)
    top_k = min(_CANDIDATES, spec.draft_vocab_size, most_rows or _CANDIDATES)
    costs = {}
    for rows in _measured(session.capacity - context, most_rows):
        taps = features(spec, rows)
        hidden = np.zeros((rows, spec.decoder.hidden_size), np.float32)
        outputs = np.array([rows - 1]) if fused else np.arange(rows)
        step = partial(
            session.run, np.arange(rows) % spec.decoder.vocab_size, write_index=context,
            output_rows=outputs, top_k=top_k,
        )  # fmt: skip

        def extend(step: partial = step, taps: F32 = taps) -> None:
            step(hidden=session.fuse(taps))

        costs[str(rows)] = fastest_ms(extend if fused else partial(step, hidden=hidden), _REPEATS)
    return costs


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
