"""Work shared between threads: order, errors, interruptions."""

import threading
import time

import pytest

from dpftrl._internal.threads import parallel_map


@pytest.mark.parametrize("threads", [1, 2, 4, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_results_come_in_the_order_of_the_items(threads, count):
    def late_if_early(item: int) -> int:
        time.sleep(0.001 if item % 3 == 0 else 0)
        return item * item

    assert parallel_map(late_if_early, range(count), threads) == [i * i for i in range(count)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("wrong", [ValueError("no"), KeyboardInterrupt(), MemoryError()])
def test_an_error_is_raised_after_all_threads_have_stopped(threads, wrong):
    working, done, before = set(), [], threading.active_count()

    def work(item: int) -> None:
        working.add(item)
        if item == 2:
            raise wrong
        time.sleep(0.01)
        working.discard(item)
        done.append(item)

    with pytest.raises(type(wrong)):
        parallel_map(work, range(100), threads)
    assert working == {2}
    assert len(done) < 20  # nobody took what was left
    assert threading.active_count() == before


def test_an_interrupt_while_waiting_stops_the_other_threads(monkeypatch):
    """Ctrl-C may come when the caller has nothing to do but wait for a helper."""
    release, finished = threading.Event(), []
    join, calls = threading.Thread.join, []

    def interrupted_join(thread, *arguments):
        calls.append(thread)
        if len(calls) == 1:
            release.set()
            raise KeyboardInterrupt
        join(thread, *arguments)

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)

    def work(item: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            release.wait(5)
        finished.append(item)

    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(2), 2)
    assert sorted(finished) == [0, 1]
