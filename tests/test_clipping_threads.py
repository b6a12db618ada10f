"""Exact sums that several threads add to at the same time, against one plain loop."""

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpftrl import clipping
from dpftrl._internal.compiled import TILE
from dpftrl.clipping import BLOCK, NO_SQUARES, SLACK, ExactSum, Grid, Steps, add_in_blocks
from dpftrl.errors import InvalidInput

GRID = Grid(2.0**-30, 1.0)


def squares_by_tile(values: NDArray) -> list[float]:
    """Sums of squares in a fixed order: four sums per tile, one value after another."""
    squares = []
    for start in range(0, values.size, TILE):
        tile = values[start : start + TILE].astype(np.float64)
        lanes = [0.0] * 4
        whole = tile.size // 4 * 4
        for position, value in enumerate(tile[:whole].tolist()):
            lanes[position % 4] += value * value
        for value in tile[whole:].tolist():
            lanes[0] += value * value
        squares.append((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]))
    return squares


def plain_steps(grid: Grid, update: NDArray) -> Steps:
    """What one update adds, without any code of the library."""
    norm, limit = math.sqrt(math.fsum(squares_by_tile(update))), grid.clip_norm / (1 + SLACK)
    factor = 1.0 if norm <= limit else limit / norm
    return np.trunc(update.astype(np.float64) * factor / grid.step).astype(np.int64)


def add_from_threads(total: ExactSum, shares: Sequence[Sequence[NDArray]]) -> None:
    """Each thread adds its share, and all begin at the same time."""
    ready = threading.Barrier(len(shares))

    def work(updates: Sequence[NDArray]) -> None:
        ready.wait()
        for update in updates:
            total.add(update)

    run_all([lambda share=share: work(share) for share in shares])


def run_all(actions: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "size", [1, 3, TILE - 1, TILE, 8 * TILE - 1, 8 * TILE, 8 * TILE + 1, 17 * TILE + 5]
)
def test_squares_of_a_copy_are_those_of_a_plain_loop_to_the_last_bit(dtype, size):
    values = np.random.default_rng(size).normal(size=size).astype(dtype)
    values[::7] *= 1e6  # rounding errors that differ with any other order
    copy = np.empty_like(values)
    assert clipping.squares_of_tiles(values).tolist() == squares_by_tile(values)
    assert clipping.copied_sum_of_squares(values, copy).tolist() == squares_by_tile(values)
    assert copy.tobytes() == values.tobytes()


def test_squares_in_another_order_would_differ():
    values = np.random.default_rng(0).normal(size=8 * TILE).astype(np.float32)
    assert squares_by_tile(values) != squares_by_tile(values[::-1])[::-1]


@pytest.mark.parametrize("spread", [0, 30])
def test_bounds_of_a_sum_that_are_equal_are_the_rounded_exact_sum(spread):
    random, equal = np.random.default_rng(spread), 0
    for _ in range(500):
        size = int(random.integers(1, 600))
        squares = random.random(size) * 10.0 ** random.uniform(-spread, spread, size)
        low, high = clipping.bounds_of_sum(squares)
        assert low <= math.fsum(squares) <= high
        equal += low == high
    assert equal > 480


@pytest.mark.parametrize(
    "squares",
    [
        [],
        [0.0],
        [5e-324] * 3,
        [math.inf, 1.0],
        [math.nan],
        [1e308] * 3,
        [1.0, 2.0**-53],
        [1.0, 3 * 2.0**-53],
    ],
)
def test_bounds_of_a_sum_differ_if_the_rounding_is_in_doubt(squares):
    """In the last two, the exact sum is in the middle between two floats."""
    low, high = clipping.bounds_of_sum(np.array(squares, np.float64))
    assert low < high


@given(
    size=st.sampled_from([1, 5, TILE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]),
    owners=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_any_number_of_threads_gives_the_sum_of_one_plain_loop(size, owners, dtype, seed):
    """Thread `owners[i]` adds update i; the machine chooses the interleaving."""
    random = np.random.default_rng(seed)
    lengths = random.choice([1e-3, 0.9, 1.0, 50.0], len(owners)) / math.sqrt(size)
    updates = [(random.normal(size=size) * length).astype(dtype) for length in lengths]
    total = ExactSum(GRID, size)
    shares = [
        [u for u, owner in zip(updates, owners, strict=True) if owner == me] for me in set(owners)
    ]
    add_from_threads(total, shares)
    assert total.updates == len(owners)
    expected = sum((plain_steps(GRID, update) for update in updates), np.zeros(size, np.int64))
    assert np.array_equal(total.steps, expected)
    lost = expected - plain_steps(GRID, updates[-1])
    assert not np.array_equal(total.steps, lost), "a lost update would be noticed"


@pytest.mark.parametrize("size", [64, 8 * BLOCK])
def test_many_threads_that_add_to_the_same_blocks_lose_nothing(size):
    """Without the locks, updates of the larger size are lost in most runs on two cores."""
    each, threads = 200, 8
    steps, locks = np.zeros(size, np.int64), np.zeros(-(-size // BLOCK), np.int64)
    arguments = (np.ones(size, np.float32), NO_SQUARES, 1.0, 1.0, 1.0, steps, locks, 0)
    ready = threading.Barrier(threads)

    def work() -> None:
        ready.wait()
        for _ in range(each):
            add_in_blocks(*arguments)

    run_all([work] * threads)
    assert (steps == each * threads).all()
    assert not locks.any()


def test_an_add_leaves_out_a_locked_block_and_comes_back_to_it():
    size = 3 * BLOCK
    locks, steps = np.array([0, 1, 0]), np.zeros(size, np.int64)
    arguments = (np.ones(size, np.float32), NO_SQUARES, 1.0, 1.0, 1.0, steps, locks, 0)
    adding = threading.Thread(target=add_in_blocks, args=arguments)
    adding.start()
    wait_until(lambda: steps[0] == steps[-1] == 1)
    assert not steps[BLOCK : 2 * BLOCK].any()
    assert adding.is_alive()
    locks[1] = 0
    adding.join(30)
    assert (steps == 1).all()
    assert not locks.any()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_copies_of_updates_take_the_memory_of_one_per_core():
    size = 2 * BLOCK
    total, parts = ExactSum(GRID, size), [np.ones(BLOCK, np.float32)] * 2
    ready = threading.Barrier(12)
    copies = set[int]()
    squares = clipping.copied_sum_of_squares

    def counted(part: NDArray, copy: NDArray) -> NDArray:
        copies.add(copy.ctypes.data)
        return squares(part, copy)

    def work() -> None:
        ready.wait()
        for _ in range(20):
            total.add(*parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "copied_sum_of_squares", counted)
        run_all([work] * 12)
    assert total.updates == 240
    assert 1 <= len(copies) // 2 <= (os.cpu_count() or 1)  # two parts per copy


def test_an_update_of_one_contiguous_array_is_not_copied():
    total, update = ExactSum(GRID, 2 * BLOCK), np.ones(2 * BLOCK, np.float32)
    total.add(update)
    assert {copy.values.size for copy in total._copies.queue} == {0}
    total.add(update[::-1])
    assert 2 * BLOCK in {copy.values.size for copy in total._copies.queue}
    assert np.array_equal(total.steps, 2 * plain_steps(GRID, update))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fineness", [2.0**30, 2.0**55])  # conversions by shift, and plain ones
@pytest.mark.parametrize("value", [0.0, 1.5, -1e38, math.inf, -math.inf, math.nan])
def test_what_differs_from_what_the_norm_was_computed_of_is_left_out(dtype, fineness, value):
    """The first and the last tile are changed between the norm and the sum."""
    size = BLOCK + 4 * TILE + 100
    update = np.random.default_rng(0).normal(size=size).astype(dtype) / 1e3
    update[[1, -1]] = 1e-3  # neither is 0 before
    squares, expected = clipping.squares_of_tiles(update), np.zeros(size, np.int64)
    steps, locks = np.full(size, 7, np.int64), np.zeros(2, np.int64)
    add_in_blocks(update, squares, 0.5, fineness, fineness, expected, locks, 0)
    update[[1, -1]] = value
    add_in_blocks(update, squares, 0.5, fineness, fineness, steps, locks, 0)
    expected[:TILE] = expected[-100:] = 0
    assert np.array_equal(steps - 7, expected)
    assert np.count_nonzero(expected[TILE:-100]) > size // 2
    assert not locks.any()


def test_an_update_that_another_thread_keeps_changing_adds_at_most_the_clip_norm():
    size = 8 * TILE + 100
    update = np.zeros(size, np.float32)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            update[:] = 1e9
            update[:] = 1e-9

    changing = threading.Thread(target=change)
    changing.start()
    norms = []
    try:
        for _ in range(200):
            total = ExactSum(GRID, size)
            total.add(update)
            norms.append(math.sqrt(sum(step**2 for step in set_of_steps(total))) * GRID.step)
    finally:
        stop.set()
        changing.join()
    assert max(norms) <= 1.0


def set_of_steps(total: ExactSum) -> list[int]:
    return [int(step) for step in total.steps]


def test_threads_do_not_pass_the_number_of_updates_that_a_sum_holds():
    grid = Grid(2.0**-57, 1.0)
    total, refused = ExactSum(grid, 4), list[str]()
    assert grid.most_updates == 16

    def work() -> None:
        for _ in range(10):
            try:
                total.add(np.array([1.0, 0, 0, 0]))
            except InvalidInput as error:
                refused.append(str(error))

    run_all([work] * 4)
    assert total.updates == 16
    assert len(refused) == 24
    assert int(total.steps[0]) == 16 * int(plain_steps(grid, np.array([1.0]))[0])


def test_an_exception_in_a_thread_that_adds_leaves_no_half_of_an_update():
    """An update is in the sum as a whole or not at all, whenever the exception comes."""
    size = 40 * BLOCK
    update = np.full(size, 1e-4, np.float32)
    one = int(plain_steps(GRID, update)[0])
    for pause in np.linspace(0, 3e-3, 40).tolist():
        total, started = ExactSum(GRID, size), threading.Event()

        def work(total: ExactSum = total, started: threading.Event = started) -> None:
            try:
                started.set()
                for _ in range(1000):
                    total.add(update)
            except KeyboardInterrupt:
                return

        adding = threading.Thread(target=work)
        adding.start()
        started.wait()
        time.sleep(pause)
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        interrupt(ctypes.c_ulong(adding.ident or 0), ctypes.py_object(KeyboardInterrupt))
        adding.join(60)
        assert not adding.is_alive()
        whole = int(total.steps[0])
        assert (total.steps == whole).all()
        assert whole in (total.updates * one, (total.updates - 1) * one)
