"""More noise for noise on a device: the guarantee of the plan covers errors of arithmetic."""

import math
from dataclasses import replace

import pytest
from device_pieces import SUPPORTED, DevicePlan, sampled_plan

import dpftrl
from dpftrl.accounting.gaussian import FARTHEST_NORMAL, mu_with_rounding
from dpftrl.errors import InvalidInput
from dpftrl.noise.device import ARITHMETIC, FLOAT64, SPLIT, Arithmetic
from dpftrl.participation import MinSep
from dpftrl.plan import Dataset, device, make_dataset_plan
from dpftrl.plan.device import noise_multiplier_on_device

SIZE, ROUNDS = 6_400_000, 2_000
B400 = dpftrl.mechanism("blt-b400")
PLAN = DevicePlan(B400, 7.379, MinSep(ROUNDS, 342, 6))


def mu_on_device(plan, norm, noise_multiplier, size, kind: Arithmetic) -> float:
    """The mu of noise on a device, by iterating the equation of the theorem from mu = 0."""
    rounds, mu = plan.participation.rounds, 0.0
    for _ in range(100):
        largest = FARTHEST_NORMAL + mu
        stored = 2 * kind.rounding * largest * math.sqrt(size) * B400.rounding_gain(rounds)
        errors = 2 * kind.noise_error(plan.mechanism, rounds, largest) * math.sqrt(size * rounds)
        mu = norm / noise_multiplier + stored + errors
    return mu


@pytest.mark.parametrize("arithmetic", ["float64", "split"])
def test_the_guarantee_of_the_plan_holds_for_every_participation(arithmetic):
    found = noise_multiplier_on_device(PLAN, SIZE, arithmetic)
    sensitivity = B400.sensitivity(PLAN.participation).value
    for norm in (1.0, 1.3, 2.0, sensitivity, 4 * sensitivity):
        mu = mu_on_device(PLAN, norm, found, SIZE, ARITHMETIC[arithmetic])
        assert mu <= norm / PLAN.noise_multiplier
        assert mu <= mu_with_rounding(norm / PLAN.noise_multiplier, B400, ROUNDS)
    # Without more noise it would not hold, and for one participation hardly any more is taken.
    assert mu_on_device(PLAN, 1.0, PLAN.noise_multiplier, SIZE, ARITHMETIC[arithmetic]) > (
        1 / PLAN.noise_multiplier
    )
    assert mu == pytest.approx(norm / PLAN.noise_multiplier, rel=0.01)


def test_a_participation_has_at_least_norm_1():
    """The hypothesis of the guarantee: the diagonal of C is 1."""
    for mechanism in [*SUPPORTED.values(), B400]:
        assert all(mechanism.pattern_norm([t], 6) >= 1.0 for t in range(6))


def test_split_needs_more_noise_than_float64_and_both_little():
    ratio = {
        name: noise_multiplier_on_device(PLAN, SIZE, name) / PLAN.noise_multiplier
        for name in ("float64", "split")
    }
    assert 1 < ratio["float64"] < 1.0001 < ratio["split"] < 1.01


@pytest.mark.parametrize("change", ["size", "rounds", "noise_multiplier"])
def test_more_of_anything_needs_more_noise(change):
    before = noise_multiplier_on_device(PLAN, SIZE) / PLAN.noise_multiplier
    plan, size = PLAN, SIZE
    if change == "size":
        size *= 2
    elif change == "rounds":
        plan = replace(PLAN, participation=MinSep(2 * ROUNDS, 342, 12))
    else:
        plan = replace(PLAN, noise_multiplier=2 * PLAN.noise_multiplier)
    assert noise_multiplier_on_device(plan, size) / plan.noise_multiplier > before


@pytest.mark.parametrize("wrong", [replace(SPLIT, product=0.0, sum=0.0), FLOAT64])
def test_bounds_that_are_too_small_are_noticed(wrong, monkeypatch):
    """Negative control: with smaller bounds, the noise would not be enough for split arithmetic."""
    monkeypatch.setitem(device.ARITHMETIC, "split", wrong)
    found = noise_multiplier_on_device(PLAN, SIZE)
    assert mu_on_device(PLAN, 1.0, found, SIZE, SPLIT) > 1 / PLAN.noise_multiplier


def test_independent_noise_has_no_buffers_to_round():
    plan = replace(PLAN, mechanism=dpftrl.Independent())
    ratio = noise_multiplier_on_device(plan, SIZE) / PLAN.noise_multiplier
    errors = 2 * SPLIT.noise_error(plan.mechanism, ROUNDS, 10.5) * math.sqrt(SIZE * ROUNDS)
    assert 1 < ratio < 1 + 1.01 * errors * PLAN.noise_multiplier


# --- Refusals -------------------------------------------------------------------------------------


def test_too_large_errors_are_refused():
    many = replace(PLAN, participation=MinSep(100_000, 342, 300))
    with pytest.raises(InvalidInput, match="would need over 10% more noise"):
        noise_multiplier_on_device(many, SIZE)
    assert noise_multiplier_on_device(many, SIZE, "float64") < 1.1 * PLAN.noise_multiplier


@pytest.mark.parametrize("mechanism", [dpftrl.BinaryTree(), dpftrl.SquareRoot()])
def test_other_mechanisms_are_refused_by_name(mechanism):
    with pytest.raises(InvalidInput, match=f"not {mechanism.name}"):
        noise_multiplier_on_device(replace(PLAN, mechanism=mechanism), SIZE)


def test_a_guarantee_for_sampled_batches_is_refused():
    with pytest.raises(InvalidInput, match="for poisson sampling, and does not cover"):
        noise_multiplier_on_device(sampled_plan(), SIZE)
    in_order = make_dataset_plan(
        Dataset(1000, 100, 2),
        mechanism_name="independent",
        sampling="none",
        epsilon=4.0,
        delta=1e-5,
    )
    assert noise_multiplier_on_device(in_order, 1000) >= in_order.noise_multiplier
