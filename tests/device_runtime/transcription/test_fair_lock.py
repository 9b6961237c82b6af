"""Threads get a fair lock in the order in which they wait."""

from __future__ import annotations

import threading
import time

from edgellm.device_runtime.transcription.fair_lock import FairLock


def test_threads_take_turns():
    """A thread that wants the lock again at once waits for the others."""
    lock, log, threads = FairLock(), [], []

    def work(name):
        for _ in range(3):
            with lock:
                log.append(name)

    with lock:
        for name in "abc":
            threads.append(threading.Thread(target=work, args=name))
            threads[-1].start()
            while len(lock._queue) < len(threads) + 1:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert "".join(log) == "abcabcabc"


def test_an_error_releases_it():
    lock = FairLock()
    for _ in range(2):
        try:
            with lock:
                raise ValueError
        except ValueError:
            pass
    assert not lock._queue
