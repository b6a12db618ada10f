"""Exact sums, against arithmetic in fractions; and noise that is rounded to whole steps."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise_pieces import KEY, ONE_OF_EACH, key_of_row, normals_of_key, rows_of
from numpy.typing import NDArray

import dpftrl
from dpftrl.clipping import FINENESS, MOST_STEPS
from dpftrl.errors import InvalidInput
from dpftrl.noise import ExactSum, Grid, NoiseStream
from dpftrl.noise.kernels import add_rounded

Steps = NDArray[np.int64]
FINE = Grid(2.0**-30, 1.0)


def steps_of(grid: Grid, *updates: np.ndarray) -> Steps:
    total = ExactSum(grid, updates[0].size)
    for update in updates:
        total.add(update)
    return total.steps


def squared_norm(values) -> Fraction:
    return sum((Fraction(float(value)) ** 2 for value in np.ravel(values)), Fraction(0))


def squared_norm_of_steps(grid: Grid, steps: Steps) -> Fraction:
    return sum(int(step) ** 2 for step in steps) * Fraction(grid.step) ** 2


# --- Clipping ----------------------------------------------------------------------------------


def check_clipped(grid: Grid, update: np.ndarray, steps: Steps) -> None:
    """Never longer than the clip norm, in the same direction, and no shorter than it must be."""
    clip = Fraction(grid.clip_norm)
    assert squared_norm_of_steps(grid, steps) <= clip**2
    squared = squared_norm(update)
    # At least the length that it should have, and at most that times 1 + 2e-12: 40 digits.
    too_long = squared > clip**2 * (1 - Fraction(4, 10**12))
    norm = Fraction(math.isqrt(int(squared * 10**80)), 10**40) if squared else Fraction(0)
    for value, step in zip(update.tolist(), steps.tolist(), strict=True):
        exact = Fraction(value) / Fraction(grid.step)
        if too_long:
            exact = exact * clip / norm
        ideal = abs(exact)
        assert step == 0 or (step > 0) == (exact > 0)
        assert abs(step) <= ideal * (1 + Fraction(1, 10**11))
        assert abs(step) > ideal * (1 - Fraction(1, 10**11)) - 1


SIZES = st.integers(1, 12)


@st.composite
def updates(draw: st.DrawFn, clip: float) -> np.ndarray:
    """Ordinary numbers, with norms far from the clip norm and right at it."""
    size = draw(SIZES)
    number = st.floats(-1, 1, allow_nan=False)
    values = np.array(draw(st.lists(number, min_size=size, max_size=size)))
    norm = float(np.linalg.norm(values))
    if norm < 1e-100:
        return values
    wanted = draw(
        st.sampled_from([1e-9, 0.5, 1 - 1e-12, 1 - 1e-15, 1.0, 1 + 1e-15, 1 + 1e-12, 2.0, 1e9])
    )
    update = values * (clip * wanted / norm)
    return update.astype(draw(st.sampled_from(["float32", "float64"])))


CLIPS = [1.0, 0.1, 1 / 3, 1e-6, 12345.678, 2.0**-10, np.nextafter(1.0, 0), 1e15]


@settings(max_examples=300)
@given(data=st.data(), clip=st.sampled_from(CLIPS), bits=st.integers(1, 59))
def test_no_added_update_exceeds_the_clip_norm(data, clip, bits):
    grid = Grid(2.0 ** (math.floor(math.log2(clip)) - bits), clip)
    update = data.draw(updates(clip))
    check_clipped(grid, update, steps_of(grid, update))


@pytest.mark.parametrize("size", [1, 2047, 2048, 2049, 100_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1 - 1e-13, 1.0, 1 + 1e-13, 1 + 1e-12, 3.0])
def test_long_updates_are_clipped_exactly(size, dtype, length):
    """Where rounding in the norm adds up, and all of it to one side."""
    random = np.random.default_rng(size)
    for values in (np.ones(size), random.standard_normal(size), random.uniform(0.99, 1.01, size)):
        update = (values * (length / np.linalg.norm(values))).astype(dtype)
        steps = steps_of(Grid(2.0**-55, 1.0), update)
        squared = sum(step * step for step in steps.tolist())
        assert squared <= (2**55) ** 2
        norm = float(np.sqrt(np.sum(update.astype(np.longdouble) ** 2)))
        # Cutting off takes less than a step from each.
        assert squared >= (2**55 * min(norm, 1.0) * (1 - 1e-11) - size) ** 2


def test_an_update_that_is_not_cut_off_is_noticed():
    grid, update = Grid(2.0**-40, 1.0), np.array([0.6, 0.8, 1e-9])
    right = steps_of(grid, update)
    check_clipped(grid, update, right)
    rounded = np.rint(update / np.linalg.norm(update) / grid.step).astype(np.int64)
    for wrong in (right + np.array([1, 1, 1]), -right, right // 2, rounded + 1, right[::-1]):
        with pytest.raises(AssertionError):
            check_clipped(grid, update, wrong)


@given(
    values=st.lists(st.floats(-0.3, 0.3, allow_nan=False), min_size=1, max_size=8),
    bits=st.integers(0, 60),
)
@example(values=[0.1 + 0.2, -0.3], bits=60)
def test_short_updates_are_cut_off_toward_zero_and_nothing_else(values, bits):
    grid, update = Grid(2.0**-bits, 1.0), np.array(values)
    wanted = [math.trunc(Fraction(value) * 2**bits) for value in values]
    assert steps_of(grid, update).tolist() == wanted


@settings(max_examples=200)
@given(
    exponents=st.lists(st.floats(-300, 300), min_size=1, max_size=6),
    clip=st.floats(-300, 300),
    bits=st.integers(1, 59),
)
@example(exponents=[-170.0], clip=-200.0, bits=20)
@example(exponents=[-163.0, -163.0], clip=-165.0, bits=12)
def test_no_magnitude_gets_past_the_clip_norm(exponents, clip, bits):
    """Squares that underflow must not make an update look short."""
    clip_norm = 10.0**clip
    try:
        grid = Grid(2.0 ** (math.floor(math.log2(clip_norm)) - bits), clip_norm)
        total = ExactSum(grid, len(exponents))
        total.add(np.array([10.0**exponent for exponent in exponents]))
    except InvalidInput:
        return  # refused is fine, as long as nothing is let through
    assert squared_norm_of_steps(grid, total.steps) <= Fraction(clip_norm) ** 2


@pytest.mark.parametrize("bits", [49, 50, 51, 52, 53])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_most_steps_that_are_converted_in_vectors_and_the_fewest_that_are_not(bits, sign):
    grid = Grid(2.0**-bits, 1.0)
    nearly = 1 - 2.0**-39  # the longest that is not scaled
    for value in (nearly, nearly - 2.0**-bits, 0.5 + 2.0**-52, 0.5, 2.0**-bits, 2.0**-60):
        update = np.zeros(9)
        update[4] = sign * value
        steps = steps_of(grid, update)
        assert steps[4] == math.trunc(Fraction(sign * value) * 2**bits)
        assert not steps[[0, 1, 2, 3, 5, 6, 7, 8]].any()


def test_a_step_that_has_no_inverse_is_refused_or_works():
    try:
        grid = Grid(2.0**-1074, 2.0**-1070)
        steps = steps_of(grid, np.array([2.0**-1071, 0.0]))
    except InvalidInput:
        return
    assert steps.tolist() == [8, 0]


# --- Order -------------------------------------------------------------------------------------


@given(data=st.data())
def test_the_order_of_a_sum_does_not_matter(data):
    seed, size = data.draw(st.integers(0, 1000)), data.draw(SIZES)
    random = np.random.default_rng(seed)
    several = [
        (random.standard_normal(size) * 10.0 ** random.integers(-9, 9)).astype(kind)
        for kind in data.draw(st.lists(st.sampled_from(["float32", "float64"]), max_size=7))
    ] or [np.zeros(size)]
    wanted = steps_of(FINE, *several)
    for order in itertools.islice(itertools.permutations(several), 0, 5040, 97):
        assert np.array_equal(steps_of(FINE, *order), wanted)
    parts = [steps_of(FINE, update) for update in several]
    assert np.array_equal(sum(parts), wanted)


@pytest.mark.parametrize("length", [1e-3, 50.0])
def test_an_update_in_parts_is_the_same_update(length):
    random = np.random.default_rng(0)
    whole = random.standard_normal(5000).astype(np.float32)
    whole *= np.float32(length) / np.linalg.norm(whole)
    parts = whole[:1], whole[1:2050].astype(np.float64), whole[2050:2050], whole[2050:]
    total = ExactSum(FINE, 5000)
    total.add(*parts)
    assert total.updates == 1
    # The norm is that of all parts together; it is summed in another order.
    assert np.abs(total.steps - steps_of(FINE, whole)).max() <= (0 if length < 1 else 1)


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_numbers_at_any_address_are_added(kind, offset):
    values = np.cos(np.arange(3000)).astype(kind) / 100
    data = b"x" * offset + values.tobytes()
    shifted = np.frombuffer(data, kind, offset=offset)
    assert np.array_equal(steps_of(FINE, shifted), steps_of(FINE, values))


@pytest.mark.parametrize("last", [np.full(2, np.nan), np.zeros(3), np.zeros(2, int), [0.0, 0.0]])
def test_an_update_with_one_invalid_part_is_not_added_at_all(last):
    total = ExactSum(FINE, 4)
    with pytest.raises(InvalidInput):
        total.add(np.ones(2), last)
    assert total.updates == 0
    assert not total.steps.any()


def test_a_sum_in_floating_point_depends_on_the_order():
    """The control: what exact sums are for."""
    several = [np.array([value]) for value in (0.1, 0.2, 0.3, 0.7, 1e-3)]
    sums = {float(sum(order, np.zeros(1))[0]) for order in itertools.permutations(several)}
    assert len(sums) > 1


# --- Overflow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 1, 30, 59, 60])
def test_as_many_updates_as_a_sum_holds_do_not_overflow(bits):
    grid = Grid(2.0**-bits, 1.0)
    assert grid.most_updates * 2**bits <= MOST_STEPS
    assert (grid.most_updates + 1) * 2**bits > MOST_STEPS
    total = ExactSum(grid, 1)
    for _ in range(min(grid.most_updates, 2)):
        total.add(np.array([1.0]))
    total.updates = grid.most_updates - 1
    total.steps[:] = (grid.most_updates - 1) * 2**bits
    total.add(np.array([5.0]))
    assert 0 < int(total.steps[0]) <= MOST_STEPS
    before = total.steps.copy()
    with pytest.raises(InvalidInput, match="use a larger step"):
        total.add(np.array([1.0]))
    assert np.array_equal(total.steps, before)
    assert total.updates == grid.most_updates


def test_a_clip_norm_between_steps_counts_as_the_next_one():
    grid = Grid(1.0, 2.5)
    assert grid.most_updates == MOST_STEPS // 3


# --- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf, 1e200])
def test_updates_that_are_not_finite_are_refused_and_change_nothing(strange):
    total = ExactSum(FINE, 3000)
    total.add(np.full(3000, 0.01))
    before = total.steps.copy()
    for place in (0, 2047, 2048, 2999):
        update = np.zeros(3000)
        update[place] = strange
        with pytest.raises(InvalidInput, match="finite"):
            total.add(update)
    assert np.array_equal(total.steps, before)
    assert total.updates == 1


@pytest.mark.parametrize(
    "update",
    [
        np.zeros(3),
        np.zeros(5),
        np.zeros(0),
        np.zeros(4, np.float16),
        np.zeros(4, np.int64),
        np.zeros(4, np.complex128),
        np.zeros(4, object),
        np.zeros(4, bool),
        np.zeros(4, ">f8"),
        np.zeros(4, ">f4"),
        [0.1, 0.2, 0.3, 0.4],
        0.5,
        None,
    ],
    ids=lambda update: f"{type(update).__name__} {getattr(update, 'dtype', '')}",
)
def test_values_that_are_not_updates_are_refused_and_change_nothing(update):
    total = ExactSum(FINE, 4)
    with pytest.raises(InvalidInput):
        total.add(update)
    assert not total.steps.any()
    assert total.updates == 0


def test_updates_of_any_shape_and_layout_are_taken():
    values = np.arange(24.0).reshape(4, 6) / 100
    wanted = steps_of(FINE, values.reshape(-1))
    assert np.array_equal(steps_of(FINE, values), wanted)
    assert np.array_equal(steps_of(FINE, np.asfortranarray(values)), wanted)
    assert np.array_equal(steps_of(FINE, np.repeat(values, 2, axis=1)[:, ::2]), wanted)
    values.flags.writeable = False
    assert np.array_equal(steps_of(FINE, values), wanted)


def test_adding_does_not_change_the_update():
    update = np.array([3.0, 4.0])
    steps_of(FINE, update)
    assert update.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("step", [0.0, -1.0, 0.3, 3.0, math.nan, math.inf, 1 + 2**-52, "1", None])
def test_a_step_is_a_power_of_two(step):
    with pytest.raises((InvalidInput, TypeError)):
        Grid(step, 1.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_norm_is_positive(clip):
    with pytest.raises(InvalidInput):
        Grid(1.0, clip)


def test_a_step_that_is_too_fine_is_refused():
    Grid(2.0**-60, 1.0)
    for step, clip in ((2.0**-61, 1.0), (2.0**-60, 2.0), (2.0**-1000, 1e300)):
        with pytest.raises(InvalidInput, match=r"too fine|clip_norm must be"):
            Grid(step, clip)


@given(noise_multiplier=st.floats(1e-6, 1e6), clip=st.floats(1e-6, 1e6), bits=st.integers(0, 40))
def test_a_grid_for_noise_is_as_fine_as_was_asked_for(noise_multiplier, clip, bits):
    grid = Grid.for_noise(noise_multiplier, clip, 2**bits)
    assert math.frexp(grid.step)[0] == 0.5
    assert grid.step * 2**bits <= noise_multiplier * clip * (1 + 1e-12)
    assert grid.step * 2**bits > noise_multiplier * clip / 2 * (1 - 1e-12)
    assert grid.clip_norm == clip
    assert (
        Grid.for_noise(noise_multiplier, clip).step
        == Grid.for_noise(noise_multiplier, clip, FINENESS).step
    )


@pytest.mark.parametrize(
    "wrong",
    [(1e-300, 1e-20), (1e200, 1e200), (1, 1, 0), (1, 1, -4), (1, 1, math.nan), (1, math.nan)],
    ids=str,
)
def test_a_grid_for_no_noise_is_refused(wrong):
    with pytest.raises(InvalidInput):
        Grid.for_noise(*wrong)


def test_values_are_steps_times_the_step_over_the_divisor():
    steps = np.array([0, 1, -3, 2**40], np.int64)
    assert Grid(0.25, 1.0).values(steps).tolist() == [0, 0.25, -0.75, 2**38]
    assert Grid(0.25, 1.0).values(steps, divisor=2).tolist() == [0, 0.125, -0.375, 2**37]
    for wrong in (0, -1, math.nan):
        with pytest.raises(InvalidInput):
            Grid(0.25, 1.0).values(steps, divisor=wrong)


# --- Noise on the grid -------------------------------------------------------------------------


def test_noise_is_rounded_to_the_nearest_step_and_halves_to_even():
    noise = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999999999999994, 0.25, -0.75, 1e9 + 0.5])
    update = np.full(len(noise), 10, np.int64)
    add_rounded(noise, 1.0, update)
    assert (update - 10).tolist() == [0, 2, 2, 0, -2, -2, 0, 0, -1, 10**9]
    add_rounded(noise, 2.0, update[:3])
    assert (update[:3] - 10).tolist() == [1, 5, 7]


@pytest.mark.parametrize("name", ["blt", "tree", "sqrt", "independent"])
def test_a_release_is_the_sum_plus_rounded_noise_exactly(name):
    size, mechanism = 3000, ONE_OF_EACH[name]
    grid = Grid.for_noise(3.0, 0.5)
    stream = NoiseStream.unchecked(
        mechanism, size, noise_multiplier=3.0, clip_norm=0.5, key=KEY, dtype="float64"
    )
    state, random = mechanism.init(size), np.random.default_rng(0)
    for _ in range(5):
        total = ExactSum(grid, size)
        for _ in range(3):
            total.add(random.standard_normal(size))
        before = total.steps.copy()
        stream.add_to(total.steps, grid)
        noise, state = mechanism.step(state, rows_of(stream, size))
        exact = 3.0 * 0.5 / grid.step * noise.astype(np.longdouble)
        off = (total.steps - before).astype(np.longdouble) - exact
        assert np.all(np.abs(off) <= 0.5 + 1e-6)
        # Adding rounded noise is rounding the sum plus the noise.
        assert np.array_equal(total.steps, np.rint(before + np.rint(exact)).astype(np.int64))


def test_a_grid_and_floating_point_get_noise_of_the_same_size():
    """Not the same noise: these are different sums, if both were released."""
    size, grid = 100_000, Grid.for_noise(2.0, 1.0)
    steps, floats = np.zeros(size, np.int64), np.zeros(size)
    for update, on in ((steps, grid), (floats, None)):
        stream = NoiseStream.unchecked(
            dpftrl.Independent(), size, clip_norm=1.0, noise_multiplier=2.0, key=KEY
        )
        stream.add_to(update, on)
        z = normals_of_key(key_of_row(stream, 0), size)
        made = grid.values(update) if on else update
        np.testing.assert_allclose(made, 2.0 * z, rtol=0, atol=grid.step)
    correlation = np.corrcoef(steps, floats)[0, 1]
    assert abs(correlation) < 5 / math.sqrt(size)


@pytest.mark.parametrize("noise_multiplier", [1.0, 10.0])
@pytest.mark.parametrize("bits", [24, 50, 58, 59, 60])
@pytest.mark.parametrize("name", ["independent", "blt", "tree-vanilla"])
def test_noise_fits_into_the_integers_of_every_accepted_grid(bits, noise_multiplier, name):
    """Noise that does not fit 64 bits must not become the same number for many coordinates."""
    size, grid = 20_000, Grid(2.0**-bits, 1.0)
    update = np.zeros(size, np.int64)
    try:
        stream = NoiseStream.unchecked(
            ONE_OF_EACH[name], size, clip_norm=1.0, noise_multiplier=noise_multiplier, key=KEY
        )
        stream.add_to(update, grid)
    except InvalidInput:
        assert not update.any()
        return
    # The first round has a row of Z alone: as many as there are coordinates, none beyond 5.
    assert np.std(grid.values(update)) == pytest.approx(noise_multiplier, rel=0.03)
    assert len(np.unique(update)) > 0.99 * size
    # There must be room for eleven standard deviations on top of a full sum.
    assert noise_multiplier * 11.6 * 2**bits + MOST_STEPS < 2**63


def test_sums_and_grids_that_do_not_match_are_refused_and_change_nothing():
    size, grid = 300, Grid.for_noise(1.0, 1.0)
    stream = NoiseStream.unchecked(
        ONE_OF_EACH["blt"], size, clip_norm=1.0, noise_multiplier=1.0, key=KEY
    )
    wrong = [
        (np.ones(size, np.int64), None),
        (np.ones(size), grid),
        (np.ones(size, np.float32), grid),
        ([np.ones(100, np.int64), np.ones(200)], grid),
        ([np.ones(100, np.int64), np.ones(200)], None),
        (np.ones(size, np.int64), Grid(grid.step, 2.0)),
        (np.ones(size, np.int64), Grid(grid.step, np.nextafter(1.0, 2.0))),
        (np.ones(size - 1, np.int64), grid),
        (np.ones(size + 1), None),
        (np.ones(size, np.int32), grid),
        (np.ones(size, np.uint64), grid),
        (np.full(size, np.nan), None),
        (np.append(np.ones(size - 1), np.inf), None),
        ([], None),
    ]
    for update, on in wrong:
        with pytest.raises(InvalidInput):
            stream.add_to(update, on)
        for part in update if isinstance(update, list) else [update]:
            assert np.all((part == 1) | ~np.isfinite(part) | np.isnan(part))
    assert stream.round == 0
    released, wanted = np.ones(size, np.int64), np.ones(size, np.int64)
    stream.add_to(released, grid)
    NoiseStream.unchecked(
        ONE_OF_EACH["blt"], size, clip_norm=1.0, noise_multiplier=1.0, key=KEY
    ).add_to(wanted, grid)
    assert np.array_equal(released, wanted)


@pytest.mark.parametrize("bits", [30, 50, 51, 52, 58])
def test_updates_add_up_on_grids_that_are_converted_in_vectors_and_on_finer_ones(bits):
    grid, update = Grid(2.0**-bits, 1.0), np.array([0.25, -0.5, 2.0**-bits, 0.0])
    wanted = [2 * int(value * 2**bits) for value in update.tolist()]
    assert steps_of(grid, update, update, -update, update).tolist() == wanted


def test_many_small_parts_do_not_hide_behind_a_large_one():
    tiny = np.full(1, 1.05e-8)  # its square is lost where it is added to 1
    grid = Grid(2.0**-58, 1.0)
    total = ExactSum(grid, 40_001)
    total.add(np.ones(1), *[tiny] * 40_000)
    assert squared_norm_of_steps(grid, total.steps) <= 1
