"""What the build measures: calls in turns, a draft's passes as rounds run them."""

from __future__ import annotations

from types import SimpleNamespace

from edgellm.device_runtime import pass_costs
from edgellm.device_runtime.pass_costs import fastest_each_ms
from edgellm.device_runtime.sessions import draft
from edgellm.roles import EXTEND, STEP


class Clock:
    """Stands still but for what `took` says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def test_calls_are_measured_in_turns(monkeypatch):
    clock, calls = Clock(), []
    monkeypatch.setattr(pass_costs, "time", clock)

    def take(name: str, *seconds: float) -> None:
        calls.append(name)
        clock.now_s += seconds[calls.count(name) - 1]

    def wait() -> None:
        clock.now_s += 5

    runs = {"a": lambda: take("a", 9, 2, 1, 4), "b": lambda: take("b", 9, 0.5, 3, 0.7)}
    assert fastest_each_ms(runs, 3, wait) == {"a": 1000.0, "b": 500.0}
    assert calls == ["a", "b"] * 4


class WatchedDraft:
    """Notes its passes."""

    capacity, shared_rows = 32, (0, 0)

    def __init__(self) -> None:
        self.passes: list[tuple[str, int]] = []

    def fuse(self, taps):
        self.passes.append(("fuse", len(taps)))
        return taps[:, :8]

    def run(self, token_ids, hidden, write_index, output_rows, *, top_k):
        assert (write_index, top_k) == (16, 4)
        assert len(hidden) == len(token_ids)
        is_extension = self.passes[-1:] == [("fuse", len(hidden))]
        assert len(output_rows) == (1 if is_extension else len(hidden))
        self.passes.append(("extend" if is_extension else "grow", len(hidden)))


def test_growth_is_measured_behind_an_extension():
    decoder = SimpleNamespace(vocab_size=50, hidden_size=8)
    spec = SimpleNamespace(draft_vocab_size=30, taps_width=16, decoder=decoder, num_heads=0)
    session = WatchedDraft()
    costs = draft.costs(session, spec, most_rows=4)
    assert set(costs[STEP]) == set(costs[EXTEND]) == {"1", "2", "4"}
    passes = session.passes
    grown = [at for at, (kind, _) in enumerate(passes) if kind == "grow"][3:]  # timed ones
    assert len(grown) >= 3 * 5
    assert all(passes[at - 1] == ("extend", 1) for at in grown)
