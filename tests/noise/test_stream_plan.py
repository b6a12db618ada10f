"""A noise stream with a plan refuses what the plan's guarantee does not cover."""

from dataclasses import replace

import numpy as np
import pytest

import dpftrl
from dpftrl import ExactSum, Grid, NoiseKey, NoiseStream, Plan, clipping
from dpftrl.accounting import guarantee_of
from dpftrl.errors import InvalidInput, RoundsExceeded

KEY = NoiseKey.insecure_for_tests(3)
CLIP, UPDATES, SIZE, ROUNDS = 0.5, 4, 6, 5


def make_plan(rounds=ROUNDS, **options):
    chosen = {"epsilon": 8.0, **options} if "noise_multiplier" not in options else options
    return dpftrl.make_plan(population=100, report_goal=4, rounds=rounds, delta=1e-6, **chosen)


PLAN = make_plan()
BLT_PLAN = make_plan(mechanism="blt-b400")


def make_stream(plan=PLAN, size=SIZE) -> NoiseStream:
    return NoiseStream(plan, size, key=KEY, clip_norm=CLIP)


def clipped_sum(scale=1.0, kind=np.float64):
    """Four updates of exactly the clip norm, all in one direction, times a scale."""
    total = np.zeros(SIZE, kind)
    total[0] = UPDATES * CLIP * scale
    return total


def test_the_round_after_the_last_of_the_plan_is_refused():
    stream = make_stream()
    assert stream.rounds == ROUNDS
    for _ in range(ROUNDS):
        stream.add_to(clipped_sum(), updates=UPDATES)
    total = clipped_sum()
    with pytest.raises(RoundsExceeded, match="all 5 rounds of the plan are done"):
        stream.add_to(total, updates=UPDATES)
    assert np.array_equal(total, clipped_sum())


def test_a_loaded_stream_refuses_the_round_after_the_last_too(tmp_path):
    stream = make_stream()
    for _ in range(ROUNDS):
        stream.add_to(clipped_sum(), updates=UPDATES)
    stream.save(tmp_path / "noise")
    again = NoiseStream.load(tmp_path / "noise", PLAN, key=KEY, at_least=ROUNDS)
    with pytest.raises(RoundsExceeded):
        again.add_to(clipped_sum(), updates=UPDATES)


def test_the_plan_decides_the_number_type_of_the_buffers():
    with pytest.raises(TypeError, match="dtype"):
        NoiseStream(PLAN, SIZE, key=KEY, clip_norm=CLIP, dtype="float32")
    stream = make_stream(BLT_PLAN)
    stream.add_to(clipped_sum(), updates=UPDATES)
    assert stream.memory_bytes == 8 * SIZE * BLT_PLAN.mechanism.memory(ROUNDS) > 0


def test_saved_float32_buffers_are_refused_with_a_guarantee_for_float64(tmp_path):
    stream = NoiseStream.unchecked(
        BLT_PLAN.mechanism,
        SIZE,
        noise_multiplier=BLT_PLAN.noise_multiplier,
        key=KEY,
        clip_norm=CLIP,
        dtype="float32",
    )
    stream.add_to(clipped_sum())
    stream.save(tmp_path / "noise")
    with pytest.raises(InvalidInput, match="buffers in float32"):
        NoiseStream.load(tmp_path / "noise", BLT_PLAN, key=KEY, at_least=1)


def test_a_plan_of_version_0_1_keeps_its_float32_buffers(tmp_path):
    run = replace(BLT_PLAN.guarantee.runs[0], buffers="float32")
    old_plan = Plan(BLT_PLAN.fleet, guarantee_of([run], 1e-6))
    stream = make_stream(old_plan)
    stream.add_to(clipped_sum(), updates=UPDATES)
    assert stream.memory_bytes == 4 * SIZE * BLT_PLAN.mechanism.memory(ROUNDS)
    stream.save(tmp_path / "noise")
    NoiseStream.load(tmp_path / "noise", old_plan, key=KEY, at_least=1)
    with pytest.raises(InvalidInput, match="buffers in float32"):
        NoiseStream.load(tmp_path / "noise", BLT_PLAN, key=KEY, at_least=1)


def test_an_unchecked_stream_has_no_limit_of_rounds():
    stream = NoiseStream.unchecked(
        PLAN.mechanism, SIZE, noise_multiplier=PLAN.noise_multiplier, key=KEY, clip_norm=CLIP
    )
    assert stream.rounds is None
    for _ in range(ROUNDS + 1):
        stream.add_to(clipped_sum(1e6))
    assert stream.round == ROUNDS + 1


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.01, 1e6])
def test_a_sum_above_the_number_of_updates_times_the_clip_norm_is_refused(kind, scale):
    stream, total = make_stream(), clipped_sum(scale, kind)
    before = total.copy()
    with pytest.raises(InvalidInput, match="clip each update before summing"):
        stream.add_to(total, updates=UPDATES)
    assert np.array_equal(total, before)
    assert stream.round == 0
    stream.add_to(clipped_sum(kind=kind), updates=UPDATES)  # what was refused did no harm


def test_a_sum_on_a_grid_is_measured_in_the_units_of_the_clip_norm():
    grid = Grid.for_noise(PLAN.noise_multiplier, CLIP)
    steps = np.zeros(SIZE, np.int64)
    steps[0] = int(UPDATES * CLIP / grid.step)
    make_stream().add_to(steps.copy(), grid, updates=UPDATES)
    with pytest.raises(InvalidInput, match="clip each update"):
        make_stream().add_to(2 * steps, grid, updates=UPDATES)


def test_the_number_of_updates_must_be_stated():
    with pytest.raises(InvalidInput, match="updates="):
        make_stream().add_to(clipped_sum())


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_a_sum_that_is_not_finite_is_refused(strange):
    stream, total = make_stream(), clipped_sum()
    total[1] = strange
    with pytest.raises(InvalidInput, match="NaN or an infinity"):
        stream.add_to(total, updates=10**6)
    assert stream.round == 0


def test_an_exact_sum_needs_no_number_of_updates():
    total = ExactSum(Grid.for_noise(PLAN.noise_multiplier, CLIP), SIZE)
    total.add(np.full(SIZE, 1e6))
    make_stream().add_to(total)
    with pytest.raises(InvalidInput, match="its own grid"):
        make_stream().add_to(total, updates=1)


def test_an_exact_sum_clipped_to_another_norm_is_refused():
    total = ExactSum(Grid.for_noise(PLAN.noise_multiplier, 2 * CLIP), SIZE)
    with pytest.raises(InvalidInput, match="clips to"):
        make_stream().add_to(total)


def test_there_is_no_default_clip_norm():
    with pytest.raises(TypeError, match="clip_norm"):
        NoiseStream(PLAN, SIZE, key=KEY)  # pyright: ignore[reportCallIssue]


def test_more_coordinates_than_the_guarantee_covers_are_refused():
    with pytest.raises(InvalidInput, match="2\\^40"):
        make_stream(size=2**40 // ROUNDS + 1)


def test_a_state_is_refused_with_another_plan(tmp_path):
    stream = make_stream()
    stream.add_to(clipped_sum(), updates=UPDATES)
    stream.save(tmp_path / "noise")
    louder = make_plan(noise_multiplier=2 * PLAN.noise_multiplier, mechanism=PLAN.mechanism)
    with pytest.raises(InvalidInput, match="noise multiplier"):
        NoiseStream.load(tmp_path / "noise", louder, key=KEY, at_least=1)
    other = make_plan(mechanism="tree")
    with pytest.raises(InvalidInput):
        NoiseStream.load(tmp_path / "noise", other, key=KEY, at_least=1)


def test_a_thread_that_changes_an_update_after_its_norm_was_taken_adds_no_more(monkeypatch):
    """The change is made where a thread would make it: between the norm and the sum."""
    update, squares_of_tiles = np.ones(SIZE), clipping.squares_of_tiles

    def squares_then_change(values):
        squares = squares_of_tiles(values)
        update[:] = 1e6
        return squares

    monkeypatch.setattr(clipping, "squares_of_tiles", squares_then_change)
    grid = Grid.for_noise(PLAN.noise_multiplier, CLIP)
    total = ExactSum(grid, SIZE)
    total.add(update)
    assert (update == 1e6).all()
    assert np.linalg.norm(grid.values(total.steps)) <= CLIP
