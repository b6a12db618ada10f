"""Rounding in the noise buffers: it is part of mu, and too much of it is refused."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import EVERY, Family, draw_case, participations
from dpftrl import BLT, GeneralBLT, Mechanism, MinSep
from dpftrl.accounting import (
    Run,
    account,
    calibrate,
    calibrate_rho,
    guarantee_of,
    load_guarantee,
    save_guarantee,
    spending,
)
from dpftrl.accounting.gaussian import (
    FARTHEST_NORMAL,
    MOST_DRAWS,
    MOST_ROUNDING,
    mu_before_rounding,
    mu_with_rounding,
)
from dpftrl.accounting.guarantee import ROUNDING_NOT_COVERED
from dpftrl.errors import InvalidInput
from dpftrl.plan import Fleet, Plan

CLIENTS = MinSep(rounds=2000, min_sep=400, max_participations=5)
FLEET = Fleet(40_000, 100)
ROUNDING = ["blt-b100", "blt-b400", "blt-b1000", "tree", "gblt:0.9@0.2,0.5+0.1j@0.05"]
EXACT = ["independent", "sqrt", "band-sqrt:40", "inv-sqrt:8", "tree-vanilla", "smooth-tree"]
GUARANTEES = sorted((Path(__file__).parents[1] / "golden" / "v1" / "guarantees").glob("*.json"))


def cancelling(scale: float) -> GeneralBLT:
    """C of one buffer with decay 0.9 and scale 0.1, from two whose scales cancel."""
    return GeneralBLT([0.9, 0.9], [scale, 0.1 - scale])


def ideal_mu(mechanism: Mechanism, noise_multiplier: float) -> float:
    return mechanism.sensitivity(CLIENTS).value / noise_multiplier


# --- Mu ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUNDING)
def test_the_mu_of_a_run_includes_the_rounding_of_its_buffers(name: str):
    """The radius ends at a uniform of 2^-77; the shift has two roundings, one for each input."""
    mechanism = dpftrl.mechanism(name, CLIENTS)
    guarantee, ideal = account(mechanism, CLIENTS, 5.0, 1e-8), ideal_mu(mechanism, 5.0)
    share = 2 * 2.0**-53 * mechanism.rounding_gain(2000) * math.sqrt(2.0**40 / 2000)
    rounding = share * (math.sqrt(-2 * math.log(2.0**-77)) + guarantee.mu)
    assert guarantee.mu > ideal
    assert guarantee.mu - ideal == pytest.approx(rounding, rel=1e-6)
    assert guarantee.runs[0].rounding == guarantee.mu - ideal


@pytest.mark.parametrize("name", EXACT)
def test_a_family_that_rounds_nothing_has_its_ideal_mu(name: str):
    mechanism = dpftrl.mechanism(name, CLIENTS)
    guarantee = account(mechanism, CLIENTS, 5.0, 1e-8)
    assert guarantee.mu == ideal_mu(mechanism, 5.0)
    assert guarantee.runs[0].rounding == 0


def test_the_rounding_of_the_papers_blt_is_a_few_parts_in_a_million():
    """The figures of `docs/guarantees.md`."""
    blt = dpftrl.mechanism("blt-b400")
    run = account(blt, CLIENTS, 5.0, 1e-8).runs[0]
    assert run.rounding / run.mu == pytest.approx(3.36e-6, rel=0.01)
    per_coordinate = run.rounding / math.sqrt(MOST_DRAWS / 2000)
    assert per_coordinate * math.sqrt(6_400_000) / run.mu == pytest.approx(3.6e-7, rel=0.02)


@pytest.mark.parametrize("name", ROUNDING)
def test_spending_includes_rounding_and_never_falls(name: str):
    mechanism = dpftrl.mechanism(name, CLIENTS)
    spent = spending(mechanism, min_sep=10, noise_multiplier=5.0)
    so_far = [next(spent) for _ in range(70)]
    assert all(sooner.mu <= later.mu for sooner, later in pairwise(so_far))
    for rounds in (9, 40, 70):
        whole = account(mechanism, MinSep(rounds, 10), 5.0, 1e-8)
        assert so_far[rounds - 1].mu == pytest.approx(whole.mu, rel=1e-12)


def test_float32_buffers_have_their_ideal_mu_and_say_so():
    old = Run.of(dpftrl.mechanism("blt-b400"), CLIENTS, 5.0, buffers="float32")
    assert old.mu == old.sensitivity.value / 5.0
    assert ROUNDING_NOT_COVERED in guarantee_of([old], 1e-8).hypotheses
    new = account(dpftrl.mechanism("blt-b400"), CLIENTS, 5.0, 1e-8)
    assert "rounding" not in {hypothesis.name for hypothesis in new.hypotheses}


@pytest.mark.parametrize("name", ROUNDING)
@given(mu=st.floats(0.01, 20))
def test_mu_before_rounding_inverts_mu_with_rounding(name: str, mu: float):
    mechanism = dpftrl.mechanism(name, CLIENTS)
    ideal = mu_before_rounding(mu, mechanism, 2000)
    assert ideal < mu
    assert mu_with_rounding(ideal, mechanism, 2000) == pytest.approx(mu, rel=1e-14)


def test_no_normal_is_farther_than_the_last_radius():
    assert math.sqrt(-2 * math.log(2.0**-77)) == pytest.approx(FARTHEST_NORMAL, rel=1e-15)


# --- Too much rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUNDING)
@settings(max_examples=20)
@given(data=st.data())
def test_plans_and_calibration_use_the_same_limit_on_rounding(name: str, data):
    """At a mu where rounding is a tenth below the limit both accept, and a tenth above neither."""
    rounds = data.draw(st.integers(8, 3000), label="rounds")
    mechanism, clients = dpftrl.mechanism(name), MinSep(rounds, rounds)
    rounding = mu_with_rounding(0.0, mechanism, rounds)
    for factor, fits in ((1.1, True), (0.9, False)):
        mu = rounding / MOST_ROUNDING * factor
        if mu > 5:  # too large to state an epsilon
            return
        ideal = mu * (1 - MOST_ROUNDING / factor)
        guarantee = account(mechanism, clients, mechanism.sensitivity(clients).value / ideal, 1e-8)
        assert guarantee.mu == pytest.approx(mu, rel=1e-2)
        for attempt in (
            lambda guarantee=guarantee: Plan(FLEET, guarantee),
            lambda guarantee=guarantee: calibrate(mechanism, clients, guarantee.epsilon, 1e-8),
            lambda guarantee=guarantee: calibrate_rho(mechanism, clients, guarantee.rho),
        ):
            if fits:
                attempt()
            else:
                with pytest.raises(InvalidInput, match=r"of mu .* and 0\.1% is the limit"):
                    attempt()


def test_scales_that_cancel_are_accounted_for_but_refused_to_new_runs():
    mechanism = cancelling(1000.0)
    guarantee = account(mechanism, CLIENTS, 5.0, 1e-8)
    run = guarantee.runs[0]
    assert run.rounding > 10 * MOST_ROUNDING * run.mu
    for attempt in (
        lambda: Plan(FLEET, guarantee),
        lambda: calibrate(mechanism, CLIENTS, guarantee.epsilon, 1e-8),
        lambda: calibrate_rho(mechanism, CLIENTS, guarantee.rho),
    ):
        with pytest.raises(InvalidInput, match="smaller scales"):
            attempt()


def test_rounding_that_leaves_no_guarantee_is_refused_everywhere():
    for attempt in (
        lambda: account(dpftrl.mechanism("blt-b400"), MinSep(10**12, 10**11), 5.0, 1e-8),
        lambda: account(cancelling(4999.0), CLIENTS, 5.0, 1e-8),
    ):
        with pytest.raises(InvalidInput, match="leaves no guarantee"):
            attempt()


@pytest.mark.parametrize("family", EVERY, ids=str)
@settings(max_examples=10)
@given(data=st.data())
def test_calibrated_noise_covers_the_rounding(family: Family, data):
    mechanism, rounds = draw_case(data, family, 30)
    clients = data.draw(participations(rounds))
    noise_multiplier = calibrate(mechanism, clients, 2.0, 1e-6)
    guarantee = account(mechanism, clients, noise_multiplier, 1e-6)
    assert 2.0 * (1 - 1e-6) <= guarantee.epsilon <= 2.0
    assert guarantee.mu >= guarantee.runs[0].sensitivity.value / noise_multiplier
    run = guarantee.runs[0]
    assert run.rounding <= MOST_ROUNDING * run.mu  # or a plan would refuse it


# --- Files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GUARANTEES, ids=lambda path: path.stem)
def test_a_guarantee_of_version_1_says_that_rounding_is_not_covered(path: Path, tmp_path: Path):
    old = load_guarantee(path)
    assert "rounding" not in {each["name"] for each in json.loads(path.read_text())["hypotheses"]}
    assert ROUNDING_NOT_COVERED in old.hypotheses
    assert "not covered" in ROUNDING_NOT_COVERED.text
    assert {run.buffers for run in old.runs} == {"float32"}
    assert all(run.rounding == 0 for run in old.runs)
    again = tmp_path / "again.json"
    save_guarantee(old, again)
    assert ROUNDING_NOT_COVERED in load_guarantee(again).hypotheses


def test_a_file_that_leaves_the_rounding_out_of_mu_is_refused(tmp_path: Path):
    path = tmp_path / "guarantee.json"
    save_guarantee(account(BLT([0.9], [0.2]), CLIENTS, 5.0, 1e-8), path)
    content = json.loads(path.read_text())
    content["runs"][0]["rounding"] = 0.0
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="rounding"):
        load_guarantee(path)
