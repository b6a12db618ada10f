"""The Gaussian formulas and `sampler_delta`, compared with arithmetic of arbitrary precision.

The functions `check_*` state what is guaranteed for a number. Each of them has a negative control:
it must notice a number that is wrong by 1e-9.
"""

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import mpmath as mp
import numpy as np
import pytest

from dpftrl.accounting import (
    delta_of,
    epsilon_of,
    gaussian,
    log_delta_of,
    mu_of,
    rho_of,
    sampler_delta,
)
from dpftrl.accounting.gaussian import FAR, NARROW, REMOTE
from dpftrl.errors import InvalidInput

# --- The oracle --------------------------------------------------------------------------------


def true_log_delta(epsilon: float | mp.mpf, mu: float | mp.mpf) -> mp.mpf:
    """The log of Phi(-a) - exp(epsilon) Phi(-b), with enough digits also where it is near 1."""
    with mp.workdps(30):
        far = abs(mp.mpf(epsilon) / mu - mp.mpf(mu) / 2) + mu
        # The two terms agree to about mu / a; each has an exponent of a^2 / 2.
        digits = 60 + int(6 * mp.log10(1 + far) + 2 * abs(mp.log10(mu)))
    with mp.workdps(digits):
        eps, apart, root = mp.mpf(epsilon), mp.mpf(mu), mp.sqrt(2)
        a, b = eps / apart - apart / 2, eps / apart + apart / 2
        subtracted = mp.exp(eps) * mp.erfc(b / root) / 2
        if a < -1:
            return mp.log1p(-mp.erfc(-a / root) / 2 - subtracted)
        return mp.log(mp.erfc(a / root) / 2 - subtracted)


def passes(epsilon: float | mp.mpf, delta: float, mu: float | mp.mpf) -> bool:
    """Whether Gaussians this far apart are (epsilon, delta)-DP."""
    with mp.workdps(60):
        return bool(true_log_delta(epsilon, mu) <= mp.log(mp.mpf(delta)))


def test_the_oracle_is_the_integral_of_the_difference_of_densities():
    """This checks the oracle itself: it uses densities only, and not Phi."""
    for epsilon, mu in [(0.0, 1.0), (1.0, 1.0), (3.0, 0.7), (0.1, 2.5), (20.0, 4.0)]:
        with mp.workdps(40):
            eps, apart = mp.mpf(epsilon), mp.mpf(mu)
            start = eps / apart + apart / 2  # where the densities are exp(epsilon) apart
            excess = mp.quad(
                lambda x, eps=eps, apart=apart: mp.npdf(x, apart) - mp.exp(eps) * mp.npdf(x),
                [start, start + 1, start + 3, start + 8, start + 20, mp.inf],
            )
            assert abs(mp.log(excess) - true_log_delta(epsilon, mu)) < mp.mpf(10) ** -25


# --- What is promised --------------------------------------------------------------------------


def check_log_delta(epsilon: float, mu: float, found: float) -> None:
    true = true_log_delta(epsilon, mu)
    assert true <= found
    assert found <= true + 1e-11 + 1e-14 * abs(true)


def check_delta(epsilon: float, mu: float, found: float) -> None:
    with mp.workdps(60):
        true = mp.exp(true_log_delta(epsilon, mu))
        assert true <= found <= true * (1 + mp.mpf(2e-11))


def check_epsilon(delta: float, mu: float, found: float) -> None:
    assert passes(found, delta, mu)
    with mp.workdps(40):
        # Where epsilon all but vanishes it depends on the last digits of delta.
        lower = mp.mpf(found) - mp.mpf(found) * 1e-10 - mp.mpf(mu) * 1e-11
        assert lower < 0 or not passes(lower, delta, mu)


def check_mu(epsilon: float, delta: float, found: float) -> None:
    assert passes(epsilon, delta, found)
    with mp.workdps(40):
        assert not passes(epsilon, delta, mp.mpf(found) * (1 + mp.mpf(1e-10)))


def check_rho(epsilon: float, delta: float, found: float) -> None:
    with mp.workdps(40):
        assert passes(epsilon, delta, mp.sqrt(2 * mp.mpf(found)))
        assert not passes(epsilon, delta, mp.sqrt(2 * mp.mpf(found) * (1 + mp.mpf(2e-10))))


@pytest.mark.parametrize(
    ("check", "given", "function", "safe"),
    [
        (check_log_delta, (0.5, 0.3), log_delta_of, 1),
        (check_log_delta, (5.0, 0.01), log_delta_of, 1),
        (check_delta, (0.5, 0.3), delta_of, 1),
        (check_delta, (40.0, 6.0), delta_of, 1),
        (check_epsilon, (1e-10, 0.7), epsilon_of, 1),
        (check_epsilon, (0.9, 30.0), epsilon_of, 1),
        (check_mu, (1.0, 1e-10), mu_of, -1),
        (check_rho, (1.0, 1e-10), rho_of, -1),
    ],
)
def test_an_error_of_one_in_a_billion_would_be_noticed(
    check: Callable[..., None],
    given: tuple[float, float],
    function: Callable[..., float],
    safe: int,
):
    """Both on the wrong side, which is unsafe, and on the right one, which is not tight."""
    found = function(*given)
    check(*given, found)
    for side in (-safe, safe):
        with pytest.raises(AssertionError):
            check(*given, found + side * 1e-9 * abs(found))


# --- Over the grid, and at random --------------------------------------------------------------

EPSILONS = [0.0, *(10.0**k for k in range(-4, 5))]
MUS = [m * 10.0**k for k in range(-8, 3) for m in (1.0, 3.0)] + [1e3]
DELTAS = [1e-15, 1e-12, 1e-10, 1e-7, 1e-5, 1e-3, 0.1, 0.5, 0.9, 0.99]


@pytest.mark.parametrize("mu", MUS)
def test_log_delta_over_the_grid(mu: float):
    for epsilon in EPSILONS:
        check_log_delta(epsilon, mu, log_delta_of(epsilon, mu))


@pytest.mark.parametrize("mu", MUS)
def test_delta_over_the_grid(mu: float):
    for epsilon in EPSILONS:
        if log_delta_of(epsilon, mu) > -700:  # what underflows is a test of its own
            check_delta(epsilon, mu, delta_of(epsilon, mu))


@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_over_the_grid(delta: float):
    for mu in MUS:
        check_epsilon(delta, mu, epsilon_of(delta, mu))


@pytest.mark.parametrize("delta", DELTAS)
def test_mu_and_rho_over_the_grid(delta: float):
    for epsilon in EPSILONS[1:]:
        check_mu(epsilon, delta, mu_of(epsilon, delta))
        check_rho(epsilon, delta, rho_of(epsilon, delta))


def places(count: int) -> Iterator[tuple[float, float]]:
    """(epsilon, mu), anywhere and wherever the formula changes its branch."""
    rng = random.Random(1)
    for i in range(count):
        mu = 10 ** rng.uniform(-8, 3)
        match i % 6:
            case 0:
                epsilon = 10 ** rng.uniform(-4, 4)
            case 1:  # where delta is neither 0 nor 1
                epsilon = mu * mu / 2 + mu * rng.uniform(-3, 12)
            case 2:
                mu = NARROW * (1 + rng.uniform(-1, 1) * 10 ** rng.uniform(-15, -2))
                epsilon = mu * rng.uniform(0, 60)
            case 3:
                mu = min(mu, NARROW)
                epsilon = mu * FAR * (1 + rng.uniform(-1, 1) * 10 ** rng.uniform(-15, -2))
            case 4:
                epsilon = mu * (REMOTE * (1 + rng.uniform(-1, 1) * 1e-12) + mu / 2)
            case _:  # a = 0
                epsilon = mu * mu / 2 * (1 + rng.uniform(-1, 1) * 10 ** rng.uniform(-16, -2))
        yield max(epsilon, 0.0), mu


def test_delta_at_random():
    for epsilon, mu in places(1500):
        check_both(epsilon, mu)


def check_both(epsilon: float, mu: float) -> None:
    found = log_delta_of(epsilon, mu)
    if not -1e-300 < found < 0:  # what is subnormal, or underflows, has a test of its own
        check_log_delta(epsilon, mu, found)
    if found > -700:
        check_delta(epsilon, mu, delta_of(epsilon, mu))


def test_epsilon_at_random():
    rng = random.Random(2)
    for _ in range(500):
        tail = rng.random() < 0.5
        delta = 10 ** rng.uniform(-15, -0.005) if tail else 1 - 10 ** rng.uniform(-2, -0.01)
        mu = 10 ** rng.uniform(-8, 3)
        check_epsilon(delta, mu, epsilon_of(delta, mu))


def test_epsilon_next_to_zero():
    """Just below the delta at which epsilon 0 is enough, where Newton's method has least to see."""
    rng = random.Random(3)
    for _ in range(200):
        mu = 10 ** rng.uniform(-6, 1)
        delta = delta_of(0.0, mu) * (1 - 10 ** rng.uniform(-12, -1))
        check_epsilon(delta, mu, epsilon_of(delta, mu))
    assert epsilon_of(delta_of(0.0, 0.3) * (1 + 1e-9), 0.3) == 0.0


def test_mu_at_random():
    rng = random.Random(4)
    for _ in range(350):
        delta, epsilon = 10 ** rng.uniform(-15, -0.005), 10 ** rng.uniform(-4, 4)
        check_mu(epsilon, delta, mu_of(epsilon, delta))
        check_rho(epsilon, delta, rho_of(epsilon, delta))


@pytest.mark.slow
def test_bounds_hold_at_a_hundred_thousand_random_points():
    for epsilon, mu in places(100_000):
        check_both(epsilon, mu)


# --- "Never", at the far ends of a float -------------------------------------------------------


@pytest.mark.parametrize("epsilon", [40.0, 100.0, 1000.0, 1e4])
def test_a_delta_too_small_for_a_float_is_not_rounded_down_to_nothing(epsilon: float):
    """The true delta is positive; a delta of 0 would claim pure differential privacy."""
    assert delta_of(epsilon, 1.0) > 0


@pytest.mark.parametrize("mu", [78.55574398005943, 75.86443215008808, 76.8736387752301])
def test_a_delta_short_of_one_by_a_subnormal_number_is_not_below_the_truth(mu: float):
    epsilons = [75.49997986062155, *np.linspace(0, 100, 50)]
    for epsilon in epsilons:
        assert true_log_delta(float(epsilon), mu) <= log_delta_of(float(epsilon), mu)


@pytest.mark.parametrize("exponent", [-12, -15, -30, -60, -100, -300])
def test_log_delta_is_not_below_the_truth_where_mu_is_tiny(exponent: int):
    """log delta is large then, and so is the rounding of the sum that it is put together from."""
    for factor, share in product((1.0, 1.7, 2.9, 4.3, 7.7), (0.0, 0.01, 0.3, 1.0, 3.0)):
        mu = factor * 10.0**exponent
        assert true_log_delta(share * mu, mu) <= log_delta_of(share * mu, mu)


@pytest.mark.parametrize("exponent", [4, 6, 8, 10, 12, 15])
def test_log_delta_is_not_below_the_truth_where_mu_is_huge(exponent: int):
    """a = epsilon / mu - mu / 2 loses digits then, and its square is multiplied by what it lost."""
    for factor, a in product((1.0, 1.7, 2.9, 4.3, 7.7), (-2.0, 0.5, 30.0, 1e4, 0.9e6, 1.1e6, 5e6)):
        mu = factor * 10.0**exponent
        epsilon = max(0.0, mu * (mu / 2 + a))
        assert true_log_delta(epsilon, mu) <= log_delta_of(epsilon, mu)


@pytest.mark.parametrize("delta", [1e-6, 1e-10, 1.0818800470419076e-15, 4.056268893761906e-15])
def test_mu_at_epsilon_zero(delta: float):
    check_mu(0.0, delta, mu_of(0.0, delta))


@pytest.mark.parametrize("mu", [1e5, 1e20, 1e100, 1e153, 1e155, 1e200, 1e300])
def test_a_huge_mu_has_a_huge_epsilon(mu: float):
    """Next to mu^2 / 2, or more (perhaps infinity), but not NaN, which compares with nothing."""
    try:
        found = epsilon_of(1e-6, mu)
    except InvalidInput:
        return
    assert found >= mp.mpf(mu) ** 2 / 2


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_numbers_in_less_than_double_precision_are_computed_in_double_precision(kind: Any):
    """With numpy, one number in single precision would make the whole result single precision."""
    for given in (0.3, 0.55, 0.7, 1.0, 1.3, 2.6, 3.3):
        number = kind(given)
        same = float(number)
        for delta in (1e-8, 1e-6, 1e-2):
            assert epsilon_of(delta, number) == epsilon_of(delta, same)
            assert mu_of(number, delta) == mu_of(same, delta)
        assert log_delta_of(1.0, number) == log_delta_of(1.0, same)
        assert log_delta_of(number, 0.8) == log_delta_of(same, 0.8)


# --- Where the formula changes its branch ------------------------------------------------------


def steps_in(values: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(values)]


def neighbours(x: float, count: int = 20) -> list[float]:
    """The floats around x, in order."""
    found = [x]
    for _ in range(count):
        found = [math.nextafter(found[0], 0), *found, math.nextafter(found[-1], math.inf)]
    return found


@pytest.mark.parametrize("a", [-0.005, 0.0, 0.3, 3.0, 29.0, 31.0, 100.0, 1e4, 9e5, 2e6])
def test_no_jump_where_subtracting_takes_over_from_integrating(a: float):
    epsilon = NARROW * (a + NARROW / 2)
    values = [log_delta_of(epsilon, mu) for mu in neighbours(NARROW)]
    assert max(map(abs, steps_in(values))) <= 2e-11 + 1e-14 * abs(values[0])


@pytest.mark.parametrize("mu", [1e-8, 1e-4, 0.0199])
def test_no_jump_where_the_series_takes_over(mu: float):
    values = [log_delta_of(epsilon, mu) for epsilon in neighbours(mu * FAR)]
    assert max(map(abs, steps_in(values))) <= 2e-11


@pytest.mark.parametrize("mu", [1e-8, 1e-3, 0.5, 40.0, 1e3])
def test_no_jump_where_a_bound_takes_over(mu: float):
    values = [log_delta_of(epsilon, mu) for epsilon in neighbours(mu * (REMOTE + mu / 2))]
    assert max(map(abs, steps_in(values))) <= 1e-14 * abs(values[0])


@pytest.mark.parametrize("mu", [0.021, 0.5, 3.0, 40.0, 1e3])
def test_no_jump_where_a_changes_its_sign(mu: float):
    values = [log_delta_of(epsilon, mu) for epsilon in neighbours(mu * mu / 2)]
    assert max(map(abs, steps_in(values))) <= 2e-11


def test_a_jump_of_one_in_a_billion_would_be_noticed():
    """A negative control: at a distance of 1e-9 the function changes by more than is allowed."""
    moved = log_delta_of(0.3, 0.5) - log_delta_of(0.3 * (1 + 1e-9), 0.5)
    assert moved > 2e-11


def test_delta_falls_with_epsilon_and_rises_with_mu():
    for epsilon, mu in places(600):
        here = log_delta_of(epsilon, mu)
        slack = 2e-11 + 1e-14 * abs(here)
        assert log_delta_of(epsilon * (1 + 1e-6), mu) <= here + slack
        assert log_delta_of(epsilon, mu * (1 + 1e-6)) >= here - slack


# --- The guess ---------------------------------------------------------------------------------


def test_a_guess_changes_the_speed_only():
    rng = random.Random(5)
    for _ in range(60):
        delta, mu = 10 ** rng.uniform(-15, -0.005), 10 ** rng.uniform(-8, 3)
        plain = epsilon_of(delta, mu)
        nearby = [plain * (1 + side * 10**-k) for k in (1, 4, 9, 15) for side in (-1, 1)]
        guesses = [*nearby, plain, plain / 1e6, plain * 1e6, 1e-300, 5e-324, 1e300, 0.0, -1.0]
        for guess in (*guesses, math.inf, math.nan):
            found = epsilon_of(delta, mu, guess)
            assert found == pytest.approx(plain, rel=1e-10, abs=1e-11 * mu)
            assert passes(found, delta, mu)


def test_a_guess_of_mu_changes_the_speed_only():
    rng = random.Random(7)
    for _ in range(60):
        delta, epsilon = 10 ** rng.uniform(-15, -0.005), 10 ** rng.uniform(-4, 4)
        plain = mu_of(epsilon, delta)
        nearby = [plain * (1 + side * 10**-k) for k in (1, 4, 9, 15) for side in (-1, 1)]
        guesses = [*nearby, plain, plain / 1e6, plain * 1e6, 1e-300, 5e-324, 1e300, 0.0, -1.0]
        for guess in (*guesses, math.inf, math.nan):
            found = mu_of(epsilon, delta, guess)
            assert found == pytest.approx(plain, rel=1e-11)
            assert passes(epsilon, delta, found)


def test_mu_needs_few_evaluations(monkeypatch):
    """Bisection would need more than 50. A good guess saves most of them."""
    evaluated: list[float] = []
    log_delta = gaussian._log_delta

    def counting(epsilon: float, mu: float) -> float:
        evaluated.append(mu)
        return log_delta(epsilon, mu)

    monkeypatch.setattr(gaussian, "_log_delta", counting)
    for epsilon, delta in product((0.01, 0.1, 1.0, 10.0, 100.0), (1e-15, 1e-10, 1e-5, 0.1)):
        evaluated.clear()
        mu = mu_of(epsilon, delta)
        assert len(evaluated) <= 12
        evaluated.clear()
        mu_of(epsilon, delta * (1 - 1e-9), guess=mu)
        assert len(evaluated) <= 6


@pytest.mark.parametrize("epsilon", [1e100, 1e160, 1e250])
def test_mu_at_an_epsilon_whose_square_overflows(epsilon: float):
    mu = mu_of(epsilon, 1e-6)
    assert log_delta_of(epsilon, mu) <= math.log(1e-6)
    assert mu * (mu / 2) == pytest.approx(epsilon, rel=1e-6)
    assert rho_of(epsilon, 1e-6) <= epsilon


def test_epsilon_does_not_return_the_guess_itself():
    """A negative control: a guess that is wrong by 1e-9 is not returned."""
    for side in (-1, 1):
        guess = epsilon_of(1e-6, 1.0) * (1 + side * 1e-9)
        assert epsilon_of(1e-6, 1.0, guess) == pytest.approx(epsilon_of(1e-6, 1.0), rel=1e-13)


# --- Numbers from elsewhere, and there and back ------------------------------------------------


def test_one_standard_deviation_apart_at_one_in_ten_million():
    assert f"{epsilon_of(delta=1e-7, mu=1.0):.3f}" == "5.349"
    assert f"{epsilon_of(delta=1e-7, mu=1.001):.3f}" != "5.349"


def test_dp_accounting_computes_the_same_numbers():
    from dp_accounting import gaussian_mechanism as theirs

    for mu in (0.05, 0.3, 1.0, 3.0):
        for delta in (1e-10, 1e-6, 1e-3):
            assert epsilon_of(delta, mu) == pytest.approx(
                theirs.get_epsilon_gaussian(1 / mu, delta), rel=1e-6
            )
            epsilon = epsilon_of(delta, mu)
            assert mu_of(epsilon, delta) == pytest.approx(
                1 / theirs.get_sigma_gaussian(epsilon, delta), rel=1e-6
            )


def test_mu_delta_and_epsilon_invert_each_other():
    rng = random.Random(6)
    for _ in range(500):
        delta, epsilon = 10 ** rng.uniform(-15, -1), 10 ** rng.uniform(-4, 4)
        mu = mu_of(epsilon, delta)
        assert epsilon_of(delta, mu) == pytest.approx(epsilon, rel=1e-10, abs=1e-11 * mu)
        assert delta_of(epsilon, mu) == pytest.approx(delta, rel=1e-10)
        assert mu**2 / 2 * (1 - 1e-14) <= rho_of(epsilon, delta) <= mu**2 / 2
        again = mu_of(epsilon_of(delta, mu), delta)
        assert again == pytest.approx(mu, rel=1e-10)


def test_log_delta_is_the_logarithm_of_delta():
    for epsilon, mu in [(0.0, 0.3), (1.0, 1.0), (5.0, 0.4), (3.0, 7.0)]:
        assert math.exp(log_delta_of(epsilon, mu)) == pytest.approx(
            delta_of(epsilon, mu), rel=1e-14
        )


# --- What is refused ---------------------------------------------------------------------------

NO_NUMBER = [math.nan, math.inf, -math.inf, -1.0, -1e-300]
WRONG_MU = [*NO_NUMBER, 0.0, -0.0, 0]
WRONG_EPSILON = NO_NUMBER
WRONG_DELTA = [*NO_NUMBER, 0.0, 0, 1.0, 1, 1.5]


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("wrong", WRONG_MU, ids=repr)
def test_a_wrong_mu_is_refused(wrong: float):
    refused(lambda: epsilon_of(1e-6, wrong))
    refused(lambda: delta_of(1.0, wrong))
    refused(lambda: log_delta_of(1.0, wrong))


@pytest.mark.parametrize("wrong", WRONG_EPSILON, ids=repr)
def test_a_wrong_epsilon_is_refused(wrong: float):
    refused(lambda: delta_of(wrong, 1.0))
    refused(lambda: log_delta_of(wrong, 1.0))
    refused(lambda: mu_of(wrong, 1e-6))
    refused(lambda: rho_of(wrong, 1e-6))


@pytest.mark.parametrize("wrong", WRONG_DELTA, ids=repr)
def test_a_wrong_delta_is_refused(wrong: float):
    refused(lambda: epsilon_of(wrong, 1.0))
    refused(lambda: mu_of(1.0, wrong))
    refused(lambda: rho_of(1.0, wrong))


@pytest.mark.parametrize(
    "wrong", ["1", "", None, 1j, [0.5], (0.5,), {}, np.array([0.5, 0.6])], ids=repr
)
def test_values_that_are_not_numbers_are_refused(wrong: Any):
    """A type checker reports such calls, so a plain TypeError is enough."""
    calls: list[Callable[[], object]] = [
        lambda: epsilon_of(wrong, 1.0),
        lambda: epsilon_of(1e-6, wrong),
        lambda: delta_of(wrong, 1.0),
        lambda: delta_of(1.0, wrong),
        lambda: mu_of(wrong, 1e-6),
        lambda: mu_of(1.0, wrong),
        lambda: sampler_delta(wrong),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError)):
            call()


def test_an_integer_too_large_for_a_float_is_refused():
    vast: Any = 10**400
    refused(lambda: epsilon_of(1e-6, vast))
    refused(lambda: log_delta_of(vast, 1.0))
    refused(lambda: mu_of(vast, 1e-6))
    refused(lambda: sampler_delta(vast))


# --- The sampler's floor under delta -----------------------------------------------------------

BITS = [32, 64, 128]
SHIFTS = [1e-6, 0.01, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 6.0, 6.6, 9.0, 12.0, 13.3]


def leaves_disc(shift: float, radius: mp.mpf) -> mp.mpf:
    """Marcum's Q by its series of Bessel functions: P(|z + shift| > radius) in the plane."""
    s = mp.mpf(shift)
    total, k, term = mp.mpf(0), 0, mp.mpf(1)
    while term > total * mp.eps:
        term = (s / radius) ** k * mp.besseli(k, s * radius)
        total, k = total + term, k + 1
    return mp.exp(-(s * s + radius * radius) / 2) * total


def radius_of(bits: int) -> mp.mpf:
    return mp.sqrt(2 * bits * mp.log(2))


@pytest.mark.parametrize("bits", BITS)
def test_sampler_delta_of_one_pair_is_a_tight_upper_bound(monkeypatch, bits: int):
    monkeypatch.setattr(gaussian, "MOST_DRAWS", 0.0)  # this pair alone
    with mp.workdps(30):
        radius = radius_of(bits)
        for shift in SHIFTS:
            if shift < radius:
                true, said = leaves_disc(shift, radius), sampler_delta(shift, bits)
                assert true <= said <= true * 1.1
                assert true > said * 0.9  # so that a tenth less would be too little


def test_marcums_series_is_the_integral_over_the_plane():
    with mp.workdps(20):
        radius, shift = radius_of(32), mp.mpf(2)
        density = lambda x: x * mp.exp(-(x * x + shift**2) / 2) * mp.besseli(0, shift * x)  # noqa: E731
        integral = mp.quad(density, [radius, radius + 1, radius + 3, radius + 10])
        assert abs(integral / leaves_disc(2.0, radius) - 1) < 1e-12


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 4.0])
def test_sampler_delta_adds_the_single_pair_and_the_many_pairs_term(mu: float, bits: int):
    with mp.workdps(30):
        radius = radius_of(bits)
        layers = mu * radius * mp.sqrt(mp.mpf(gaussian.MOST_DRAWS) / 2) * mp.mpf(2) ** -bits
        least = min(mp.mpf(1), leaves_disc(mu, radius) + layers)
        said = sampler_delta(mu, bits)
        assert least * (1 - 1e-12) <= said <= min(mp.mpf(1), 1.1 * least)


def leaves_by_the_layer(shift: mp.mpf, radius: mp.mpf) -> mp.mpf:
    """P(|z| < radius < |z + shift|), over the angles at each distance from the middle."""

    def density(r: mp.mpf) -> mp.mpf:
        cosine = (radius**2 - r * r - shift**2) / (2 * r * shift)
        return r * mp.exp(-r * r / 2) * mp.acos(max(-1, min(1, cosine))) / mp.pi

    start = max(mp.mpf(0), radius - shift)
    return mp.quad(density, mp.linspace(start, radius, 6))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mu", [1e-3, 0.3, 4.0])
def test_no_way_to_spread_the_distance_over_pairs_beats_the_bound(mu: float, bits: int):
    with mp.workdps(30):
        radius = radius_of(bits)
        said = sampler_delta(mu, bits)
        for pairs in [2**k for k in (0, 1, 2, 4, 8, 16, 32, 39)]:
            each = leaves_by_the_layer(mp.mpf(mu) / mp.sqrt(pairs), radius)
            assert min(mp.mpf(1), pairs * each) <= said


@pytest.mark.parametrize("bits", BITS)
def test_sampler_delta_increases_with_mu(bits: int):
    values = [sampler_delta(float(mu), bits) for mu in np.linspace(0, 20, 400)]
    assert all(step >= 0 for step in steps_in(values))
    assert values[1] < values[-1] == 1.0
    assert all(step > 0 for step, value in zip(steps_in(values), values, strict=False) if value < 1)


def test_sampler_delta_is_larger_with_fewer_bits():
    assert sampler_delta(1.0, 128) < 1e-20 < sampler_delta(1.0, 64) < 1e-6 < sampler_delta(1.0, 32)


@pytest.mark.parametrize("wrong", NO_NUMBER, ids=repr)
def test_sampler_delta_refuses_an_invalid_mu(wrong: float):
    refused(lambda: sampler_delta(wrong))
