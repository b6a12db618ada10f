"""Participations and samplings, compared with values that are computed without the library."""

import itertools
import json
import math
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import FixedEpochs, MinSep, Participation
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.participation import (
    BallsInBins,
    CyclicPoisson,
    Pattern,
    Poisson,
    Sampling,
    sampling_from_json,
)

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


# --- Sampling ----------------------------------------------------------------------------------

SAMPLINGS: dict[str, Sampling] = {
    "poisson": Poisson(1_000, 20, 300, max_batch_size=40),
    "cyclic-poisson": CyclicPoisson(1_000, 20, 300, max_batch_size=40, groups=8),
    "balls-in-bins": BallsInBins(1_000, 20, 300, max_batch_size=40),
}
SAMPLING_KINDS = [Poisson, CyclicPoisson, BallsInBins]
EVERY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
EVERY_SAMPLING_KIND = pytest.mark.parametrize("kind", SAMPLING_KINDS)


def test_samplings_state_their_numbers():
    poisson, cyclic, bins = SAMPLINGS.values()
    assert (poisson.probability, cyclic.probability, bins.bins) == (0.02, 0.16, 50)
    assert {sampling.steps_per_epoch for sampling in SAMPLINGS.values()} == {50}
    assert BallsInBins(101, 20, 10).bins == 6  # batches of about 17, never of more than 20
    assert [sampling.name for sampling in SAMPLINGS.values()] == list(SAMPLINGS)
    assert CyclicPoisson(10, 5, 1) == CyclicPoisson(10, 5, 1, groups=1)


@EVERY_SAMPLING
def test_a_sampling_is_the_same_after_json(sampling):
    content = json.loads(json.dumps(sampling.as_json()))
    assert sampling_from_json(content) == sampling
    assert content["sampling"] == sampling.name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "no sampling None"),
        ({"sampling": "uniform"}, "there are poisson, cyclic-poisson, balls-in-bins"),
        ({"sampling": ["poisson"]}, "no sampling"),
        ({"sampling": "poisson", "dataset_size": 10}, "not the numbers of poisson sampling"),
        ({**Poisson(10, 5, 1).as_json(), "groups": 2}, "not the numbers of poisson sampling"),
        ({**Poisson(10, 5, 1).as_json(), "batch_size": 11}, "larger than the data set"),
    ],
)
def test_json_that_is_no_sampling_is_refused(content, words):
    with pytest.raises(InvalidInput, match=words):
        sampling_from_json(content)


def test_samplings_state_the_neighboring_relations_that_they_support():
    assert Poisson.adjacencies == BallsInBins.adjacencies == ("zero-out", "add-or-remove")
    assert CyclicPoisson.adjacencies == ("zero-out",)
    assert {sampling.adjacency for sampling in SAMPLINGS.values()} == {"zero-out"}


def test_the_text_of_a_sampling_names_everything_that_its_guarantee_depends_on():
    start = "300 steps of about 20 (at most 40) of 1,000 examples, "
    for name, sampling in SAMPLINGS.items():
        assert str(sampling).startswith(f"{start}{name} sampling")
    assert "8 group(s)" in str(SAMPLINGS["cyclic-poisson"])
    whole = "300 steps of about 20 of 1,000 examples, poisson sampling"
    assert str(Poisson(1_000, 20, 300)) == whole


@EVERY_SAMPLING
def test_a_sampling_can_be_read_off_its_repr(sampling):
    assert eval(repr(sampling)) == sampling
    assert eval(repr(sampling.after(7))) != sampling


def test_samplings_that_differ_in_a_number_or_a_kind_are_not_equal():
    samplings = [
        *SAMPLINGS.values(),
        *(kind(*numbers) for kind in SAMPLING_KINDS for numbers in ((9, 2, 4), (9, 3, 4))),
        Poisson(8, 2, 4),
        Poisson(9, 2, 5),
        Poisson(9, 2, 4, max_batch_size=9),
        CyclicPoisson(9, 2, 4, groups=2),
    ]
    assert len(set(samplings)) == len(samplings)


@EVERY_SAMPLING
@pytest.mark.parametrize(
    "field", ["dataset_size", "batch_size", "steps", "max_batch_size", "groups", "name", "new"]
)
def test_samplings_cannot_be_changed(sampling, field):
    before = repr(sampling)
    with pytest.raises(FrozenInstanceError):
        setattr(sampling, field, 1)
    assert repr(sampling) == before


def test_the_base_class_of_samplings_is_abstract():
    with pytest.raises(TypeError):
        Sampling(10, 3, 5)  # type: ignore[abstract]


@EVERY_SAMPLING
def test_after_changes_the_number_of_steps_only(sampling):
    longer = sampling.after(1_000)
    assert longer.steps == 1_000
    assert sampling.steps == 300
    assert type(longer) is type(sampling)
    assert longer.after(300) == sampling
    with pytest.raises(InvalidInput, match="steps must be a whole number of at least 1, got 0"):
        sampling.after(0)


@EVERY_SAMPLING_KIND
@pytest.mark.parametrize("field", ["dataset_size", "batch_size", "steps", "max_batch_size"])
@pytest.mark.parametrize("bad", NOT_COUNTS, ids=repr)
def test_numbers_of_a_sampling_that_are_not_counts_are_refused(kind, field, bad):
    if field == "max_batch_size" and bad is None:
        return  # no limit
    with pytest.raises(InvalidInput) as refused:
        kind(**{"dataset_size": 10, "batch_size": 3, "steps": 2, field: bad})
    assert str(refused.value) == f"{field} must be a whole number of at least 1, got {bad!r}"


@pytest.mark.parametrize("bad", NOT_COUNTS, ids=repr)
def test_groups_that_are_not_a_count_are_refused(bad):
    with pytest.raises(InvalidInput, match="groups must be a whole number of at least 1"):
        CyclicPoisson(10, 3, 2, groups=bad)


@EVERY_SAMPLING_KIND
def test_numbers_of_a_sampling_that_contradict_each_other_are_refused(kind):
    with pytest.raises(InvalidInput, match="batch of 11 examples is larger than the data set, whi"):
        kind(10, 11, 5)
    with pytest.raises(InvalidInput, match="max_batch_size 4 is below the expected batch size 5"):
        kind(10, 5, 5, max_batch_size=4)
    for numbers in ((10**18 + 1, 1, 1), (1, 1, 10**18 + 1)):
        with pytest.raises(InvalidInput, match="must be at most 1,000,000,000,000,000,000"):
            kind(*numbers)
    assert kind(10, 10, 5, max_batch_size=10).batch_size == 10


def test_more_groups_than_batches_are_refused():
    message = "each of 5 groups of 39 examples is smaller than a batch of 8; use at most 4 groups"
    with pytest.raises(InvalidInput, match=message):
        CyclicPoisson(39, 8, 10, groups=5)
    assert CyclicPoisson(40, 8, 10, groups=5).probability == 1.0


@EVERY_SAMPLING_KIND
def test_numpy_integers_become_integers(kind):
    sampling = kind(np.int64(10), np.int32(3), np.uint8(2), max_batch_size=np.int16(4))
    assert repr(sampling) == repr(kind(10, 3, 2, max_batch_size=4))


# --- The probability that a batch is too large -------------------------------------------------


def too_large(trials: int, probability: Fraction, most: int) -> Fraction:
    """The exact probability that a binomial number exceeds `most`."""
    joins, of = probability.numerator, probability.denominator
    outcomes = sum(
        math.comb(trials, size) * joins**size * (of - joins) ** (trials - size)
        for size in range(most + 1, trials + 1)
    )
    return Fraction(outcomes, of**trials)


def exact_probability_of_overflow(sampling: Sampling) -> Fraction:
    """The expected number of batches that are too large and different, or 1 if it is above."""
    size, batch, most = sampling.dataset_size, sampling.batch_size, sampling.max_batch_size
    assert most is not None
    match sampling:
        case CyclicPoisson(groups=groups):
            largest_group = -(-size // groups)
            one = too_large(largest_group, Fraction(batch * groups, size), most)
            return min(Fraction(1), sampling.steps * one)
        case BallsInBins():
            bins = -(-size // batch)
            one = too_large(size, Fraction(1, bins), most)
            return min(Fraction(1), min(bins, sampling.steps) * one)
    return min(Fraction(1), sampling.steps * too_large(size, Fraction(batch, size), most))


OVERFLOWS = [
    *(Poisson(30, 5, 7, max_batch_size=most) for most in (5, 9, 12, 20, 29)),
    *(Poisson(997, 13, 10_000, max_batch_size=most) for most in (20, 40, 60)),
    *(CyclicPoisson(31, 3, 70, groups=5, max_batch_size=most) for most in (3, 4, 6)),
    *(CyclicPoisson(1_001, 10, 70, groups=9, max_batch_size=most) for most in (20, 30, 90)),
    *(BallsInBins(31, 5, steps, max_batch_size=9) for steps in (1, 6, 7, 8, 700)),
    *(BallsInBins(1_000, 30, 700, max_batch_size=most) for most in (40, 60, 90)),
]


@pytest.mark.parametrize("sampling", OVERFLOWS, ids=repr)
def test_the_overflow_probability_is_the_exact_binomial_one_rounded_up(sampling):
    exact, bound = exact_probability_of_overflow(sampling), Fraction(sampling.overflow_probability)
    assert exact <= bound <= exact * (1 + Fraction(2, 10**6))


def test_an_overflow_probability_for_another_limit_would_be_noticed():
    """A negative control: one example more or less changes every probability below 1."""
    for sampling in OVERFLOWS:
        exact = exact_probability_of_overflow(sampling)
        higher = replace(sampling, max_batch_size=sampling.max_batch_size + 1)
        assert exact == 1 or higher.overflow_probability < exact


@pytest.mark.parametrize("kind", [Poisson, BallsInBins])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_the_overflow_probability_bounds_that_of_any_batch_of_a_run(kind, steps):
    """Compared with the exact probability, from a list of all ways to draw the batches."""
    sampling = kind(6, 2, steps, max_batch_size=3)
    if kind is Poisson:
        exact = 1 - (1 - too_large(6, Fraction(1, 3), 3)) ** steps
    else:
        ways = list(itertools.product(range(3), repeat=6))
        used = range(min(steps, 3))
        overflows = sum(any(Counter(bins)[i] > 3 for i in used) for bins in ways)
        exact = Fraction(overflows, len(ways))
    assert exact <= sampling.overflow_probability <= 2 * exact


@EVERY_SAMPLING_KIND
def test_without_a_limit_or_with_one_that_cannot_be_exceeded_nothing_overflows(kind):
    assert kind(10, 5, 1_000).overflow_probability == 0
    assert kind(10, 5, 1_000, max_batch_size=10).overflow_probability == 0
    assert kind(10, 5, 1_000, max_batch_size=10**18).overflow_probability == 0
    assert kind(10, 4, 1_000, max_batch_size=9).overflow_probability > 0
    # Each of two groups has five examples.
    assert CyclicPoisson(10, 4, 1_000, groups=2, max_batch_size=5).overflow_probability == 0
    assert CyclicPoisson(10, 4, 1_000, groups=2, max_batch_size=4).overflow_probability > 0
