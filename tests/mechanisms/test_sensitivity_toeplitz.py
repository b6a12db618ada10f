"""Toeplitz strategies against brute force, and the majorant against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

import dpftrl
from conformance import participations, true_sensitivity
from dpftrl import DpftrlError, FixedEpochs, MinSep
from dpftrl.mechanisms._sensitivity import (
    column_sum,
    non_increasing_majorant,
    toeplitz_pattern_norm,
    toeplitz_sensitivity,
)

ENTRIES = st.floats(-1, 1, allow_nan=False, allow_subnormal=False)
# Every strategy has a positive diagonal.
DIAGONAL = st.floats(1e-3, 1)
SERIES = st.tuples(DIAGONAL, st.lists(ENTRIES, max_size=11)).map(lambda c: np.array([c[0], *c[1]]))


def dense(c: np.ndarray, rounds: int) -> np.ndarray:
    """LtToep(c), an entry at a time."""
    strategy = np.zeros((rounds, rounds))
    for i in range(rounds):
        for j in range(i + 1):
            if i - j < len(c):
                strategy[i, j] = c[i - j]
    return strategy


@given(c=SERIES)
def test_the_majorant_is_the_smallest_non_increasing_one(c):
    majorant = non_increasing_majorant(c)
    assert np.all(np.diff(majorant) <= 0)
    assert np.all(majorant >= np.abs(c))
    # Any that falls and covers |c| is at least the largest entry still to come.
    assert majorant.tolist() == [max(abs(x) for x in c[i:]) for i in range(len(c))]


@given(c=SERIES, data=st.data(), rounds=st.integers(1, 14))
def test_the_column_sum_is_c_times_the_earliest_pattern(c, data, rounds):
    participation = data.draw(participations(rounds))
    total = np.zeros(rounds)
    for k in range(participation.max_participations):
        for i, entry in enumerate(c):
            if k * participation.min_sep + i < rounds:
                total[k * participation.min_sep + i] += entry
    found = column_sum(c[:rounds], participation)
    np.testing.assert_allclose(found, total[: len(found)], atol=1e-14)
    assert np.all(total[len(found) :] == 0)


@given(c=SERIES, data=st.data(), rounds=st.integers(1, 9))
def test_any_coefficients_are_bounded_by_brute_force_from_below(c, data, rounds):
    participation = data.draw(participations(rounds))
    found = toeplitz_sensitivity(c, participation)
    attained, bound = true_sensitivity(dense(c, rounds), participation)
    assert found.value >= attained * (1 - 1e-12)
    assert found.lower_bound <= bound * (1 + 1e-12)
    assert found.lower_bound <= found.value
    if found.kind == "exact":
        assert found.value <= bound * (1 + 1e-9)


@given(c=SERIES, data=st.data(), rounds=st.integers(1, 9))
def test_decreasing_coefficients_have_an_exact_sensitivity(c, data, rounds):
    falling = np.sort(np.abs(c))[::-1]
    participation = data.draw(participations(rounds))
    found = toeplitz_sensitivity(falling, participation)
    assert found.kind == "exact"
    truth = true_sensitivity(dense(falling, rounds), participation)
    assert found.value == pytest.approx(truth.attained, rel=1e-12)


@given(c=SERIES, gap=st.integers(1, 6), rounds=st.integers(1, 12), most=st.integers(1, 6))
def test_no_more_coefficients_than_min_sep_are_exact_whatever_they_are(c, gap, rounds, most):
    few = c[:gap]
    participation = MinSep(rounds, gap, most)
    found = toeplitz_sensitivity(few, participation)
    assert found.kind == "exact"
    truth = true_sensitivity(dense(few, rounds), participation)
    assert found.value == pytest.approx(truth.bound, rel=1e-12)


@given(c=SERIES, data=st.data(), rounds=st.integers(1, 9))
def test_coefficients_beyond_the_rounds_and_zeros_at_the_end_change_nothing(c, data, rounds):
    participation = data.draw(participations(rounds))
    found = toeplitz_sensitivity(c, participation)
    cut = toeplitz_sensitivity(c[:rounds], participation)
    assert cut.kind == found.kind
    assert cut.value == pytest.approx(found.value, rel=1e-12)
    padded = toeplitz_sensitivity(np.append(c, np.zeros(4)), participation)
    assert padded.value >= found.value * (1 - 1e-12)
    attained, _ = true_sensitivity(dense(c, rounds), participation)
    assert padded.value >= attained * (1 - 1e-12)


@given(c=SERIES, data=st.data(), rounds=st.integers(1, 9))
def test_allowing_for_rounding_does_not_go_below_the_truth(c, data, rounds):
    """A series that falls up to rounding is taken as falling, and its majorant is what counts."""
    participation = data.draw(participations(rounds))
    noise = np.random.default_rng(len(c)).uniform(-1, 1, len(c)) * 1e-14
    nearly = np.sort(np.abs(c))[::-1] + 0.5
    nearly = nearly * (1 + noise)
    found = toeplitz_sensitivity(nearly, participation, rounding=1e-13)
    truth = true_sensitivity(dense(nearly, rounds), participation)
    assert found.kind == "exact"
    assert found.value >= truth.attained * (1 - 1e-14)
    assert found.value == pytest.approx(truth.attained, rel=1e-12)


def test_an_increase_above_rounding_is_not_ignored():
    c = np.array([1.0, 0.5, 0.5 + 1e-9])
    assert toeplitz_sensitivity(c, MinSep(3, 1), rounding=1e-13).kind == "upper bound"
    c = np.array([1.0, 0.5, -1e-9])
    assert toeplitz_sensitivity(c, MinSep(3, 1), rounding=1e-13).kind == "upper bound"


@given(c=SERIES, data=st.data(), rounds=st.integers(1, 9))
def test_pattern_norm_covers_every_choice_of_signs(c, data, rounds):
    pattern = sorted(data.draw(st.sets(st.integers(0, rounds - 1), min_size=1)))
    gram = dense(c, rounds).T @ dense(c, rounds)
    most = np.abs(gram[np.ix_(pattern, pattern)]).sum() ** 0.5
    found = toeplitz_pattern_norm(c, pattern, rounds)
    assert found >= most * (1 - 1e-12)
    if np.all(c >= 0):
        assert found == pytest.approx(most, rel=1e-12)


def test_taking_only_the_earliest_pattern_would_be_noticed():
    """The control: with a late bump, coming later can be worse than coming early."""
    c, participation = np.array([1.0, 0.0, 0.0, 1.0]), MinSep(4, 2)
    early = float(np.linalg.norm(column_sum(c, participation)))
    truth = true_sensitivity(dense(c, 4), participation)
    assert early < truth.attained
    found = toeplitz_sensitivity(c, participation)
    assert found.kind == "upper bound"
    assert found.value >= truth.attained


def check_not_underestimated(mechanism, participation, truth: float) -> None:
    """Squares leave the range of floats long before the numbers do: refusing is fine, 0 is not."""
    try:
        found = mechanism.sensitivity(participation)
    except DpftrlError:
        return
    assert truth <= found.value * (1 + 1e-12)
    assert np.isfinite(found.value)


@pytest.mark.parametrize("kind", [MinSep, FixedEpochs])
@pytest.mark.parametrize("power", [-600, -300, 300, 600])
@pytest.mark.parametrize("c", [[1.0, 0.5, 0.25], [1.0, 0.25, 0.5, 0.5]], ids=["falls", "does not"])
def test_very_small_and_very_large_coefficients_are_never_underestimated(c, power: int, kind):
    participation = kind(8, 2)
    truth = dpftrl.Toeplitz(c).sensitivity(participation).lower_bound * 2.0**power
    scaled = dpftrl.Toeplitz([x * 2.0**power for x in c])
    check_not_underestimated(scaled, participation, truth)


def test_the_inverse_of_very_large_coefficients_is_never_underestimated():
    tiny = dpftrl.BandedInverse([2.0**600, 2.0**599])
    check_not_underestimated(tiny, MinSep(8, 2), 2.0**-600)


def test_a_strategy_that_grows_out_of_range_is_refused():
    growing = dpftrl.BandedInverse([1.0, -3.0])
    check_not_underestimated(growing, MinSep(500, 5), 3.0**499)
    with pytest.raises(DpftrlError):
        growing.sensitivity(MinSep(2000, 5))


@pytest.mark.parametrize("decay", [0.9999967, 0.9999992657, 0.9999983])
def test_powers_of_many_rounds_never_make_a_general_blt_look_less_sensitive(decay):
    """Powers are computed by doubling, and their relative errors grow with the rounds."""
    rounds, scale = 400_000, 0.1
    with mp.workdps(40):
        square = mpf(decay) ** 2
        exact = mp.sqrt(1 + mpf(scale) ** 2 * (1 - square ** (rounds - 1)) / (1 - square))
        mechanism = dpftrl.GeneralBLT([decay], [scale])
        found = mechanism.sensitivity(MinSep(rounds, rounds))
        assert 0 <= mpf(found.value) / exact - 1 <= mpf(10) ** -9
        assert found.kind == "exact"
        if decay == 0.9999967:  # the negative control: without the bound, the norm is too small
            norm = float(np.linalg.norm(mechanism.coefficients(rounds)))
            assert mpf(norm) / exact - 1 < -3 * mpf(10) ** -12
