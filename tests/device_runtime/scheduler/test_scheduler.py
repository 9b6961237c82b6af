"""Scheduler: outputs are unchanged, no request starves, the KV cache never overflows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sessions import VOCAB, StrictBase, recorded
from stepping import learned_of

from edgellm.device_runtime import SamplingParams
from edgellm.device_runtime.arrays import ImageRows
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.scheduler.running_batch import Batch, RunningRequest
from edgellm.device_runtime.scheduler.scheduler import MIN_CHUNK, Bounds, RequestState, plan
from edgellm.device_runtime.speculate.drafter import TextDrafter
from edgellm.device_runtime.speculate.drafters import ngram, suffix
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.tree_policy import FixedTree, TreeLimits

CAPACITY, PIECE = 64, 6
GREEDY, SAMPLED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=0, seed=3),
)
LIMITS = TreeLimits(top_k=3, steps=4, verify_size=8)


class Pool(KVCacheManager):
    """One shared cache that counts the blocks of all sequences."""

    def __init__(self, rows: int, block_size: int) -> None:
        super().__init__(base=recorded(StrictBase(CAPACITY)), prefill_rows=PIECE)
        self.num_rows, self.block_size = rows, block_size
        self.entries: list[RunningRequest] = []

    def used(self) -> int:
        held = (e.sequence.num_rows for e in self.entries if not e.saved_rows)
        return sum(math.ceil(rows / self.block_size) * self.block_size for rows in held)

    @property
    def num_free(self) -> int:
        return self.num_rows - self.used()


@dataclass
class Arrival:
    """One request of a schedule."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: int
    at: int  # the step before which it comes
    priority: int
    leaves: int | None  # the step before which its reader leaves
    drafts: bool
    spans: tuple[tuple[int, int], ...] = ()  # images that one pass has
    entry: RunningRequest = field(init=False)

    def begin(self, lookups) -> RunningRequest:
        drafter = TextDrafter(learned_of(FixedTree(LIMITS), lookups=lookups), LIMITS)
        spans = tuple(span for span in self.spans if span[1] <= len(self.prompt))
        sequence = Sequence(
            prompt=Prompt(self.prompt, images_with(spans)),
            sampler=Sampler(params=self.sampling, prompt=self.prompt),
            max_tokens=self.tokens,
            drafter=drafter if self.drafts else None,
        )
        self.entry = RunningRequest(sequence=sequence, priority=self.priority)
        return self.entry


def images_with(spans: tuple[tuple[int, int], ...]) -> ImageRows | None:
    """Images at these positions; scripted networks take none."""
    nothing = np.zeros((1, 1), np.float32)
    shown = ImageRows(embeds=nothing, deepstack=nothing[:0, None], keys={}, spans=spans)
    return shown if spans else None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        st.sampled_from([GREEDY, SAMPLED]),
        st.integers(1, 20),
        st.integers(0, 30),
        st.integers(0, 2),
        st.one_of(st.none(), st.integers(1, 40)),
        st.booleans(),
        st.sampled_from([(), ((0, 4),), ((1, 5), (6, 9)), ((3, 6), (6, 10), (17, 21))]),
    ),
    min_size=1,
    max_size=6,
)


def alone(arrival: Arrival) -> list[int]:
    pool = Pool(CAPACITY, 1)
    entry = dataclasses.replace(arrival, drafts=False).begin([])
    pool.entries = [entry]
    batch = Batch(pool, Bounds(max_running=1, prefill_rows=PIECE))
    batch.add(entry)
    while not entry.is_done:
        take(batch, [entry])
    return entry.sequence.token_ids


def take(batch: Batch, readers: list[RunningRequest]) -> int:
    """Run one step, whose readers take all; return the batch size."""
    for entry in readers:
        entry.is_wanted = True
    batch.sweep()
    stepping = batch.begin(30)
    if not stepping:
        return 0
    before = {entry: entry.sequence.num_rows for entry in stepping}
    batch.end(stepping, batch.run(stepping))
    for entry in stepping:
        rows = entry.sequence.num_rows
        assert rows <= before[entry] + entry.sequence.max_rows
        assert not any(first < rows < last for first, last in entry.sequence.prompt.spans)
        entry.steps.clear()
    return len(stepping)


@settings(max_examples=150)
@given(
    arrivals=ARRIVALS, maximum=st.integers(1, 4), page=st.sampled_from([1, 4, 8]),
    spare=st.integers(0, 64),
)  # fmt: skip
def test_any_schedule_gives_equal_tokens(arrivals, maximum, page, spare):
    pool = Pool(CAPACITY + spare // page * page, page)
    costs = np.arange(65.0)
    batch = Batch(
        pool,
        Bounds(
            max_running=maximum,
            prefill_rows=PIECE,
            tree_rows=LIMITS.verify_size,
            block_size=page,
            max_stall_ms=20.0,
            pass_ms=costs,
        ),
    )
    coming, active, at = sorted(arrivals, key=lambda one: one.at), [], 0
    lookups = [ngram.remember(), suffix.remember()]
    while coming or active:
        while coming and coming[0].at <= at:
            batch.add(coming[0].begin(lookups))
            active.append(coming.pop(0))
        for one in [one for one in active if one.leaves is not None and one.leaves <= at]:
            batch.remove(one.entry)
            assert one.entry.sequence.is_over
            active.remove(one)
        pool.entries = [one.entry for one in active]
        shared = take(batch, pool.entries)
        assert bool(shared) == bool(active), "a request waits and none steps"
        assert shared <= maximum
        active = [one for one in active if not one.entry.is_done]
        pool.entries = [one.entry for one in active]
        assert pool.used() <= pool.num_rows
        at += 1
        assert at < 2000, "a request starves"
        batch.entries = [one.entry for one in active]
    for one in arrivals:
        expected = alone(one)
        if one.entry.is_done:
            assert one.entry.sequence.token_ids == expected
        else:
            assert one.entry.sequence.token_ids == expected[: len(one.entry.sequence.token_ids)]


def test_the_oldest_request_is_never_preempted():
    """Five sequences decode in a cache for one and a half: the oldest advances in every step."""
    pool = Pool(CAPACITY + 32, 4)
    batch = Batch(pool, Bounds(max_running=5, prefill_rows=PIECE, block_size=4))
    arrivals = [Arrival([3, 1, 4, 1], GREEDY, 40 + at, 0, 0, None, False) for at in range(5)]
    for one in arrivals:
        batch.add(one.begin([]))
    pool.entries, preempted = [one.entry for one in arrivals], []
    batch.on_pass = lambda _, count: preempted.append(count)
    while pool.entries:
        oldest = pool.entries[0].sequence
        before = oldest.num_rows, len(oldest.token_ids)
        take(batch, pool.entries)
        assert (oldest.num_rows, len(oldest.token_ids)) > before
        assert pool.used() <= pool.num_rows
        pool.entries = [entry for entry in pool.entries if not entry.is_done]
    assert sum(preempted) > 0
    assert all(one.entry.sequence.token_ids == alone(one) for one in arrivals)


# ------------------------------------------------------------------- plans by hand
TABLE = np.arange(65) * 1.0  # a millisecond a row
WIDE = Bounds(max_running=4, prefill_rows=512, tree_rows=16, max_stall_ms=40.0, pass_ms=TABLE)


def _running(number: int, **facts) -> RequestState:
    return RequestState(number=number, is_admitted=True, held_rows=8, **facts)


def test_prompts_are_chunked_only_in_a_batch():
    reading = RequestState(number=3, prefill_rows_left=400)
    assert plan([reading], 10**6, WIDE).rows == {3: 400}
    found = plan([_running(1), _running(2), reading], 10**6, WIDE)
    assert found.rows == {1: 1, 2: 1, 3: 25}  # a sixteenth of it
    longer = dataclasses.replace(reading, prefill_rows_left=4000)
    assert plan([_running(1), _running(2), longer], 10**6, WIDE).rows == {1: 1, 2: 1, 3: 38}
    many = [_running(at) for at in range(1, 41)]
    short = dataclasses.replace(reading, number=50, prefill_rows_left=60)
    wide = dataclasses.replace(WIDE, max_running=48, max_stall_ms=49.0)
    assert plan([*many, short], 10**6, wide).rows[50] == 9  # 40 others take 40 ms
    wide = dataclasses.replace(wide, max_stall_ms=100.0)
    assert plan([*many, short], 10**6, wide).rows[50] == 10  # a quarter longer than without it
    readers = [dataclasses.replace(short, number=30 + at) for at in range(4)]
    assert plan([*many[:2], *readers], 10**6, wide).rows == {1: 1, 2: 1, 30: 15}
    slow = dataclasses.replace(WIDE, max_stall_ms=1.0)
    assert plan([_running(1), reading], 10**6, slow).rows == {1: 1, 3: MIN_CHUNK}
    loose = dataclasses.replace(WIDE, max_stall_ms=128.0)  # twice the table's end
    assert plan([_running(1), longer], 10**6, loose).rows == {1: 1, 3: 127}


def test_the_first_prompt_is_prefilled_first():
    first, second = (
        RequestState(number=1, prefill_rows_left=30),
        RequestState(number=2, prefill_rows_left=600),
    )
    assert plan([second, first, _running(3)], 10**6, WIDE).rows == {1: 30, 2: 9, 3: 1}
    second = dataclasses.replace(second, prefill_rows_left=30)
    assert plan([second, first, _running(3)], 10**6, WIDE).rows == {1: 8, 3: 1}


def test_chunks_end_outside_images():
    """Before an image that does not fit, or after one that begins the chunk; others wait."""
    one = RequestState(number=3, prefill_rows_left=400, spans=((10, 110), (120, 130)))
    decoding = [_running(1), _running(2)]
    assert plan([*decoding, one], 10**6, WIDE).rows == {1: 1, 2: 1, 3: 10}
    first = dataclasses.replace(one, spans=((0, 100), (110, 120)))
    assert plan([*decoding, first], 10**6, WIDE).rows == {1: 1, 2: 1, 3: 100}
    middle = dataclasses.replace(one, spans=((-40, 60),))  # the rest was reused
    assert plan([*decoding, middle], 10**6, WIDE).rows == {1: 1, 2: 1, 3: 60}
    second = dataclasses.replace(first, number=4)
    assert plan([*decoding, one, second], 10**6, WIDE).rows == {1: 1, 2: 1, 3: 10}
    assert plan([second, one], 10**6, WIDE).rows == {3: 400, 4: 110}
    tight = RequestState(number=5, is_admitted=True, prefill_rows_left=100, spans=((8, 50),))
    assert plan([tight], 40, WIDE).rows == {5: 8}


def test_order_is_by_priority_and_age():
    one_place = Bounds(max_running=1, prefill_rows=512)
    low, high = (
        RequestState(number=1, priority=1, prefill_rows_left=9),
        RequestState(number=2, prefill_rows_left=9),
    )
    assert plan([low, high], 10**6, one_place).admitted == (2,)
    aged = dataclasses.replace(low, waited_s=65.0)
    assert plan([aged, high], 10**6, one_place).admitted == (1,)


def test_later_requests_do_not_pass_one_without_space():
    large, small = (
        RequestState(number=2, prefill_rows_left=100),
        RequestState(number=3, prefill_rows_left=4),
    )
    assert plan([_running(1), large, small], 50, WIDE).admitted == ()
    assert plan([_running(1), large, small], 200, WIDE).admitted == (2, 3)


def test_a_parked_request_is_displaced():
    parked = _running(1, is_due=False, is_parked=True)
    found = plan(
        [parked, RequestState(number=2, prefill_rows_left=4)],
        10**6,
        Bounds(max_running=1, prefill_rows=512),
    )
    assert (found.displaced, found.admitted, found.rows) == ((1,), (2,), {2: 4})
    found = plan(
        [parked, RequestState(number=2, prefill_rows_left=4)],
        2,
        Bounds(max_running=2, prefill_rows=512),
    )
    assert (found.preempted, found.admitted, found.rows) == ((1,), (2,), {2: 4})


def test_trees_take_free_positions_without_preemption():
    drafted = [_running(at, tree_rows=16) for at in (1, 2)]
    assert plan(drafted, 10, WIDE).rows == {1: 9, 2: 1}
    assert plan(drafted, 10, WIDE).preempted == ()
    assert plan(drafted, 1, WIDE).preempted == (2,)
    # Chunks are sized by the latest trees, not by their maximum.
    reading, others = (
        RequestState(number=3, prefill_rows_left=60),
        [_running(at) for at in (1, 2, 4, 5)],
    )
    wide = dataclasses.replace(WIDE, max_running=5)
    given = plan([*others, reading], 10**6, wide).rows[3]
    drafted = [_running(at, tree_rows=16, usual_rows=rows) for at, rows in ((1, 3), (2, 1))]
    assert plan([*drafted, reading], 10**6, wide).rows == {1: 16, 2: 16, 3: given}


@pytest.mark.parametrize("rows", [1, 7])
def test_unmeasured_costs_set_no_bound(rows):
    free = Bounds(max_running=4, prefill_rows=512, max_stall_ms=1.0, pass_ms=np.zeros(rows + 1))
    assert plan([_running(1), RequestState(number=2, prefill_rows_left=400)], 10**6, free).rows == {
        1: 1,
        2: 400,
    }


def test_costs_are_those_of_the_drafter():
    table = Costs.of({"1": 2.0, "64": 65.0}).verify
    bounds = dataclasses.replace(WIDE, pass_ms=table)
    assert plan(
        [_running(1), RequestState(number=2, prefill_rows_left=990)], 10**6, bounds
    ).rows == {
        1: 1,
        2: 38,
    }


def test_batches_use_batch_costs():
    """Here a sequence costs 4 ms with two tokens; each further token costs 0.1."""
    measured = {n: {"1": 4.0 * n, "2": 4.0 * n, "64": 4.0 * n + 0.1 * 62 * n} for n in (1, 2, 4)}
    bounds = dataclasses.replace(WIDE, together=SharedCosts(measured), max_stall_ms=14.0)
    reading, active = RequestState(number=3, prefill_rows_left=400), [_running(1), _running(2)]
    # A third sequence takes 4 ms of the 6 that are left; each of its tokens takes 0.1 ms.
    assert plan([*active, reading], 10**6, bounds).rows == {1: 1, 2: 1, 3: 24}
    tight = dataclasses.replace(bounds, max_stall_ms=12.5)
    assert plan([*active, reading], 10**6, tight).rows[3] == 9
    # A fourth would make it 16 ms even with few tokens: it waits.
    short = [RequestState(number=at, prefill_rows_left=20) for at in (3, 4)]
    assert plan([*active, *short], 10**6, bounds).rows == {1: 1, 2: 1, 3: 20}
