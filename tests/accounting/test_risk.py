"""The risk of a guarantee, against riskcal, integrals, many digits and simulated attacks."""

import itertools
import json
import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from riskcal import analysis
from scipy import integrate, stats

from dpftrl import MinSep, account, compose, make_statement, mechanism
from dpftrl.accounting import calibrate_risk, mu_of, risk_of, sampler_delta
from dpftrl.accounting.amplification import account_sampled
from dpftrl.accounting.guarantee import Run, guarantee_of
from dpftrl.accounting.risk import (
    FPRS,
    PRIORS,
    Risk,
    epsilon_for_risk,
    gaussian_risk,
    point_risk,
    point_tpr,
    unsampled_risk,
)
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Independent
from dpftrl.participation import Poisson

MUS = [1e-6, 0.01, 0.3, 1.0, 2.5, 6.0]
CLIENTS = MinSep(rounds=2000, min_sep=400)


def guarantee(noise_multiplier: float = 7.0):
    return account(mechanism("blt-b400"), CLIENTS, noise_multiplier, 1e-10)


def exact_tpr(mu: float, fpr: float) -> mpmath.mpf:
    with mpmath.workdps(50):
        start = mpmath.mpf(float(stats.norm.ppf(fpr)))
        place = mpmath.findroot(lambda x: mpmath.ncdf(x) - mpmath.mpf(fpr), start)
        return mpmath.ncdf(mpmath.mpf(mu) + place)


@pytest.mark.parametrize("mu", MUS)
def test_gaussian_figures_agree_with_riskcal(mu):
    risk, outside = gaussian_risk(mu), sampler_delta(mu)
    for fpr, tpr in risk.tpr_at_fpr.items():
        ideal = 1 - analysis.get_beta_from_gdp(mu, fpr)
        assert tpr == pytest.approx(min(1, ideal + outside), abs=1e-10)
    advantage = analysis.get_advantage_from_gdp(mu)
    assert risk.max_advantage == pytest.approx(min(1, advantage + outside), abs=1e-10)


@pytest.mark.parametrize(("mu", "fpr"), list(itertools.product(MUS, FPRS)))
def test_the_tpr_is_the_integral_of_the_density_above_the_threshold(mu, fpr):
    threshold = stats.norm.isf(fpr)
    tpr, _ = integrate.quad(stats.norm(mu).pdf, threshold, mu + 40, epsabs=1e-12, points=[mu])
    stated = gaussian_risk(mu).tpr_at_fpr[fpr]
    assert stated == pytest.approx(min(1, tpr + sampler_delta(mu)), abs=1e-6)


@pytest.mark.parametrize("mu", MUS)
def test_the_advantage_is_the_total_variation(mu):
    def difference(x: float) -> float:
        return abs(stats.norm.pdf(x) - stats.norm.pdf(x - mu)) / 2

    total, _ = integrate.quad(difference, -40, mu + 40, points=[0, mu / 2, mu], limit=200)
    stated = gaussian_risk(mu).max_advantage
    assert stated == pytest.approx(min(1, total + sampler_delta(mu)), abs=1e-6)


@pytest.mark.parametrize(("mu", "fpr"), list(itertools.product([*MUS, 1e-12, 30.0, 1e5], FPRS)))
def test_no_tpr_is_below_its_true_value(mu, fpr):
    true, stated = exact_tpr(mu, fpr), gaussian_risk(mu).tpr_at_fpr[fpr]
    assert true <= stated <= true * (1 + 1e-10) + sampler_delta(mu) * (1 + 1e-9)


def test_a_tpr_without_its_margin_would_be_below_its_true_value():
    """The control: plain floating point is too small for some of the same settings."""
    pairs = itertools.product(np.geomspace(0.01, 5, 40), FPRS)
    assert any(stats.norm.cdf(mu + stats.norm.ppf(f)) < exact_tpr(mu, f) for mu, f in pairs)


def test_posteriors_are_those_of_bayes_and_never_below():
    risk = gaussian_risk(1.3)
    for prior, (fpr, tpr) in itertools.product(PRIORS, risk.tpr_at_fpr.items()):
        with mpmath.workdps(30):
            hit = mpmath.mpf(prior) * mpmath.mpf(tpr)
            true = hit / (hit + (1 - mpmath.mpf(prior)) * mpmath.mpf(fpr))
        assert true <= risk.posterior(prior, fpr) <= true * (1 + 1e-11)


def test_the_posterior_counts_people_in_a_simulated_attack():
    mu, prior, fpr = 1.5, 0.01, 0.01
    rng = np.random.default_rng(7)
    used = rng.random(4_000_000) < prior
    alarm = rng.standard_normal(len(used)) + mu * used > stats.norm.isf(fpr)
    share = used[alarm].mean()
    assert share == pytest.approx(gaussian_risk(mu).posterior(prior, fpr), abs=0.01)
    assert alarm[used].mean() == pytest.approx(gaussian_risk(mu).tpr_at_fpr[fpr], abs=0.01)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-3), (4.0, 1e-8), (9.0, 0.1)])
def test_points_agree_with_riskcal(epsilon, delta):
    risk = point_risk(epsilon, delta)
    for fpr, tpr in risk.tpr_at_fpr.items():
        assert tpr == pytest.approx(1 - analysis.get_beta_from_adp(epsilon, delta, fpr), rel=1e-10)
    advantage = analysis.get_advantage_from_adp(epsilon, delta)
    assert risk.max_advantage == pytest.approx(advantage, rel=1e-10)
    assert risk.kind == "upper bound"


def test_a_huge_epsilon_allows_everything():
    assert set(point_risk(1e6, 1e-6).tpr_at_fpr.values()) == {1.0}
    assert point_risk(1e6, 1e-6).max_advantage == 1.0
    assert gaussian_risk(1e6).as_json()["posterior"]["0.01"]["0.1"] <= 1


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_a_point_on_a_gaussian_curve_is_never_below_the_gaussian_risk(delta):
    """One epsilon and delta say less than the whole curve."""
    one = guarantee(4.0).at(delta)
    for bound in (point_risk(one.epsilon, delta), unsampled_risk(one.epsilon, delta)):
        for fpr, tpr in risk_of(one).tpr_at_fpr.items():
            assert tpr <= bound.tpr_at_fpr[fpr]
        assert risk_of(one).max_advantage <= bound.max_advantage
    assert unsampled_risk(one.epsilon, delta).max_advantage == pytest.approx(
        risk_of(one).max_advantage, rel=1e-5
    )


def test_sampled_batches_get_a_bound_that_the_composed_distribution_respects():
    """The composed privacy loss distribution of dp_accounting, through riskcal, is smaller."""
    from dp_accounting.pld import privacy_loss_distribution

    sampling = Poisson(dataset_size=1_000, batch_size=100, steps=30)
    one = account_sampled(Independent(), sampling, noise_multiplier=1.0, delta=1e-5)
    composed = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=0.1, value_discretization_interval=1e-3
    ).self_compose(30)
    risk = risk_of(one)
    assert risk == point_risk(one.epsilon, one.delta)
    for fpr, tpr in risk.tpr_at_fpr.items():
        assert 1 - analysis.get_beta_from_pld(composed, fpr) <= tpr


def test_the_risk_of_a_guarantee_is_that_of_its_mu():
    one = guarantee()
    assert risk_of(one).kind == "exact"
    assert risk_of(one).tpr_at_fpr == pytest.approx(gaussian_risk(one.mu).tpr_at_fpr, rel=1e-9)
    assert risk_of(one).max_advantage >= gaussian_risk(one.mu).max_advantage


def test_compositions_devices_and_rounding_carry_through():
    one = guarantee()
    both = compose([one, one], 1e-10)
    persons = one.for_devices(3)
    run_without_rounding = replace(one.runs[0], buffers="float32")
    unrounded = guarantee_of([run_without_rounding], 1e-10)
    for larger, mu in ((both, one.mu * math.sqrt(2)), (persons, 3 * one.mu)):
        assert risk_of(larger).kind == "upper bound"
        assert risk_of(larger).tpr_at_fpr == pytest.approx(gaussian_risk(mu).tpr_at_fpr, rel=1e-9)
        assert risk_of(larger).max_advantage > risk_of(one).max_advantage
    assert one.mu > unrounded.mu
    assert risk_of(one).tpr_at_fpr[0.001] > risk_of(unrounded).tpr_at_fpr[0.001]


@pytest.mark.parametrize(("max_tpr", "fpr"), [(0.05, 0.001), (0.5, 0.01), (0.11, 0.1), (0.99, 0.9)])
@pytest.mark.parametrize("devices", [1, 3])
def test_calibration_reaches_the_rate_and_wastes_no_noise(max_tpr, fpr, devices):
    chosen = mechanism("blt-b400")
    noise = calibrate_risk(chosen, CLIENTS, max_tpr, fpr, devices)
    mu = Run.of(chosen, CLIENTS, noise).mu * devices
    tpr = 1 - analysis.get_beta_from_gdp(mu, fpr)
    assert max_tpr * (1 - 1e-6) <= tpr <= max_tpr
    less = Run.of(chosen, CLIENTS, noise * (1 - 1e-6)).mu * devices
    assert 1 - analysis.get_beta_from_gdp(less, fpr) > max_tpr * (1 - 1e-9)


def test_an_epsilon_for_a_risk_is_the_largest():
    for max_tpr, fpr, delta in ((0.05, 0.001, 1e-6), (0.9, 0.5, 1e-3), (0.0011, 0.001, 1e-9)):
        epsilon = epsilon_for_risk(max_tpr, fpr, delta)
        assert point_tpr(epsilon, delta, fpr) <= max_tpr
        assert point_tpr(epsilon * (1 + 1e-6), delta, fpr) > max_tpr * (1 - 1e-11)
        assert mu_of(epsilon, delta) > 0


@pytest.mark.parametrize(
    ("max_tpr", "fpr", "words"),
    [
        (0.05, 0.05, "above the false-positive rate 5%"),
        (0.01, 0.1, "above the false-positive rate 10%"),
        (math.nan, 0.1, "max_tpr must be between 0 and 1"),
        (0.5, math.nan, "fpr must be between 0 and 1"),
        (1.0, 0.1, "max_tpr must be between 0 and 1"),
        (0.5, 0.0, "fpr must be between 0 and 1"),
    ],
)
def test_impossible_rates_are_refused(max_tpr, fpr, words):
    with pytest.raises(InvalidInput, match=words):
        calibrate_risk(mechanism("blt-b400"), CLIENTS, max_tpr, fpr)
    with pytest.raises(InvalidInput, match=words):
        epsilon_for_risk(max_tpr, fpr, 1e-6)


def test_a_delta_above_the_risk_is_refused():
    with pytest.raises(InvalidInput, match="use a smaller delta"):
        epsilon_for_risk(0.01, 0.001, 0.01)


def test_the_statement_says_the_risk_in_words_and_in_json():
    statement = make_statement(guarantee(), devices=3)
    risk = risk_of(guarantee())
    assert risk.sentence("the data of a client") in statement.markdown()
    assert "the data of a person on up to 3 devices was used with" in statement.markdown()
    content = json.loads(statement.json_bytes())
    assert {name: content[name] for name in risk.as_json()} == risk.as_json()


def test_a_risk_needs_a_prior_between_0_and_1():
    with pytest.raises(InvalidInput, match="prior must be between 0 and 1"):
        Risk({0.1: 0.2}, 0.1, "exact").posterior(1.0, 0.1)
