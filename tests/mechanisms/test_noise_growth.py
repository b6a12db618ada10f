"""Strategies whose noise outgrows float64: what is lost in it, and who refuses them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import EVERY, Family, draw_case
from dpftrl import Banded, BandedInverse, MinSep, Toeplitz, account
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms.base import MOST_NOISE
from dpftrl.noise import ExactSum, Grid, NoiseKey, NoiseStream
from dpftrl.plan import Fleet, Plan

ROUNDS = 150
CLIENTS = MinSep(ROUNDS, 50)
FLEET = Fleet(5000, 100)

GROWING = {
    "toeplitz": Toeplitz([1.0, 1.5]),
    "toeplitz, slowly": Toeplitz([1.0, 0.2, 1.3]),
    "banded": Banded([[1.0] * ROUNDS, [1.5] * (ROUNDS - 1) + [0.0]]),
    "banded-inverse": BandedInverse([1.0, 2.0**30]),
    "toeplitz, small": Toeplitz([1e-12]),
    "toeplitz, falling and small": Toeplitz([2e-9, 1e-9]),
    "banded-inverse, large": BandedInverse([1e12]),
    "banded, small": Banded([[1e-12] * ROUNDS]),
}
STEADY = ["independent", "sqrt", "band-sqrt:40", "banded:40", "inv-sqrt:40", "lambda:0.9", "tree"]
STEADY += [
    "tree-vanilla",
    "tree-full",
    "smooth-tree",
    "blt-b400",
    "toeplitz:1,0.5,0.6",
    "toeplitz:1,1",
]


@pytest.mark.parametrize("name", GROWING)
def test_no_plan_has_noise_that_float64_cannot_hold(name: str):
    with pytest.raises(InvalidInput, match="would lose Z"):
        GROWING[name].check_noise(ROUNDS)
    if name != "banded-inverse":  # whose strategy is too large for any account
        noise_multiplier = GROWING[name].sensitivity(CLIENTS).value
        with pytest.raises(InvalidInput, match="would lose Z"):
            Plan(FLEET, account(GROWING[name], CLIENTS, noise_multiplier, 1e-8))


@pytest.mark.parametrize("name", STEADY)
def test_noise_that_does_not_grow_is_accepted(name: str):
    mechanism = dpftrl.mechanism(name, CLIENTS)
    noise_multiplier = mechanism.sensitivity(CLIENTS).value
    Plan(FLEET, account(mechanism, CLIENTS, noise_multiplier, 1e-8))


def test_a_stream_without_a_plan_shows_what_would_be_lost():
    """The control: noise beyond 63 bits is the same constant whatever the key."""
    grid, released = Grid.for_noise(5.0, clip_norm=1.0), []
    for seed in (1, 2):
        stream = NoiseStream.unchecked(
            GROWING["toeplitz"],
            4,
            noise_multiplier=5.0,
            clip_norm=1.0,
            key=NoiseKey.insecure_for_tests(seed),
        )
        for _ in range(140):
            total = ExactSum(grid, 4)
            stream.add_to(total)
        released.append(total.steps)
    assert np.array_equal(*released)


@pytest.mark.parametrize("family", EVERY, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_accepted_mechanisms_have_small_noise(family: Family, data):
    mechanism, rounds = draw_case(data, family, 40)
    sizes = np.abs(mechanism.decoder(rounds)).sum(axis=1)  # for rows of Z up to 1
    try:
        mechanism.check_noise(rounds)
    except InvalidInput:
        assert sizes.max() > MOST_NOISE / 2  # no first coefficient is above 2
    else:
        # Bands are tried out on random signs, which are not the worst ones.
        assert sizes.max() <= MOST_NOISE * 40
