"""The cost of rounding and the epsilon that `verify` computes.

They are compared with the library's bound and with exact arithmetic.
"""

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import EVERY, Family, draw_case
from dpftrl import BLT, GeneralBLT, Mechanism
from dpftrl.accounting.gaussian import mu_with_rounding
from dpftrl.verify.epsilon import epsilon_of, rounding_cost, sampler_delta, worst_shift

every = pytest.mark.parametrize("family", EVERY, ids=str)

EXAMPLES = {
    "blt-b100": dpftrl.mechanism("blt-b100"),
    "blt-b400": dpftrl.mechanism("blt-b400"),
    "blt-b1000": dpftrl.mechanism("blt-b1000"),
    "blt-above-one": BLT([0.9, 0.2], [0.7, 0.35]),
    "gblt": GeneralBLT([0.9, 0.5], [0.2, 0.05]),
    "gblt-one": GeneralBLT([0.9], [0.2]),
    "gblt-pair": GeneralBLT([0.9, 0.5 + 0.1j], [0.2, 0.05]),
    "gblt-cancelling": GeneralBLT([0.99, 0.9], [1.2, -1.1]),
    "tree": dpftrl.BinaryTree(),
}
# How much larger than the shift the closed forms may be. Those of a BLT are tight. Those of sums of
# products are less tight, because they include the rounding of the weights and of the noise.
SLACK = {"blt": 3.0, "gblt": 8.0, "tree": 12.0}


@every
@settings(max_examples=25)
@given(data=st.data())
def test_the_recomputed_shift_never_exceeds_the_bound_of_the_library(family: Family, data):
    mechanism, rounds = draw_case(data, family, 60)
    assert worst_shift(mechanism, rounds) <= mechanism.rounding_gain(rounds)


@pytest.mark.parametrize("rounds", [16, 100, 400])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bound_of_the_library_is_not_much_larger_than_the_recomputed_shift(
    name: str, rounds: int
):
    mechanism = EXAMPLES[name]
    recomputed, stated = worst_shift(mechanism, rounds), mechanism.rounding_gain(rounds)
    assert stated / SLACK[mechanism.family] <= recomputed <= stated


@pytest.mark.parametrize("name", ["blt-b400", "gblt", "tree", "sqrt"])
@pytest.mark.parametrize("mu", [0.05, 1.0, 8.0])
def test_verify_and_library_compute_the_same_mu_from_a_shift(name: str, mu: float):
    mechanism: Mechanism = EXAMPLES.get(name) or dpftrl.mechanism(name)
    ours = mu + rounding_cost(mechanism.rounding_gain(2000), 2000, mu)
    assert ours == pytest.approx(mu_with_rounding(mu, mechanism, 2000), rel=1e-15)


def test_buffers_rounded_after_every_product_have_a_larger_shift():
    """The strategies are equal, but a GeneralBLT rounds each product and a BLT rounds once."""
    once, often = BLT([0.9, 0.5], [0.2, 0.05]), GeneralBLT([0.9, 0.5], [0.2, 0.05])
    assert once.strategy(20) == pytest.approx(often.strategy(20))
    assert worst_shift(often, 100) > 2 * worst_shift(once, 100)


@pytest.mark.parametrize("mu", [1e-3, 0.05, 1.0, 7.0, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_epsilon_agrees_with_exact_arithmetic(mu, delta):
    with mpmath.workdps(60):

        def excess(epsilon):
            first = mpmath.ncdf(mpmath.mpf(mu) / 2 - epsilon / mu)
            return first - mpmath.exp(epsilon) * mpmath.ncdf(-mpmath.mpf(mu) / 2 - epsilon / mu)

        recomputed = epsilon_of(delta, mu)
        if recomputed == 0:
            assert excess(0) <= delta
        else:
            assert excess(recomputed * (1 + 1e-9)) <= delta <= excess(recomputed * (1 - 1e-9))


@pytest.mark.parametrize("mu", [0.5, 3.0, 9.0])
def test_sampler_delta_agrees_with_exact_arithmetic(mu):
    radius = mpmath.sqrt(2 * mpmath.log(2) * 76)
    tail = mpmath.quad(
        lambda r: (
            r * mpmath.exp(-((r - mu) ** 2) / 2) * mpmath.besseli(0, mu * r) / mpmath.exp(mu * r)
        ),
        [radius, radius + 2, radius + 10, radius + 30],
    )
    layers = mu * radius * 2 ** mpmath.mpf(19.5) / 2**76
    assert sampler_delta(mu) == pytest.approx(float(tail + layers), rel=1e-6)
