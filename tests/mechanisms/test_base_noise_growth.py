"""Strategies whose noise outgrows float64: what is lost in it, and who refuses them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import EVERY, Family, draw_case
from dpftrl import (
    Banded,
    BandedInverse,
    MinSep,
    Toeplitz,
    account,
    calibrate,
    calibrate_rho,
    load_guarantee,
    make_plan,
    save_guarantee,
)
from dpftrl.accounting import Run, delta_for
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


STATED = {
    "account": lambda growing: account(growing, CLIENTS, 1.0, 1e-8),
    "run": lambda growing: Run.of(growing, CLIENTS, 1.0),
    "calibrate": lambda growing: calibrate(growing, CLIENTS, 2.0, 1e-8),
    "calibrate_rho": lambda growing: calibrate_rho(growing, CLIENTS, 0.1),
    "delta_for": lambda growing: delta_for(growing, CLIENTS, 1.0, 2.0),
    "plan": lambda growing: make_plan(
        population=5000, report_goal=100, rounds=ROUNDS, delta=1e-8, epsilon=2.0, mechanism=growing
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_strategy_with_noise_that_float64_cannot_hold_is_refused(name: str):
    with pytest.raises(InvalidInput, match="would lose Z"):
        GROWING[name].check_noise(ROUNDS)


@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("name", GROWING)
def test_nothing_states_an_epsilon_for_noise_that_float64_cannot_hold(name: str, stated: str):
    with pytest.raises(InvalidInput, match="would lose Z"):
        STATED[stated](GROWING[name])


def test_more_rounds_of_a_run_are_checked_again():
    slowly = Toeplitz([1.0, 1.1])
    run = Run.of(slowly, MinSep(20, 20), 1.0)
    assert run.with_participation(MinSep(10, 5)) == Run.of(slowly, MinSep(10, 5), 1.0)
    with pytest.raises(InvalidInput, match="would lose Z"):
        run.with_participation(MinSep(400, 20))


def test_a_file_of_a_guarantee_for_such_noise_does_not_open(tmp_path):
    path = tmp_path / "guarantee.json"
    save_guarantee(account(Toeplitz([1.0, 0.7]), CLIENTS, 5.0, 1e-8), path)
    load_guarantee(path)
    text = path.read_text()
    assert text.count("0.7\n") == 1
    path.write_text(text.replace("0.7\n", "1.5\n"))
    with pytest.raises(InvalidInput, match="would lose Z"):
        load_guarantee(path)


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
