"""Joint vectors of update and bit, against fractions and brute force; and the rule of the norm."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dpftrl
from dpftrl import AdaptiveClipping, MinSep
from dpftrl.adaptive_clipping import (
    ClippedRound,
    ClipState,
    MovingClipNorm,
    adaptive,
    check_clip_norm,
)
from dpftrl.clipping import SLACK, JointClip
from dpftrl.errors import InvalidInput
from dpftrl.noise import ExactSum, Grid, NoiseKey, NoiseStream

GRID = Grid(2.0**-30, 1.0)


def joint_steps(update: np.ndarray, clip_norm: float, beta: float, grid: Grid = GRID) -> list[int]:
    total = ExactSum(grid, update.size, JointClip(clip_norm, beta))
    total.add(update)
    return total.steps.tolist()


def squared(steps: list[int], grid: Grid = GRID) -> Fraction:
    return sum(step * step for step in steps) * Fraction(grid.step) ** 2


# --- The norm of the joint vector ---------------------------------------------------------------

NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),  # includes subnormal and huge numbers
    st.floats(-2, 2),
    st.sampled_from([5e-324, -2.2e-308, 1e-160, 1e-162, 1.3e154, -1e200, 1.7e308, 0.0]),
)
CLIP_NORMS = st.one_of(st.floats(1e-120, 1e120), st.floats(0.01, 100), st.sampled_from([1.0, 2.0]))
BETAS = st.one_of(st.floats(1e-6, 0.9), st.sampled_from([0.1, 0.5, 0.9]))


@settings(max_examples=200)
@given(st.lists(NUMBERS, min_size=1, max_size=6), CLIP_NORMS, BETAS, st.integers(1, 58))
@example([1.0, 1.0], math.sqrt(2), 0.1, 50)
@example([1e-162] * 6, 1e-120, 0.9, 55)
@example([1.3e154], 1e-120, 0.9, 58)
def test_update_and_bit_together_never_exceed_norm_1(values, clip_norm, beta, bits):
    grid = Grid(2.0**-bits, 1.0)
    try:
        steps = joint_steps(np.array(values), clip_norm, beta, grid)
    except InvalidInput:
        return  # its squares overflow, and it counts as zeros
    assert squared(steps, grid) <= 1
    assert abs(steps[-1]) == math.floor(Fraction(beta) * 2**bits)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [0.5, 1 - 1e-13, 1.0, 1 + 1e-13, 1 + 1e-12, 3.0])
def test_long_vectors_at_the_clip_norm_never_exceed_norm_1(dtype, length):
    grid, clip_norm = Grid(2.0**-55, 1.0), 0.37
    for values in (np.ones(50_000), np.random.default_rng(0).standard_normal(50_000)):
        update = (values * (clip_norm * length / np.linalg.norm(values))).astype(dtype)
        steps = joint_steps(update, clip_norm, 0.3, grid)
        assert squared(steps, grid) <= 1
        shares = (squared(steps[:-1], grid), squared(steps[-1:], grid))
        assert math.isclose(shares[0], 0.91 * min(length, 1) ** 2, rel_tol=1e-6)
        assert math.isclose(shares[1], 0.09, rel_tol=1e-12)


def test_a_factor_without_room_for_rounding_is_noticed(monkeypatch):
    update = np.full(50_000, 0.37 / math.sqrt(50_000))
    grid = Grid(2.0**-55, 1.0)
    assert squared(joint_steps(update, 0.37, 0.3, grid), grid) <= 1
    honest = JointClip.factor
    monkeypatch.setattr(JointClip, "factor", lambda *args: honest(*args) * (1 + 2 * SLACK))
    assert squared(joint_steps(update, 0.37, 0.3, grid), grid) > 1


def test_the_bit_says_whether_the_norm_is_at_most_the_clip_norm():
    for norm, sign in ((0.0, 1), (1.9, 1), (2.0, 1), (2.000001, -1), (1e100, -1)):
        steps = joint_steps(np.array([0.0, norm]), 2.0, 0.25)
        assert steps[-1] == sign * 2**28
        wanted = math.sqrt(1 - 0.25**2) * min(norm / 2.0, 1.0)
        assert steps[1] * GRID.step == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_an_update_that_cannot_be_used_adds_nothing_to_the_bits(bad):
    total = ExactSum(GRID, 2, JointClip(1.0, 0.1))
    with pytest.raises(InvalidInput):
        total.add(np.array([bad, 0.0]))
    assert total.steps.tolist() == [0, 0, 0]


def test_a_joint_sum_needs_a_grid_of_clip_norm_1_and_values_in_range():
    with pytest.raises(InvalidInput, match="clip norm 1"):
        ExactSum(Grid(2.0**-20, 0.5), 3, JointClip(1.0, 0.1))
    for clip_norm, beta in ((0.0, 0.1), (math.nan, 0.1), (1e200, 0.1), (1.0, 0.0), (1.0, math.nan)):
        with pytest.raises(InvalidInput):
            JointClip(clip_norm, beta)


# --- Sensitivity, by brute force ----------------------------------------------------------------


def patterns(rounds: int, min_sep: int) -> list[tuple[int, ...]]:
    """All sets of rounds that one client may take part in."""
    return [
        rows
        for count in range(1, rounds + 1)
        for rows in itertools.combinations(range(rounds), count)
        if all(b - a >= min_sep for a, b in itertools.pairwise(rows))
    ]


def largest_shift(strategy: np.ndarray, min_sep: int, joint_of) -> float:
    """How far one client can move C X, over patterns, clip norms and updates."""
    rounds, largest = strategy.shape[1], 0.0
    random = np.random.default_rng(0)
    updates = [np.array(u) for u in ([1.0, 0.0], [-9.0, 0.0], [1e-9, 0.0], [30.0, -40.0])]
    for rows in patterns(rounds, min_sep):
        for choice in itertools.product(updates, repeat=min(len(rows), 2)):
            clip_norms = np.exp(random.normal(0, 2, rounds))  # any past: it is an adaptive choice
            x = np.zeros((rounds, 3))
            for row, update in zip(rows, itertools.cycle(choice)):
                x[row] = joint_of(update * clip_norms[row], clip_norms[row])
            largest = max(largest, float(np.linalg.norm(strategy @ x)))
    return largest


def joint_of_library(update: np.ndarray, clip_norm: float) -> np.ndarray:
    return np.array(joint_steps(update, clip_norm, 0.3)) * GRID.step


def joint_without_scaling(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """A mistake: the bit is put beside an update of norm 1."""
    norm = np.linalg.norm(update)
    bit = 0.3 if norm <= clip_norm else -0.3
    return np.append(update / max(norm, clip_norm), bit)


@pytest.mark.parametrize("name", ["blt-b400", "tree", "independent"])
def test_no_client_moves_updates_and_bits_beyond_the_sensitivity(name):
    limits = MinSep(5, 2)
    mechanism = dpftrl.mechanism(name, limits)
    allowed = mechanism.sensitivity(limits).value
    strategy = mechanism.strategy(5)
    found = largest_shift(strategy, 2, joint_of_library)
    assert found <= allowed * (1 + 1e-12)
    assert found >= allowed * (1 - 1e-6)  # the brute force finds the worst case
    assert largest_shift(strategy, 2, joint_without_scaling) > allowed * 1.02


# --- The noise and its digest --------------------------------------------------------------------


def test_the_noise_depends_on_the_clip_norm_of_the_round():
    def noise(clip_norm: float, beta: float) -> list[int]:
        stream = NoiseStream.unchecked(
            dpftrl.mechanism("blt-b400"),
            3,
            noise_multiplier=1.0,
            key=NoiseKey.insecure_for_tests(1),
            clip_norm=1.0,
        )
        total = ExactSum.of(GRID, np.zeros(3, np.int64), 1, JointClip(clip_norm, beta))
        stream.add_to(total)
        return total.steps.tolist()

    assert noise(0.5, 0.1) == noise(0.5, 0.1)
    assert len({tuple(noise(*one)) for one in ((0.5, 0.1), (0.25, 0.1), (0.5, 0.2))}) == 3


# --- The rule ------------------------------------------------------------------------------------


def test_the_clip_norm_moves_geometrically_and_settles():
    options = AdaptiveClipping(start=1.0, quantile=0.5, beta=0.1, learning_rate=0.8)
    first = options.following(ClipState(1.0), 1.0)  # nothing was clipped
    assert first == ClipState(pytest.approx(math.exp(-0.4)), 0)
    second = options.following(first, 0.0)  # it turns: the search is over
    assert second == ClipState(pytest.approx(math.exp(-0.4 + 0.4 / math.sqrt(2))), 1)
    third = options.following(second, 0.0)
    assert third.settled == 2
    assert third.clip_norm == pytest.approx(second.clip_norm * math.exp(0.4 / math.sqrt(3)))


@given(
    st.lists(st.floats(-1e300, 1e300), max_size=30),
    st.sampled_from([(0.5, 0.1, 1.0), (1e-6, 1e-6, 1e6), (1.0, 1.0, 1.0), (1e-100, 1e-120, 1e120)]),
)
def test_the_clip_norm_stays_within_its_bounds(shares, bounds):
    start, minimum, maximum = bounds
    options = AdaptiveClipping(start=start, minimum=minimum, maximum=maximum)
    options.check()
    state = ClipState(options.start)
    for share in shares:
        state = options.following(state, share)
        assert minimum <= state.clip_norm <= maximum


@pytest.mark.parametrize("wrong", [0.01, 100.0])
@pytest.mark.parametrize("spread", [0.01, 0.5])
def test_a_start_that_is_wrong_by_100_recovers_in_40_rounds(wrong, spread):
    random = np.random.default_rng(1)
    options = AdaptiveClipping(start=wrong)
    state = ClipState(options.start)
    for row in range(300):
        share = (random.normal(0, spread, 100) <= math.log(state.clip_norm)).mean()
        state = options.following(state, share + random.normal(0, 0.1))
        if row >= 40:
            assert 0.5 < state.clip_norm < 2


def test_the_mean_is_divided_by_the_goal_and_scaled_back():
    options = AdaptiveClipping(start=2.0, beta=0.6)
    moving = MovingClipNorm(options, GRID, 4, None)
    total = ExactSum(GRID, 2, moving.joint)
    for update in ([1.0, 0.0], [6.0, 8.0], [0.0, 50.0]):
        total.add(np.array(update))
    mean, clipped = moving.release(total)  # without noise
    assert mean == pytest.approx([(1 + 1.2) / 4, (1.6 + 2.0) / 4], abs=1e-7)
    assert clipped == ClippedRound(ClipState(2.0, 0), -math.floor(0.6 * 2**30))  # 1 of 3
    moving.follow(clipped)
    share = (1 - 1 / 4) / 2  # of the goal; an absent client counts as half
    assert moving.state.clip_norm == pytest.approx(2.0 * math.exp(-(share - 0.5)), rel=1e-6)
    assert MovingClipNorm(options, GRID, 4, clipped).state == moving.state


def test_the_model_is_spared_while_nothing_is_clipped():
    moving = MovingClipNorm(AdaptiveClipping(start=1e5), GRID, 3, None)
    total = ExactSum(GRID, 2, moving.joint)
    for _ in range(3):
        total.add(np.array([1.0, 2.0]))
    mean, _ = moving.release(total)
    assert mean.tolist() == [0.0, 0.0]
    moving.follow(ClippedRound(ClipState(1e5, 4), -5))  # the search is over
    assert moving.release(total)[0].tolist() != [0.0, 0.0]


@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_the_search_ends_at_a_bound(bound):
    """Otherwise a start at the minimum would spare the model for ever."""
    options = AdaptiveClipping(start=0.5, **{bound: 0.5})
    share = 1.0 if bound == "minimum" else 0.0
    assert options.following(ClipState(0.5), share) == ClipState(0.5, 1)
    assert not options.holds(ClipState(0.5), share)
    assert options.following(ClipState(0.5, 7), share) == ClipState(0.5, 8)


# --- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"start": 0.0},
        {"start": math.nan},
        {"start": 1e7},
        {"start": 1e-7},
        {"minimum": 0.0},
        {"maximum": math.inf},
        {"minimum": 1e-200, "start": 1e-200},
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"beta": 0.0},
        {"beta": 0.95},
        {"beta": math.nan},
        {"learning_rate": 0.0},
        {"learning_rate": 11.0},
        {"learning_rate": math.nan},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidInput, match="clip_norm"):
        AdaptiveClipping(**options).check()


def test_a_clip_norm_is_a_number_or_adaptive():
    assert adaptive(1.5) is None
    assert adaptive("adaptive") == AdaptiveClipping()
    check_clip_norm(AdaptiveClipping(start=2.0))
    for wrong in ("adaptiv", 0.0, -1.0, math.nan, AdaptiveClipping(beta=2.0)):
        with pytest.raises(InvalidInput):
            check_clip_norm(wrong)


def test_noise_too_large_for_the_bit_is_refused():
    assert AdaptiveClipping().grid(1.0).clip_norm == 1.0
    with pytest.raises(InvalidInput, match="noise multiplier"):
        AdaptiveClipping(beta=0.1).grid(2.0**24)
