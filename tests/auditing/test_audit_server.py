"""The audit of the server accepts the real one, and notices broken ones."""

import math

import numpy as np
import pytest

from dpftrl import MinSep, mechanism
from dpftrl.auditing.server import BEHAVIORS, audit_server, mu_lower_bound
from dpftrl.clipping import Grid
from dpftrl.federated.round import Reports
from dpftrl.noise import NoiseStream

LARGE, TWICE, NAN = BEHAVIORS


def audit(folder, behavior, name="blt-b400"):
    participation = MinSep(8, 4)
    return audit_server(folder, mechanism(name, participation), participation, 0.01, behavior)


@pytest.mark.parametrize("name", ["blt-b400", "tree-full", "independent"])
def test_the_bound_is_close_to_the_claim_and_below_it(tmp_path, name):
    result = audit(tmp_path, LARGE, name)
    assert 0.85 * result.mu <= result.mu_lower_bound <= result.mu
    assert not result.exceeds_claim
    assert result.participations == (0, 4)


@pytest.mark.parametrize("behavior", [TWICE, NAN])
def test_other_behaviors_gain_nothing(tmp_path, behavior):
    assert not audit(tmp_path, behavior).exceeds_claim


def test_noise_that_is_too_small_is_noticed(tmp_path, monkeypatch):
    setup = NoiseStream._setup

    def small(self, *arguments):
        setup(self, *arguments)
        self._noise_multiplier *= 0.8

    monkeypatch.setattr(NoiseStream, "_setup", small)
    assert audit(tmp_path, LARGE).exceeds_claim


def test_a_client_that_counts_twice_is_noticed(tmp_path, monkeypatch):
    right = Reports._check_may_report
    monkeypatch.setattr(
        Reports,
        "_check_may_report",
        lambda self, clients, who: right(self, set(clients) - self.counted, who),
    )
    assert audit(tmp_path, TWICE).exceeds_claim


def test_a_divisor_that_depends_on_data_is_noticed(tmp_path, monkeypatch):
    values, add = Grid.values, Reports._add
    unfit = []

    def added(self, update):
        why = add(self, update)
        unfit.extend([] if why is None else [why])
        return why

    def divided(self, steps, divisor=1.0, *rest):
        fit = divisor - len(unfit)
        unfit.clear()
        return values(self, steps, fit, *rest)

    monkeypatch.setattr(Reports, "_add", added)
    monkeypatch.setattr(Grid, "values", divided)
    assert audit(tmp_path, NAN).exceeds_claim


def test_a_coordinate_without_noise_is_noticed(tmp_path, monkeypatch):
    right = NoiseStream.add_to

    def spared(self, total, *rest, **options):
        first = total.steps[7]
        right(self, total, *rest, **options)
        total.steps[7] = first

    monkeypatch.setattr(NoiseStream, "add_to", spared)
    assert audit(tmp_path, LARGE).noise_is_wrong


def test_the_bound_holds_for_simulated_gaussians():
    """With failure 0.1, at most about 0.1 of the bounds exceed the true mu."""
    rng = np.random.default_rng(0)
    shift = np.zeros((4, 2))
    shift[:, 0] = [3.0, 4.0, 0.0, 0.0]  # norm 5
    wrong = sum(
        mu_lower_bound(np.hstack([shift, np.zeros((4, 300))]) + rng.normal(size=(4, 302)), 0.1) > 5
        for _ in range(300)
    )
    assert wrong <= 45  # 30 expected at most; three standard deviations


def test_rounds_without_noise_of_their_own_have_no_finite_mu():
    rng = np.random.default_rng(0)
    row = rng.normal(size=302)
    assert mu_lower_bound(np.array([row, row]) + [[1.0], [0.0]] * np.eye(1, 302), 1e-5) > 1e6
    assert mu_lower_bound(np.zeros((2, 302)), 1e-5) == math.inf
