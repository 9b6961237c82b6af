"""Threads get items of a pool in the order in which they wait."""

from __future__ import annotations

import threading
import time

import pytest

from edgellm.device_runtime.transcription.fair_pool import FairPool


def test_threads_take_turns():
    """A thread that wants an item again at once waits for the others."""
    pool, log, threads = FairPool(["item"]), [], []

    def work(name):
        for _ in range(3):
            with pool.taken():
                log.append(name)

    with pool.taken() as item:
        assert item == "item"
        for name in "abc":
            threads.append(threading.Thread(target=work, args=name))
            threads[-1].start()
            while len(pool._queue) < len(threads):
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert "".join(log) == "abcabcabc"


def test_each_item_has_one_thread():
    pool, held, most = FairPool("xyz"), [], []

    def work():
        for _ in range(50):
            with pool.taken() as item:
                held.append(item)
                assert len(held) == len({*held})
                most.append(len(held))
                time.sleep(0.0001)
                held.remove(item)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 300
    assert max(most) == 3


def test_an_error_gives_the_item_back():
    pool = FairPool([1])
    for _ in range(2):
        with pytest.raises(ValueError, match="x"), pool.taken():
            raise ValueError("x")
    assert [*pool._free] == [1]


def test_an_interrupt_ends_the_wait(monkeypatch):
    pool = FairPool([1])
    with pool.taken():
        with monkeypatch.context() as patch:
            patch.setattr(
                threading.Event, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt), pool.taken():
                pass
        assert not pool._queue
    assert [*pool._free] == [1]
