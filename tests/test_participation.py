"""Participations, compared with patterns that are listed without the library."""

import itertools
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import FixedEpochs, MinSep, Participation
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.participation import Pattern

KINDS = [MinSep, FixedEpochs]
SMALL = st.integers(1, 9)


def patterns_with_gaps(rounds: int, min_sep: int, most: int) -> set[Pattern]:
    """Every subset of the rounds that breaks no rule."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(rounds), size) for size in range(1, rounds + 1)
    )
    return {
        subset
        for subset in subsets
        if len(subset) <= most and all(b - a >= min_sep for a, b in itertools.pairwise(subset))
    }


def patterns_of_epochs(rounds: int, min_sep: int, most: int) -> set[Pattern]:
    """The pattern of a client for each starting round."""
    return {tuple(range(start, rounds, min_sep))[:most] for start in range(rounds)}


@given(rounds=SMALL, min_sep=st.integers(1, 12), most=SMALL)
def test_min_sep_lists_every_pattern_with_gaps_and_no_other(rounds, min_sep, most):
    listed = list(MinSep(rounds, min_sep, most).patterns())
    assert len(listed) == len(set(listed))
    assert set(listed) == patterns_with_gaps(rounds, min_sep, most)


@given(rounds=st.integers(1, 25), min_sep=st.integers(1, 30), most=st.integers(1, 30))
def test_fixed_epochs_lists_the_longest_pattern_of_every_start(rounds, min_sep, most):
    listed = list(FixedEpochs(rounds, min_sep, most).patterns())
    allowed = patterns_of_epochs(rounds, min_sep, most)
    assert len(listed) == len(set(listed))
    assert set(listed) <= allowed
    longest = {one for one in allowed if not any(set(one) < set(other) for other in allowed)}
    assert set(listed) == longest


@pytest.mark.parametrize("kind", KINDS)
@given(rounds=st.integers(1, 10), min_sep=st.integers(1, 14), most=st.integers(1, 14))
def test_pattern_count_is_how_many_are_listed(kind, rounds, min_sep, most):
    participation = kind(rounds, min_sep, most)
    assert participation.pattern_count() == len(list(participation.patterns()))


@pytest.mark.parametrize("kind", KINDS)
@given(rounds=st.integers(1, 10), min_sep=st.integers(1, 14), most=st.integers(1, 14))
def test_the_earliest_pattern_is_allowed_and_as_long_as_any(kind, rounds, min_sep, most):
    participation = kind(rounds, min_sep, most)
    earliest = participation.earliest()
    listed = list(participation.patterns())
    assert earliest in listed
    assert len(earliest) == max(map(len, listed)) == participation.max_participations


@given(rounds=st.integers(1, 9), min_sep=st.integers(1, 9), most=st.integers(1, 9))
def test_fixed_epochs_are_a_part_of_min_sep(rounds, min_sep, most):
    everyone = set(MinSep(rounds, min_sep, most).patterns())
    assert set(FixedEpochs(rounds, min_sep, most).patterns()) <= everyone


def test_pattern_count_is_exact_where_listing_is_hopeless():
    # With min_sep 2 and no cap the subsets of 200 rounds are counted by Fibonacci numbers.
    before, last = 1, 2
    for _ in range(199):
        before, last = last, before + last
    assert MinSep(200, 2).pattern_count() == last - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rounds", "min_sep", "capped"),
    [(2052, 342, 6), (2053, 342, 7), (5, 1, 5), (5, 5, 1), (5, 6, 1), (5, 10**30, 1), (1, 1, 1)],
)
def test_without_a_cap_a_client_takes_part_as_often_as_the_gap_allows(
    kind, rounds, min_sep, capped
):
    assert kind(rounds, min_sep).max_participations == capped


@pytest.mark.parametrize("kind", KINDS)
def test_a_cap_that_binds_is_kept_and_one_that_does_not_is_lowered(kind):
    assert kind(10, 3, 2).max_participations == 2
    assert kind(10, 3, 4).max_participations == 4
    assert kind(10, 3, 5).max_participations == 4
    assert kind(10, 3, 5) == kind(10, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gap_above_the_rounds_means_once(kind):
    participation = kind(4, 9)
    assert set(participation.patterns()) == {(0,), (1,), (2,), (3,)}
    assert participation.earliest() == (0,)


def test_once_allows_every_single_round():
    assert set(MinSep.once(4).patterns()) == {(0,), (1,), (2,), (3,)}
    assert MinSep.once(1).max_participations == 1


@given(rounds=SMALL, between=st.integers(0, 10), most=SMALL)
def test_rounds_between_are_one_less_than_min_sep(rounds, between, most):
    participation = MinSep.from_rounds_between(rounds, between, most)
    assert participation == MinSep(rounds, between + 1, most)
    for pattern in participation.patterns():
        assert all(b - a - 1 >= between for a, b in itertools.pairwise(pattern))


def test_no_round_between_means_every_round():
    assert (0, 1, 2) in set(MinSep.from_rounds_between(3, 0).patterns())


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_are_equal_and_hash_alike(kind):
    one, same, other = kind(10, 3, 2), kind(np.int64(10), np.int32(3), 2), kind(10, 3, 3)
    assert one == same
    assert hash(one) == hash(same)
    assert repr(one) == repr(same)
    assert type(same.rounds) is type(same.min_sep) is int
    assert one != other
    assert len({one, same, other}) == 2


def test_min_sep_and_fixed_epochs_are_never_equal():
    assert MinSep(10, 3) != FixedEpochs(10, 3)
    assert len({MinSep(10, 3), FixedEpochs(10, 3)}) == 2


def test_the_value_can_be_read_off_its_repr():
    assert repr(FixedEpochs(10, 3, 2)) == "FixedEpochs(rounds=10, min_sep=3, max_participations=2)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["rounds", "min_sep", "max_participations", "brand_new"])
def test_participations_cannot_be_changed(kind, field):
    participation = kind(10, 3)
    with pytest.raises(FrozenInstanceError):
        setattr(participation, field, 1)
    assert participation == kind(10, 3)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError):
        Participation(10, 3)  # type: ignore[abstract]


NOT_COUNTS = [0, -1, -(10**20), float("nan"), float("inf"), 2.0, 2.5, True, False, "3", None, (3,)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("bad", NOT_COUNTS, ids=repr)
def test_values_that_are_not_counts_are_refused_with_the_value_in_the_message(kind, position, bad):
    arguments = [10, 3, 2]
    arguments[position] = bad
    with pytest.raises(InvalidInput) as refused:
        kind(*arguments)
    field = ("rounds", "min_sep", "max_participations")[position]
    assert repr(bad) in str(refused.value)
    assert field in str(refused.value)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, DpftrlError)


@pytest.mark.parametrize("bad", [bad for bad in NOT_COUNTS if bad != 0 or bad is False], ids=repr)
def test_rounds_between_that_are_not_counts_are_refused(bad):
    with pytest.raises(InvalidInput) as refused:
        MinSep.from_rounds_between(10, bad)
    assert repr(bad) in str(refused.value)


@pytest.mark.parametrize("bad", NOT_COUNTS, ids=repr)
def test_once_refuses_values_that_are_not_counts(bad):
    with pytest.raises(InvalidInput) as refused:
        MinSep.once(bad)
    assert repr(bad) in str(refused.value)


@pytest.mark.parametrize("bad", [np.True_, np.float64(3.0), np.array([3, 4])], ids=repr)
def test_numpy_values_that_are_not_counts_are_refused(bad):
    with pytest.raises(InvalidInput):
        MinSep(bad, 1)


def test_a_gap_that_is_off_by_one_would_be_noticed():
    """A negative control: patterns for the wrong gap differ from those of the oracle."""
    assert set(MinSep(6, 3).patterns()) != patterns_with_gaps(6, 2, 6)
    assert set(FixedEpochs(6, 3).patterns()) != patterns_of_epochs(6, 2, 6)
