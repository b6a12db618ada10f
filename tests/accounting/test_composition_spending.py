"""`spending`, compared with `account` for every number of rounds, and with brute force."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_mu import with_rounding

import dpftrl
from conformance import EVERY, Altered, Family, blts, true_sensitivity
from dpftrl import Mechanism, MinSep
from dpftrl.accounting import Spent, account, spending
from dpftrl.errors import InvalidInput

every = pytest.mark.parametrize("family", EVERY, ids=str)
UNCAPPED = 10**9
SLOWEST = dpftrl.mechanism("blt-b400").theta[0]
CLOSE = 1e-9  # relative; how far above the truth a long sum may be
NEVER_BELOW = 1e-12


def first(count: int, spent: Iterator[Spent]) -> list[Spent]:
    return list(itertools.islice(spent, count))


def check_rounds(
    mech: Mechanism, spent: list[Spent], min_sep: int, noise_multiplier: float, cap: int
) -> None:
    """The guarantee after every round, by `account`."""
    assert [s.rounds for s in spent] == list(range(1, len(spent) + 1))
    for s in spent:
        guarantee = account(mech, MinSep(s.rounds, min_sep, cap), noise_multiplier, 1e-7)
        assert guarantee.mu * (1 - NEVER_BELOW) <= s.mu <= guarantee.mu * (1 + CLOSE)
        assert s.rho == pytest.approx(guarantee.rho, rel=1e-8)
        assert s.epsilon(1e-7) == pytest.approx(guarantee.epsilon, rel=1e-8)


# --- Every round -------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1, 3, UNCAPPED])
@pytest.mark.parametrize("min_sep", [1, 2, 7, 29, 1000])
@pytest.mark.parametrize("name", ["blt-b100", "blt-b400", "independent", "tree"])
def test_spending_equals_account_in_every_round(name: str, min_sep: int, cap: int):
    mech = dpftrl.mechanism(name)
    check_rounds(mech, first(30, spending(mech, min_sep, 3.0, cap)), min_sep, 3.0, cap)


@every
@settings(max_examples=8)
@given(data=st.data())
def test_spending_equals_account_for_every_mechanism(family: Family, data):
    rounds = data.draw(st.integers(1, 14))
    mech = data.draw(family.supporting(rounds))
    min_sep, cap = data.draw(st.integers(1, rounds + 2)), data.draw(st.integers(1, rounds + 1))
    noise_multiplier = data.draw(st.floats(0.5, 10))
    check_rounds(
        mech,
        first(rounds, spending(mech, min_sep, noise_multiplier, cap)),
        min_sep,
        noise_multiplier,
        cap,
    )


@settings(max_examples=30)
@given(blt=blts(), min_sep=st.integers(1, 45), cap=st.integers(1, 50))
def test_spending_equals_account_for_random_blts(blt, min_sep: int, cap: int):
    check_rounds(blt, first(40, spending(blt, min_sep, 1.0, cap)), min_sep, 1.0, cap)


@pytest.mark.parametrize("cap", [1, 2, UNCAPPED])
@pytest.mark.parametrize("name", ["blt-b100", "tree", "independent", "sqrt", "banded:3"])
def test_every_round_is_the_worst_pattern_so_far(name: str, cap: int):
    """The strategy for fewer rounds is the top left corner of the strategy for more."""
    whole = MinSep(9, 3, cap)
    mech = dpftrl.mechanism(name, whole)
    for s in first(9, spending(mech, 3, 2.0, cap)):
        truth = true_sensitivity(mech.strategy(s.rounds), MinSep(s.rounds, 3, cap))
        expected = with_rounding(truth.attained / 2.0, mech, s.rounds)
        assert s.mu == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_sep": 4},
        {"min_sep": 6},
        {"cap": 2},
        {"cap": 4},
        {"noise_multiplier": 3.0 * (1 + 1e-8)},
    ],
)
def test_the_wrong_pattern_or_noise_would_be_noticed(wrong: dict[str, Any]):
    mech = dpftrl.mechanism("blt-b400")
    right: dict[str, Any] = {"min_sep": 5, "noise_multiplier": 3.0, "cap": 3}
    spent = first(30, spending(mech, right["min_sep"], right["noise_multiplier"], right["cap"]))
    check_rounds(mech, spent, **right)
    with pytest.raises(AssertionError):
        check_rounds(mech, spent, **(right | wrong))


def test_a_sum_that_starts_a_round_late_would_be_noticed():
    mech = dpftrl.mechanism("blt-b400")
    late = first(10, spending(mech, 5, 3.0))[1:]
    with pytest.raises(AssertionError):
        check_rounds(mech, [Spent(i, s.mu) for i, s in enumerate(late, 1)], 5, 3.0, UNCAPPED)


def test_mechanisms_above_the_theorem_are_bounded_as_account_bounds_them():
    blt = dpftrl.BLT([0.5, 0.2], [0.8, 0.3])  # c_1 > c_0: the pattern 0, b, ... need not be worst
    spent = first(12, spending(blt, 2, 1.0))
    check_rounds(blt, spent, 2, 1.0, UNCAPPED)
    for s in spent:
        truth = true_sensitivity(blt.strategy(s.rounds), MinSep(s.rounds, 2))
        assert s.mu >= truth.attained * (1 - 1e-12)


# --- Where it ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["banded:4", "tree-full", "smooth-tree"])
def test_spending_ends_after_the_last_round_of_the_mechanism(name: str):
    mech = dpftrl.mechanism(name, MinSep(12, 4))
    assert mech.rounds is not None
    rounds = spending(mech, 4, 2.0)
    check_rounds(mech, first(mech.rounds, rounds), 4, 2.0, UNCAPPED)
    with pytest.raises(StopIteration):
        next(rounds)
    with pytest.raises(StopIteration):
        next(rounds)


def test_two_spending_iterators_are_independent():
    mech = dpftrl.mechanism("blt-b400")
    one, other = spending(mech, 3, 2.0), spending(mech, 3, 2.0)
    assert first(10, one) == first(10, other)
    assert next(one).rounds == 11


@given(blt=blts(), min_sep=st.integers(1, 20), cap=st.integers(1, 10))
def test_spent_mu_never_decreases(blt, min_sep: int, cap: int):
    spent = [s.mu for s in first(80, spending(blt, min_sep, 1.0, cap))]
    assert all(later >= sooner for sooner, later in itertools.pairwise(spent))


# --- Long runs ---------------------------------------------------------------------------------

CHECKED = {1, 2, 99, 400, 401, 9_999, 99_999, 100_000}


@pytest.mark.parametrize(
    ("mech", "min_sep", "cap"),
    [
        (dpftrl.mechanism("blt-b400"), 1, UNCAPPED),
        (dpftrl.mechanism("blt-b400"), 400, 5),
        (dpftrl.mechanism("blt-b1000"), 317, UNCAPPED),
        (dpftrl.BLT([SLOWEST, 1 - 1e-9, 0.5], [1e-6, 0.01, 0.4]), 1, UNCAPPED),
        (dpftrl.BLT([1.0], [1e-4]), 7, UNCAPPED),
        (dpftrl.BLT([1.0, SLOWEST], [1e-9, 1e-9]), 1, 1000),
    ],
    ids=str,
)
def test_a_hundred_thousand_rounds(mech: dpftrl.BLT, min_sep: int, cap: int):
    for s in itertools.islice(spending(mech, min_sep, 2.0, cap), 100_000):
        if s.rounds in CHECKED:
            ideal = mech.sensitivity(MinSep(s.rounds, min_sep, cap)).value / 2.0
            closed = with_rounding(ideal, mech, s.rounds)
            assert closed * (1 - NEVER_BELOW) <= s.mu <= closed * (1 + CLOSE)


def test_a_long_run_is_the_plain_sum_of_its_rows():
    """The same sum with numpy, from the coefficients of the strategy."""
    mech, rounds, gap = dpftrl.mechanism("blt-b400"), 20_000, 900
    column = np.zeros(rounds)
    coefficients = mech.coefficients(rounds)
    for start in range(0, rounds, gap):
        column[start:] += coefficients[: rounds - start]
    last = next(itertools.islice(spending(mech, gap, 1.0), rounds - 1, None))
    ideal = math.sqrt(math.fsum(column**2))
    assert last.mu == pytest.approx(with_rounding(ideal, mech, rounds), rel=1e-10)
    short = next(itertools.islice(spending(mech, gap, 1.0), rounds - 2, None))
    assert short.mu < last.mu * (1 - 1e-6)


# --- What is refused ---------------------------------------------------------------------------

RUNNING = [dpftrl.mechanism("blt-b400"), dpftrl.mechanism("tree"), dpftrl.mechanism("independent")]


@pytest.mark.parametrize("mech", RUNNING, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -1.0], ids=repr)
def test_wrong_noise_is_refused(mech: Mechanism, wrong: float):
    with pytest.raises(InvalidInput):
        next(spending(mech, 3, wrong))


@pytest.mark.parametrize("mech", RUNNING, ids=str)
@pytest.mark.parametrize("wrong", [0, -1, 1.5, math.nan, "3", None, True], ids=repr)
def test_a_wrong_separation_is_refused(mech: Mechanism, wrong: Any):
    with pytest.raises(InvalidInput):
        next(spending(mech, wrong, 1.0))


@pytest.mark.parametrize("mech", RUNNING, ids=str)
@pytest.mark.parametrize("wrong", [0, -1, 2.5, math.nan, math.inf, True], ids=repr)
def test_a_wrong_cap_is_refused(mech: Mechanism, wrong: Any):
    """With a cap of 0 no client would ever take part, and nothing would be spent."""
    with pytest.raises(InvalidInput):
        next(spending(mech, 3, 1.0, wrong))


@pytest.mark.parametrize("wrong", [0.0, 1.0, math.nan, -1e-6])
def test_a_wrong_delta_is_refused(wrong: float):
    with pytest.raises(InvalidInput):
        next(spending(dpftrl.mechanism("blt-b400"), 3, 1.0)).epsilon(wrong)


def test_a_mechanism_that_is_no_blt_is_asked_for_each_round():
    """A negative control: the numbers come from the given mechanism."""
    asked: list[int] = []
    tree = dpftrl.mechanism("tree")

    def sensitivity(clients: MinSep) -> dpftrl.Sensitivity:
        asked.append(clients.rounds)
        return tree.sensitivity(clients).times(2.0)

    def sensitivity_by_round(min_sep: int, cap: int) -> Iterator[float]:
        return Mechanism.sensitivity_by_round(louder, min_sep, cap)

    louder: Any = Altered(tree, sensitivity=sensitivity, sensitivity_by_round=sensitivity_by_round)
    spent = first(5, spending(louder, 2, 1.0))
    assert asked == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError):
        check_rounds(tree, spent, 2, 1.0, UNCAPPED)
