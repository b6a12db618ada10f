"""Min-sep from what is known of a fleet: exact decimals, the timer's cap, and nonsense."""

import math
from dataclasses import FrozenInstanceError
from decimal import ROUND_FLOOR, Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl.errors import InvalidInput
from dpftrl.plan import Fleet

PLACES = 1000  # shares and factors are drawn in thousandths, so that whole numbers are the oracle

# As people write them, not as floating point stores them.
SHARES = ["1", "0.1", "0.2", "0.3", "0.7", "0.29", "0.57", "0.001", "1e-05"]
FACTORS = ["1", "1.1", "1.3", "1.7", "2.3", "10.1"]


def by_decimals(population: int, goal: int, share: str, factor: str) -> int:
    with localcontext() as context:
        context.prec = 200
        turns = Decimal(population) * Decimal(share) / (goal * Decimal(factor))
        return int(turns.to_integral_value(ROUND_FLOOR))


@given(
    population=st.integers(1, 10**12),
    goal=st.integers(1, 10**6),
    share=st.integers(1, PLACES),
    factor=st.integers(PLACES, 20 * PLACES),
)
def test_min_sep_is_a_quotient_of_whole_numbers(population, goal, share, factor):
    fleet = Fleet(population, goal, share / PLACES, factor / PLACES)
    turns = population * share // (goal * factor)
    if turns >= 1:
        assert fleet.min_sep() == turns
    else:
        with pytest.raises(InvalidInput, match="lower the report goal"):
            fleet.min_sep()


@given(turns=st.integers(1, 10**9), goal=st.integers(1, 10**6), factor=st.integers(1000, 9999))
def test_min_sep_is_exact_where_the_division_is_exact(turns, goal, factor):
    assert Fleet(turns * goal * factor, goal * 1000, over_selection=factor / 1000).min_sep() == (
        turns
    )


@given(
    population=st.integers(1, 10**15),
    goal=st.integers(1, 10**5),
    share=st.sampled_from(SHARES),
    factor=st.sampled_from(FACTORS),
)
def test_availability_and_over_selection_count_as_written_decimals(population, goal, share, factor):
    expected = by_decimals(population, goal, share, factor)
    fleet = Fleet(population, goal, float(share), float(factor))
    if expected >= 1:
        assert fleet.min_sep() == expected
    else:
        with pytest.raises(InvalidInput):
            fleet.min_sep()


@pytest.mark.parametrize(
    ("population", "goal", "share", "factor", "turns"),
    [(100, 1, 0.29, 1.0, 29), (11, 1, 0.7, 1.1, 7), (20, 2, 0.57, 1.9, 3)],
)
def test_min_sep_where_floating_point_would_be_one_too_small(
    population, goal, share, factor, turns
):
    """The control: the same formula in floats gives less, so these tests can tell."""
    assert Fleet(population, goal, share, factor).min_sep() == turns
    assert math.floor(population * share / (goal * factor)) == turns - 1


@pytest.mark.parametrize(
    ("population", "goal", "turns"),
    [
        (4_210_000, 6_500, 647),
        (8_900_000, 6_500, 1369),
        (16_600_000, 12_000, 1383),
        (830_000, 3_000, 276),
        (7, 7, 1),
        (10**18, 1, 10**18),
    ],
)
def test_min_sep_of_the_fleets_of_the_paper_and_of_extreme_fleets(population, goal, turns):
    assert Fleet(population, goal).min_sep() == turns


@given(days=st.integers(1, 5000), per_day=st.integers(1, 50_000), population=st.integers(1, 10**6))
def test_min_sep_is_at_most_the_length_of_the_timer(days, per_day, population):
    fleet = Fleet(population, 1, timer_days=days / 100, rounds_per_day=per_day / 100)
    lasts = days * per_day // 10_000
    if lasts < 1:
        with pytest.raises(InvalidInput, match="does not separate participations"):
            fleet.min_sep()
    else:
        assert fleet.timer_rounds == lasts
        assert fleet.min_sep() == min(population, lasts)


def test_timer_length_counts_as_written_decimals():
    def cap(days: float, per_day: float) -> int:
        return Fleet(10**9, 1, timer_days=days, rounds_per_day=per_day).min_sep()

    assert math.floor(0.29 * 100) == 28  # what floats would say
    assert (cap(0.29, 100), cap(1.1, 10), cap(0.1, 30), cap(2.5, 1)) == (29, 11, 3, 2)
    assert Fleet(10, 1).timer_rounds is None
    assert Fleet(50, 10, timer_days=30, rounds_per_day=100).min_sep() == 5


@given(goal=st.integers(1, 100), times=st.integers(1, 100), population=st.integers(10**5, 10**8))
def test_with_report_goal_changes_nothing_else(goal, times, population):
    fleet = Fleet(population, goal, 0.9, 1.3, timer_days=100, rounds_per_day=10)
    other = fleet.with_report_goal(goal * times)
    assert other.with_report_goal(goal) == fleet
    assert other.report_goal == goal * times
    assert other.min_sep() <= fleet.min_sep()
    assert other.min_sep() == min(1000, population * 9 // (goal * times * 13))


def test_numpy_integers_are_exact():
    fleet = Fleet(np.int64(10**18), np.int64(3), availability=0.3)  # pyright: ignore
    assert fleet.min_sep() == 10**17
    assert fleet == Fleet(10**18, 3, 0.3)


def test_a_fleet_is_immutable_and_hashable():
    fleet = Fleet(100, 10)
    with pytest.raises(FrozenInstanceError):
        fleet.population = 200  # pyright: ignore
    assert hash(fleet) == hash(Fleet(100, 10))


NAN, INF = math.nan, math.inf
NONSENSE = {
    "nobody": {"population": 0},
    "fewer than nobody": {"population": -5},
    "half a device": {"population": 2.5},
    "a float": {"population": 100.0},
    "a population that is true": {"population": True},
    "NaN devices": {"population": NAN},
    "no goal": {"report_goal": 0},
    "negative goal": {"report_goal": -1},
    "goal of text": {"report_goal": "10"},
    "infinite goal": {"report_goal": INF},
    "nobody available": {"availability": 0},
    "negative availability": {"availability": -0.1},
    "more than all": {"availability": 1.0000001},
    "NaN availability": {"availability": NAN},
    "infinite availability": {"availability": INF},
    "asks too few": {"over_selection": 0.999},
    "asks none": {"over_selection": 0},
    "asks a negative number": {"over_selection": -1.5},
    "asks NaN": {"over_selection": NAN},
    "asks everybody and more": {"over_selection": INF},
    "timer alone": {"timer_days": 3},
    "rounds a day alone": {"rounds_per_day": 3},
    "no timer": {"timer_days": 0, "rounds_per_day": 3},
    "negative timer": {"timer_days": -1, "rounds_per_day": 3},
    "NaN timer": {"timer_days": NAN, "rounds_per_day": 3},
    "endless timer": {"timer_days": INF, "rounds_per_day": 3},
    "no rounds a day": {"timer_days": 3, "rounds_per_day": 0},
    "negative rounds a day": {"timer_days": 3, "rounds_per_day": -2},
    "NaN rounds a day": {"timer_days": 3, "rounds_per_day": NAN},
    "endless rounds a day": {"timer_days": 3, "rounds_per_day": INF},
}


@pytest.mark.parametrize("given", NONSENSE.values(), ids=NONSENSE.keys())
def test_invalid_fleets_are_refused_in_one_line_that_names_the_field(given):
    with pytest.raises(InvalidInput) as refused:
        Fleet(**{"population": 100, "report_goal": 10, **given})
    message = str(refused.value)
    assert "\n" not in message
    assert any(name in message for name in given)


TOO_FEW = {
    "goal above the population": {"report_goal": 101},
    "too few available": {"report_goal": 60, "availability": 0.5},
    "over-selected": {"report_goal": 80, "over_selection": 1.3},
    "absurdly over-selected": {"report_goal": 80, "over_selection": 1e308},
    "a timer of less than a round": {"timer_days": 0.1, "rounds_per_day": 9},
}


@pytest.mark.parametrize("given", TOO_FEW.values(), ids=TOO_FEW.keys())
def test_a_fleet_that_cannot_fill_a_round_has_no_min_sep(given):
    fleet = Fleet(**{"population": 100, "report_goal": 10, **given})
    with pytest.raises(InvalidInput) as refused:
        fleet.min_sep()
    assert "\n" not in str(refused.value)


def test_min_sep_needs_enough_clients_for_one_round():
    assert Fleet(100, 100).min_sep() == 1
    assert Fleet(104, 80, over_selection=1.3).min_sep() == 1
    with pytest.raises(InvalidInput, match="104 clients"):
        Fleet(103, 80, over_selection=1.3).min_sep()
