"""Guarantees of one run, compared with brute force, integrals and dp_accounting."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_mu import MOST_ROUNDING, rounding_share, with_rounding

import dpftrl
from conformance import EVERY, Family, allowed_patterns, draw_case, participations, true_sensitivity
from dpftrl import FixedEpochs, Mechanism, MinSep, Participation
from dpftrl.accounting import (
    Guarantee,
    Hypothesis,
    Run,
    account,
    calibrate,
    calibrate_rho,
    delta_for,
    delta_of,
    dp_event,
    epsilon_of,
    guarantee_of,
    sampler_delta,
)
from dpftrl.errors import InvalidInput, RoundsExceeded

every = pytest.mark.parametrize("family", EVERY, ids=str)
CLIENTS = MinSep(rounds=2000, min_sep=400, max_participations=5)
NAMES = ["blt-b400", "tree", "independent", "band-sqrt:400", "banded:16"]


def budgets() -> st.SearchStrategy[tuple[float, float]]:
    """Epsilon from 0.05 to 50 and delta from 1e-12 to 1e-3, evenly in their logarithms."""
    epsilon = st.floats(math.log(0.05), math.log(50)).map(math.exp)
    return st.tuples(epsilon, st.floats(-12, -3).map(lambda digits: 10.0**digits))


# --- Another accountant ------------------------------------------------------------------------


def pld_epsilon(event: Any, delta: float, relation: str = "REPLACE_SPECIAL") -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp_accounting.NeighboringRelation[relation])
    return accountant.compose(event).get_epsilon(delta)


@pytest.mark.parametrize(
    ("mu", "relation"),
    [
        (0.05, "REPLACE_SPECIAL"),
        (0.3, "ADD_OR_REMOVE_ONE"),
        (0.3, "REPLACE_SPECIAL"),
        (1.0, "REPLACE_SPECIAL"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_pld_accountant_agrees(name: str, mu: float, relation: str):
    mech = dpftrl.mechanism(name, CLIENTS)
    noise_multiplier = mech.sensitivity(CLIENTS).value / mu
    guarantee = account(mech, CLIENTS, noise_multiplier, delta=1e-8)
    assert pld_epsilon(dp_event(guarantee), 1e-8, relation) == pytest.approx(
        guarantee.epsilon, abs=1e-5
    )


def test_a_pld_accountant_notices_noise_that_is_one_in_a_thousand_off():
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier=5.0, delta=1e-8)
    louder = account(dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier=5.005, delta=1e-8)
    assert pld_epsilon(dp_event(louder), 1e-8) != pytest.approx(guarantee.epsilon, abs=1e-3)


@pytest.mark.parametrize("devices", [1, 3])
def test_the_event_of_several_devices_is_that_of_several_devices(devices: int):
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, 20.0, 1e-8).for_devices(devices)
    assert pld_epsilon(dp_event(guarantee), 1e-8) == pytest.approx(guarantee.epsilon, abs=1e-5)


# --- Calibration -------------------------------------------------------------------------------


def largest_mu(epsilon: float, delta: float) -> float:
    """By halving. The sampler takes its part of delta first, and at most half of it."""
    low, high = 0.0, 11.0  # the sampler's range ends before
    for _ in range(1200):
        middle = (low + high) / 2
        taken = sampler_delta(middle)
        fits = taken <= delta / 2 and epsilon_of(delta - taken, middle) <= epsilon
        low, high = (middle, high) if fits else (low, middle)
        if high - low <= 1e-15 * high:
            break
    return low


def check_calibration(
    mech: Mechanism, clients: Participation, epsilon: float, delta: float
) -> Guarantee | None:
    """The calibrated noise keeps to the budget, and nobody could do with less noise.

    Returns:
        None where the budget is refused, since too much of it would go to rounding.
    """
    mu = largest_mu(epsilon, delta)
    share = rounding_share(mu, mech, clients.rounds)
    if share > MOST_ROUNDING:
        with pytest.raises(InvalidInput, match="rounding"):
            calibrate(mech, clients, epsilon, delta)
        return None
    noise_multiplier = calibrate(mech, clients, epsilon, delta)
    guarantee = account(mech, clients, noise_multiplier, delta)
    assert guarantee.epsilon <= epsilon
    assert guarantee.total_delta == delta
    assert guarantee.mu == pytest.approx(mu, rel=1e-9)
    return guarantee


def uses_up(guarantee: Guarantee, epsilon: float) -> bool:
    """One of two things uses the budget up: epsilon, or the sampler with its half of delta."""
    sampler_takes_half = guarantee.sampler_delta >= guarantee.delta / 2 * (1 - 1e-6)
    return guarantee.epsilon >= epsilon * (1 - 1e-6) or sampler_takes_half


# Over 19 families, more than a thousand draws.
@every
@settings(max_examples=55)
@given(data=st.data())
def test_calibrated_noise_keeps_to_its_budget_and_uses_it_up(family: Family, data):
    mech, rounds = draw_case(data, family, 30)
    clients = data.draw(participations(rounds))
    epsilon, delta = data.draw(budgets())
    guarantee = check_calibration(mech, clients, epsilon, delta)
    assert guarantee is not None
    assert uses_up(guarantee, epsilon)
    quieter = account(mech, clients, guarantee.runs[0].noise_multiplier * (1 - 1e-8), delta)
    assert quieter.epsilon > epsilon or quieter.total_delta > delta


def test_calibration_at_the_size_of_production():
    rng = random.Random(1)
    mechs = [dpftrl.mechanism(n) for n in ("blt-b100", "blt-b400", "blt-b1000", "independent")]
    refusals = 0
    for _ in range(300):
        mech = rng.choice(mechs)
        clients = MinSep(rng.randrange(1, 10**6), rng.randrange(1, 10**5), rng.randrange(1, 100))
        epsilon, delta = math.exp(rng.uniform(-3, 3.9)), 10 ** rng.uniform(-12, -3)
        guarantee = check_calibration(mech, clients, epsilon, delta)
        refusals += guarantee is None
        assert guarantee is None or uses_up(guarantee, epsilon)
    assert 0 < refusals < 150  # BLTs of very many rounds


@every
@settings(max_examples=8)
@given(data=st.data())
def test_noise_calibrated_to_zcdp_keeps_to_it_and_uses_it_up(family: Family, data):
    mech, rounds = draw_case(data, family, 30)
    clients = data.draw(participations(rounds))
    rho = data.draw(st.floats(-12, 4).map(lambda digits: 10.0**digits))
    share = rounding_share(math.sqrt(2 * rho), mech, rounds)
    if share > MOST_ROUNDING:
        refused(lambda: calibrate_rho(mech, clients, rho))
        return
    noise_multiplier = calibrate_rho(mech, clients, rho)
    assert rho * (1 - 1e-12) <= account(mech, clients, noise_multiplier, 1e-6).rho <= rho
    assert account(mech, clients, noise_multiplier * (1 - 1e-11), 1e-6).rho > rho


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 1e3, 1e6, 1e12, 1e100])
@pytest.mark.parametrize("delta", [1e-22, 1e-20, 1e-4, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("name", ["blt-b400", "independent"])
def test_calibration_to_an_absurd_budget_ends_and_uses_it_up(
    name: str, epsilon: float, delta: float
):
    guarantee = check_calibration(dpftrl.mechanism(name), CLIENTS, epsilon, delta)
    assert guarantee is not None or name == "blt-b400"
    # Between an epsilon of 1e-9 and none, a delta near 1 moves by less than its last digits.
    if guarantee is not None and (epsilon, delta) != (1e-9, 1 - 1e-9):
        assert uses_up(guarantee, epsilon)


@pytest.mark.parametrize("epsilon", [1e-9, 1.0, 1e3, 1e100])
@pytest.mark.parametrize("delta", [5e-324, 1e-300, 1e-30, 2e-23])
@pytest.mark.parametrize("name", ["blt-b400", "independent"])
def test_a_delta_below_what_the_sampler_takes_is_refused(name: str, delta: float, epsilon: float):
    """`sampler_delta` is at least 2^-76 with any noise, and may be at most half of delta."""
    refused(lambda: calibrate(dpftrl.mechanism(name), CLIENTS, epsilon, delta))


@pytest.mark.parametrize("epsilon", [32.7, 1e3, 1e6])
def test_a_large_epsilon_at_a_small_delta_needs_the_noise_that_the_sampler_needs(epsilon: float):
    """`sampler_delta` must not exceed half of delta, however large epsilon is."""
    guarantee = check_calibration(dpftrl.mechanism("blt-b400"), CLIENTS, epsilon, 1e-9)
    assert guarantee.epsilon == pytest.approx(32.629, abs=1e-3)
    assert guarantee.sampler_delta == pytest.approx(0.5e-9, rel=1e-6)
    assert (
        calibrate(dpftrl.mechanism("blt-b400"), CLIENTS, 32.6, 1e-9)
        > guarantee.runs[0].noise_multiplier
    )


@pytest.mark.parametrize("above", [1e-9, 1e-3, 1.0])
def test_calibration_is_refused_where_rounding_takes_more_than_a_thousandth_of_mu(above: float):
    blt = dpftrl.mechanism("blt-b400")
    rounding = with_rounding(0.0, blt, 2000)
    limit = rounding / (MOST_ROUNDING - rounding_share(1e9, blt, 2000))
    assert rounding_share(limit, blt, 2000) == pytest.approx(MOST_ROUNDING, rel=1e-6)
    enough, too_little = limit * (1 + above + 1e-6), limit / (1 + above + 1e-6)
    assert check_calibration(blt, CLIENTS, epsilon_of(1e-9, enough), 1e-9) is not None
    assert check_calibration(blt, CLIENTS, epsilon_of(1e-9, too_little), 1e-9) is None
    assert calibrate_rho(blt, CLIENTS, enough**2 / 2) > 0
    refused(lambda: calibrate_rho(blt, CLIENTS, too_little**2 / 2))
    # `account` does not refuse it: it states the guarantee of what was released.
    noise_multiplier = blt.sensitivity(CLIENTS).value / too_little
    assert account(blt, CLIENTS, noise_multiplier, 1e-9).mu == pytest.approx(
        with_rounding(too_little, blt, 2000), rel=1e-12
    )


@given(budget=budgets(), noise_multiplier=st.floats(0.5, 100))
def test_delta_at_an_epsilon_undoes_epsilon_at_a_delta(budget, noise_multiplier: float):
    delta = budget[1]
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier, delta)
    found = delta_for(dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier, guarantee.epsilon)
    assert found == pytest.approx(guarantee.total_delta, rel=1e-9)
    lower = delta_for(
        dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier, guarantee.epsilon * (1 - 1e-6)
    )
    assert lower > delta
    assert lower >= found


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 10.0, 40.0])
@pytest.mark.parametrize("noise_multiplier", [0.7, 2.0, 5.0, 20.0, 30.0])
def test_the_delta_of_an_epsilon_has_the_part_of_the_sampler_in_it(
    noise_multiplier: float, epsilon: float
):
    found = delta_for(dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier, epsilon)
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier, found)
    assert guarantee.epsilon <= epsilon
    assert found == pytest.approx(
        delta_of(epsilon, guarantee.mu) + sampler_delta(guarantee.mu), rel=1e-9
    )


# --- Monotone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blt-b100", "blt-b400", "independent", "tree"])
@settings(max_examples=30)
@given(data=st.data())
def test_epsilon_never_falls_when_clients_may_take_part_more_often(name: str, data):
    mech = dpftrl.mechanism(name)
    rounds, gap = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 80))
    cap = data.draw(st.integers(1, 12))

    def epsilon(clients: MinSep, noise_multiplier: float = 3.0) -> float:
        return account(mech, clients, noise_multiplier, 1e-7).epsilon

    clients = MinSep(rounds, gap, cap)
    here = epsilon(clients)
    slack = 1 - 1e-11
    more_rounds = MinSep(rounds + data.draw(st.integers(1, 50)), gap, cap)
    assert mech.sensitivity(more_rounds).value >= mech.sensitivity(clients).value * slack
    # The part of rounding may be smaller: with more rounds, a guarantee covers smaller models only.
    run = Run.of(mech, clients, 3.0)
    assert epsilon(more_rounds) >= here * (slack - 2 * run.rounding / run.mu)
    assert epsilon(MinSep(rounds, data.draw(st.integers(1, gap)), cap)) >= here * slack
    assert epsilon(MinSep(rounds, gap, cap + data.draw(st.integers(1, 5)))) >= here * slack
    assert epsilon(MinSep(rounds, gap, cap), noise_multiplier=3.0 * (1 + 1e-9)) < here
    # A fixed schedule is one of those that a separation allows.
    fixed = account(mech, FixedEpochs(rounds, gap, cap), 3.0, 1e-7).epsilon
    assert fixed <= here * (1 + 1e-11)


# --- Brute force -------------------------------------------------------------------------------


@every
@settings(max_examples=12)
@given(data=st.data())
def test_mu_is_the_worst_pattern_of_the_dense_strategy(family: Family, data):
    mech, rounds = draw_case(data, family, 7)
    clients = data.draw(participations(rounds))
    noise_multiplier = data.draw(st.floats(0.1, 50))
    guarantee = account(mech, clients, noise_multiplier, 1e-6)
    check_mu(guarantee, mech.strategy(rounds))


def check_mu(guarantee: Guarantee, strategy: np.ndarray) -> None:
    run = guarantee.runs[0]
    truth = true_sensitivity(strategy, run.participation).attained
    mu = with_rounding(truth / run.noise_multiplier, run.mechanism, run.participation.rounds)
    assert run.sensitivity.value >= truth * (1 - 1e-9)
    assert guarantee.mu >= mu * (1 - 1e-9)
    if guarantee.kind == "exact":
        assert run.sensitivity.value == pytest.approx(truth, rel=1e-9)
        assert guarantee.mu == pytest.approx(mu, rel=1e-9)


@pytest.mark.parametrize("off", [-1e-8, 1e-8])
def test_a_mu_one_in_a_hundred_million_off_would_be_noticed(off: float):
    mech, clients = dpftrl.mechanism("blt-b400"), MinSep(7, 2)
    guarantee = account(mech, clients, 2.0, 1e-6)
    check_mu(guarantee, mech.strategy(7))
    (run,) = guarantee.runs
    wrong_mu = Guarantee(guarantee.runs, guarantee.mu * (1 + off), 1e-6, ())
    wrong_sensitivity = guarantee_of(
        [replace(run, sensitivity=run.sensitivity.times(1 + off))], 1e-6
    )
    for wrong in (wrong_mu, wrong_sensitivity):
        with pytest.raises(AssertionError):
            check_mu(wrong, mech.strategy(7))


def test_a_mu_without_the_rounding_of_its_buffers_would_be_noticed():
    mech = dpftrl.mechanism("blt-b1000")
    guarantee = account(mech, MinSep(20, 4), 20.0, 1e-6)
    check_mu(guarantee, mech.strategy(20))
    ideal = guarantee.runs[0].sensitivity.value / 20.0
    with pytest.raises(AssertionError):
        check_mu(Guarantee(guarantee.runs, ideal, 1e-6, ()), mech.strategy(20))


def delta_between(distance: mp.mpf, epsilon: mp.mpf) -> mp.mpf:
    """The excess of one density over exp(epsilon) times the other, along the line between them."""

    def excess(x: mp.mpf) -> mp.mpf:
        return mp.npdf(x, distance) - mp.exp(epsilon) * mp.npdf(x)

    crossing = mp.findroot(
        lambda x: mp.log(mp.npdf(x, distance) / mp.npdf(x)) - epsilon, distance / 2
    )
    return mp.quad(excess, [crossing + step for step in (0, 1, 2, 4, 8, 16, 40)])


TINY = MinSep(rounds=6, min_sep=2, max_participations=3)


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-8), (2.0, 1e-3)])
@pytest.mark.parametrize(
    "name", ["blt-b100", "independent", "tree", "sqrt", "band-sqrt:2", "banded:2", "tree-full"]
)
def test_two_neighbouring_datasets_differ_by_just_the_stated_delta(
    name: str, mu: float, delta: float
):
    """One client of many, at its worst, and then with its updates zeroed."""
    mech = dpftrl.mechanism(name, TINY)
    strategy = mech.strategy(6)
    noise_multiplier = mech.sensitivity(TINY).value / mu
    guarantee = account(mech, TINY, noise_multiplier, delta)
    assert guarantee.kind == "exact"
    rng = np.random.default_rng(0)
    others, direction = rng.standard_normal((6, 4)), rng.standard_normal(4)
    direction /= np.linalg.norm(direction)  # the clip norm

    def distance(pattern: tuple[int, ...]) -> float:
        with_client = others.copy()
        with_client[list(pattern)] += direction
        return float(np.linalg.norm(strategy @ with_client - strategy @ others)) / noise_multiplier

    patterns = allowed_patterns(TINY)
    worst = max(patterns, key=distance)
    assert guarantee.total_delta == delta
    with mp.workdps(30):
        # Rounding in the buffers moves them apart a little further, and the sampler takes a part.
        apart = mp.mpf(with_rounding(distance(worst), mech, 6))
        epsilon, taken = mp.mpf(guarantee.epsilon), mp.mpf(guarantee.sampler_delta)
        true = delta_between(apart, epsilon) + taken
        assert delta * (1 - 1e-8) <= true <= delta * (1 + 1e-12)
        assert delta_between(apart, epsilon * (1 - mp.mpf(1e-9))) + taken > delta
        assert delta_between(mp.mpf(distance(worst)), epsilon) <= true
        for pattern in patterns:
            assert distance(pattern) <= guarantee.mu * (1 + 1e-12)


@pytest.mark.parametrize("devices", [1, 2, 3, 10])
def test_n_equal_devices_move_the_output_n_times_as_far(devices: int):
    mech, clients = dpftrl.mechanism("blt-b100"), MinSep(7, 3)
    alone = account(mech, clients, 2.0, 1e-6)
    together = alone.for_devices(devices)
    strategy = mech.strategy(7)
    moved = [
        float(np.linalg.norm(strategy[:, list(pattern)].sum(axis=1) * devices)) / 2.0
        for pattern in allowed_patterns(clients)
    ]
    ideal = alone.runs[0].sensitivity.value / 2.0
    assert ideal * devices == pytest.approx(max(moved), rel=1e-12)
    mu = with_rounding(max(moved) / devices, mech, 7) * devices
    assert together.mu == pytest.approx(mu, rel=1e-12)
    assert together.mu == pytest.approx(devices * alone.mu, rel=1e-15)
    left = max(1e-6 - sampler_delta(mu), 0.5e-6)
    assert together.epsilon == pytest.approx(epsilon_of(left, mu), rel=1e-9)
    # Ten devices are 13 standard deviations: the sampler's range ends before that.
    assert (together.total_delta == 1e-6) == (devices < 10)
    assert together.devices == devices
    several = f"{devices} clients (devices) of one person"
    assert together.unit == ("client" if devices == 1 else several)


@pytest.mark.parametrize("name", ["blt-b100", "tree", "banded:2"])
def test_no_two_devices_exceed_the_mu_of_two_devices(name: str):
    clients = MinSep(6, 2, 2)
    mech = dpftrl.mechanism(name, clients)
    strategy = mech.strategy(6)
    guarantee = account(mech, clients, 1.0, 1e-6).for_devices(2)
    said = guarantee.mu
    columns = [strategy[:, list(p)].sum(axis=1) for p in allowed_patterns(clients)]
    worst = max(np.linalg.norm(a + b) for a, b in itertools.product(columns, repeat=2))
    assert worst == pytest.approx(2 * guarantee.runs[0].sensitivity.value, rel=1e-9)
    assert said == pytest.approx(2 * with_rounding(worst / 2, mech, 6), rel=1e-9)
    # A negative control: devices do not add up like independent noise.
    assert worst > said / math.sqrt(2) * 1.1


def test_for_devices_twice_multiplies_the_numbers_of_devices():
    alone = account(dpftrl.mechanism("blt-b400"), CLIENTS, 10.0, 1e-6)
    twice = alone.for_devices(2).for_devices(3)
    assert twice.devices == 6
    assert twice.mu == pytest.approx(alone.for_devices(6).mu, rel=1e-15)
    assert alone.for_devices(1) == alone


# --- What a guarantee says ---------------------------------------------------------------------


def test_mu_rho_epsilon_and_delta_of_a_guarantee_are_consistent():
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, 10.0, 1e-6)
    assert guarantee.rho == guarantee.mu**2 / 2
    left = 1e-6 - guarantee.sampler_delta
    assert guarantee.epsilon == pytest.approx(epsilon_of(left, guarantee.mu), rel=1e-10)
    assert guarantee.epsilon >= epsilon_of(left, guarantee.mu)
    assert guarantee.sampler_delta == sampler_delta(guarantee.mu)
    assert guarantee.total_delta == guarantee.delta == 1e-6
    assert guarantee.adjacency == "zero-out"
    (run,) = guarantee.runs
    ideal = run.sensitivity.value / 10.0
    assert guarantee.mu == run.mu == pytest.approx(with_rounding(ideal, BLT, 2000), rel=1e-15)
    assert run.rounding == guarantee.mu - ideal
    assert 0 < run.rounding < 1e-5 * ideal
    assert guarantee == guarantee_of([Run.of(dpftrl.mechanism("blt-b400"), CLIENTS, 10.0)], 1e-6)


def test_another_delta_changes_epsilon_alone():
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, 10.0, 1e-6)
    assert guarantee.at(1e-9) == account(dpftrl.mechanism("blt-b400"), CLIENTS, 10.0, 1e-9)
    assert guarantee.at(1e-9).at(1e-6) == guarantee
    assert guarantee.at(1e-9).epsilon > guarantee.epsilon


def test_the_kind_is_upper_bound_unless_the_sensitivity_is_exact():
    rising = dpftrl.Toeplitz([1.0, 0.0, 0.5])
    assert account(rising, MinSep(50, 1), 1.0, 1e-6).kind == "upper bound"
    assert account(dpftrl.mechanism("blt-b400"), CLIENTS, 1.0, 1e-6).kind == "exact"


def test_resting_on_replaces_hypotheses_of_the_same_name():
    guarantee = account(dpftrl.mechanism("blt-b400"), CLIENTS, 10.0, 1e-6)
    names = sorted(hypothesis.name for hypothesis in guarantee.hypotheses)
    assert names == ["clipping", "keystream", "participation", "secrecy", "zero-out"]
    known = Hypothesis("clipping", "Clipped by the server.", "enforced")
    better = guarantee.resting_on(known)
    assert known in better.hypotheses
    assert sorted(hypothesis.name for hypothesis in better.hypotheses) == names
    assert (better.mu, better.epsilon) == (guarantee.mu, guarantee.epsilon)


def test_the_hypothesis_on_participation_is_as_strong_as_the_number_needs():
    """A fixed schedule is more than a separation, and gives a smaller mu: it has to be said."""
    tree = dpftrl.mechanism("tree")
    apart = account(tree, MinSep(2350, 438, 5), 7.0, 1e-10)
    fixed = account(tree, FixedEpochs(2350, 438, 5), 7.0, 1e-10)
    assert fixed.mu < apart.mu
    assert fixed.hypotheses != apart.hypotheses


# --- What is refused ---------------------------------------------------------------------------

POSITIVE = [math.nan, math.inf, -math.inf, -1.0, 0.0, 0]
FRACTION = [*POSITIVE, 1.0, 1, 2.0]
BLT = dpftrl.mechanism("blt-b400")


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("wrong", POSITIVE, ids=repr)
def test_numbers_that_are_not_positive_and_finite_are_refused(wrong: float):
    refused(lambda: account(BLT, CLIENTS, wrong, 1e-6))
    refused(lambda: delta_for(BLT, CLIENTS, wrong, 1.0))
    refused(lambda: calibrate(BLT, CLIENTS, wrong, 1e-6))
    refused(lambda: calibrate_rho(BLT, CLIENTS, wrong))
    refused(lambda: Guarantee((), wrong, 1e-6, ()))


@pytest.mark.parametrize("wrong", FRACTION, ids=repr)
def test_deltas_outside_0_to_1_are_refused(wrong: float):
    guarantee = account(BLT, CLIENTS, 10.0, 1e-6)
    refused(lambda: account(BLT, CLIENTS, 10.0, wrong))
    refused(lambda: calibrate(BLT, CLIENTS, 1.0, wrong))
    refused(lambda: guarantee.at(wrong))


@pytest.mark.parametrize("wrong", ["1", None, 1j, [1.0]], ids=repr)
def test_values_that_are_not_numbers_are_refused(wrong: Any):
    """A type checker reports such calls, so a plain TypeError is enough."""
    for call in (
        lambda: account(BLT, CLIENTS, wrong, 1e-6),
        lambda: account(BLT, CLIENTS, 1.0, wrong),
        lambda: calibrate(BLT, CLIENTS, wrong, 1e-6),
        lambda: calibrate_rho(BLT, CLIENTS, wrong),
        lambda: delta_for(BLT, CLIENTS, 1.0, wrong),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, math.nan, "2", None, True], ids=repr)
def test_a_wrong_number_of_devices_is_refused(wrong: Any):
    refused(lambda: account(BLT, CLIENTS, 10.0, 1e-6).for_devices(wrong))


def test_more_rounds_than_a_mechanism_has_are_refused():
    banded = dpftrl.mechanism("banded:3", MinSep(10, 3))
    for call in (
        lambda: account(banded, MinSep(11, 3), 1.0, 1e-6),
        lambda: calibrate(banded, MinSep(11, 3), 1.0, 1e-6),
        lambda: calibrate_rho(banded, MinSep(11, 3), 1.0),
        lambda: delta_for(banded, MinSep(11, 3), 1.0, 1.0),
    ):
        with pytest.raises(RoundsExceeded):
            call()


def test_a_guarantee_without_runs_is_refused():
    refused(lambda: guarantee_of([], 1e-6))


@pytest.mark.parametrize("noise_multiplier", [1e-100, 1e-154, 1e-160, 1e-300, 5e-324])
def test_hardly_any_noise_gives_a_huge_epsilon_or_an_error_but_not_nan(noise_multiplier: float):
    try:
        guarantee = account(BLT, CLIENTS, noise_multiplier, 1e-6)
    except InvalidInput:
        return
    assert guarantee.epsilon > 1e100


def test_numbers_too_large_for_a_float_are_refused_like_infinity():
    refused(lambda: account(BLT, CLIENTS, 10**400, 1e-6))
    refused(lambda: account(BLT, CLIENTS, 10.0, 1e-6).for_devices(10**400))
    refused(lambda: calibrate(BLT, CLIENTS, 10**400, 1e-6))


def test_a_vast_rho_needs_hardly_any_noise():
    try:
        noise_multiplier = calibrate_rho(BLT, CLIENTS, 1e308)
    except InvalidInput:
        return
    assert 0 < noise_multiplier < 1e-150


def test_noise_multipliers_in_single_precision_lose_nothing():
    """Such numbers come from arrays of other libraries."""
    for noise_multiplier in np.linspace(0.5, 30, 60, dtype=np.float32):
        plain = account(BLT, CLIENTS, float(noise_multiplier), 1e-6)
        found = account(BLT, CLIENTS, noise_multiplier, 1e-6)
        assert found.mu == plain.mu
        assert found.epsilon == plain.epsilon


def test_epsilon_is_that_of_a_mu_with_room_for_the_rounding_of_a_sensitivity():
    """Otherwise two ways to sum the same columns could differ and exceed a budget."""
    guarantee = account(BLT, CLIENTS, 10.0, 1e-6)
    assert guarantee.epsilon >= epsilon_of(1e-6, guarantee.mu * (1 + 5e-13))
    assert delta_for(BLT, CLIENTS, 10.0, 1.0) >= delta_of(1.0, guarantee.mu * (1 + 5e-13))
