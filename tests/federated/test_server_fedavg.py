"""What the server releases, against federated averaging and DP-FTRL written out by hand."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from plain_fedavg import Examples, everybody, fedavg, gradient, local_update
from scipy import stats
from small_runs import PEOPLE, create, one_round, small_plan

from dpftrl.federated import Sgd
from dpftrl.mechanisms import Mechanism
from dpftrl.noise import ExactSum, Grid, NoiseKey, NoiseStream
from dpftrl.plan import Plan

SIZE = 7
WIDE = 800
ROUNDS = 12
START = np.linspace(-1, 1, SIZE)
PEOPLES_DATA = everybody(PEOPLE, SIZE)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


# --- Without noise: federated averaging ----------------------------------------------------------


def federated(
    place: Path, noise_multiplier: float, clip_norm: float
) -> tuple[np.ndarray, np.ndarray]:
    """The released model, and that of plain averaging over the same cohorts."""
    plan = small_plan(ROUNDS, 4, goal=5, over_selection=1.4, noise_multiplier=noise_multiplier)
    cohorts: list[list[Examples]] = []
    start = {"w": START}
    with create(place, plan, start, clip_norm=clip_norm, optimizer=Sgd(0.8)) as server:
        for _ in range(ROUNDS):
            attempt = server.begin(PEOPLE)
            counted = attempt.clients[:5]
            cohorts.append([PEOPLES_DATA[name] for name in counted])
            handed_out = server.arrays()["w"].astype(np.float64)
            for name in counted:
                update = local_update(handed_out, PEOPLES_DATA[name])
                attempt.report(name, {"w": update}, attempt.attempt)
            server.commit(attempt)
        return server.model.copy(), fedavg(START, cohorts, 0.8)


def test_with_next_to_no_noise_it_is_federated_averaging(tmp_path):
    released, plain = federated(tmp_path, noise_multiplier=1e-6, clip_norm=3.0)
    np.testing.assert_allclose(released, plain, rtol=0, atol=1e-5)
    assert abs(plain - START).max() > 0.5  # it did learn something


def test_with_noise_or_clipping_it_is_not(tmp_path):
    """The negative control."""
    for place, noise_multiplier, clip_norm in (("noise", 0.1, 3.0), ("clipping", 1e-6, 0.05)):
        released, plain = federated(tmp_path / place, noise_multiplier, clip_norm)
        assert abs(released - plain).max() > 1e-2


# --- With noise: DP-FTRL, bit by bit -------------------------------------------------------------


def whole_steps(gradients: list[np.ndarray], grid: Grid) -> np.ndarray:
    """The sum on the grid, cut toward zero, in whole numbers of any size."""
    step = Fraction(grid.step)
    return np.array(
        [sum(int(Fraction(float(g[i])) / step) for g in gradients) for i in range(SIZE)], np.int64
    )


@pytest.mark.parametrize("name", ["blt-b400", "independent", "band-sqrt:3", "tree", "sqrt"])
@pytest.mark.parametrize("too_long", [False, True])
def test_with_one_example_a_client_it_is_plain_dp_ftrl(tmp_path, name, too_long):
    clip_norm, rate, goal = (0.05 if too_long else 40.0), 0.02, 4
    plan = small_plan(ROUNDS, 4, goal=goal, noise_multiplier=0.05, name=name)
    data = everybody(PEOPLE, SIZE, examples=1)
    told = {"clip_norm": clip_norm, "optimizer": Sgd(rate), "snapshot_every": 5}
    server = create(tmp_path, plan, {"w": START}, key=99, **told)
    grid = Grid.for_noise(plan.noise_multiplier, clip_norm)
    key = NoiseKey.insecure_for_tests(99)
    noise = NoiseStream.unchecked(
        plan.mechanism, SIZE, noise_multiplier=plan.noise_multiplier, key=key, clip_norm=clip_norm
    )
    model = START.astype(np.float32)
    with server:
        for _ in range(ROUNDS):
            attempt = server.begin(PEOPLE)
            gradients = [-gradient(model.astype(float), data[who]) for who in attempt.clients]
            norms = [float(np.linalg.norm(g)) for g in gradients]
            for who, update in zip(attempt.clients, gradients, strict=True):
                attempt.report(who, update, attempt.attempt)
            if too_long:
                assert max(norms) > clip_norm
                exact = ExactSum(grid, SIZE)
                for update in gradients:
                    exact.add(update)
                total = exact.steps
            else:
                assert max(norms) < clip_norm
                total = whole_steps(gradients, grid)
            noise.add_to(total, grid)
            # The mean goes over the report goal; it is added in float64, and kept in float32.
            model = (model + rate * (total * grid.step / goal)).astype(np.float32)
            released = server.commit(attempt).model["w"]
            assert released.tobytes() == model.tobytes()
    assert abs(model - START).max() > 1e-3


# --- With noise: how large it is, and how it is correlated ---------------------------------------


def update_of(client: str, row: int) -> np.ndarray:
    return np.full(WIDE, 0.01 * (len(client) + row))


def deviations(place: Path, plan: Plan, keys: range) -> np.ndarray:
    """What noise did to each round's step, by round and by coordinate of every run."""
    rounds, clip_norm = plan.participation.rounds, 0.5
    grid = Grid.for_noise(plan.noise_multiplier, clip_norm)
    found = []
    for key in keys:
        models, exact = [np.zeros(WIDE)], []
        told = {"clip_norm": clip_norm, "snapshot_every": 100}
        with create(place / str(key), plan, {"w": np.zeros(WIDE)}, key=key, **told) as server:
            for row in range(rounds):
                attempt = server.begin(PEOPLE)
                total = ExactSum(grid, WIDE)
                for client in attempt.clients:
                    attempt.report(client, update_of(client, row), attempt.attempt)
                    total.add(update_of(client, row))
                exact.append(grid.values(total.steps) / plan.fleet.report_goal)
                models.append(server.commit(attempt).model["w"].astype(np.float64))
        found.append(np.diff(models, axis=0) - np.array(exact))
    return np.concatenate(found, axis=1)


def p_value(found: np.ndarray, mechanism: Mechanism, scale: float) -> float:
    """Whether rows have the covariance D D^T scale^2: whitened, they are independent normals.

    The smallest p-value of all variances and correlations, times their number.
    """
    rounds, samples = found.shape
    white = mechanism.strategy(rounds) @ found / scale  # D is the inverse of C
    values = []
    for i in range(rounds):
        one_side = stats.chi2.cdf(float(white[i] @ white[i]), samples)
        values.append(2 * min(one_side, 1 - one_side))
        for j in range(i):
            z = float(white[i] @ white[j]) / np.sqrt(samples)
            values.append(2 * stats.norm.sf(abs(z)))
    values.append(stats.kstest(white.ravel(), "norm").pvalue)
    return min(1.0, min(values) * len(values))


@pytest.mark.parametrize("name", ["blt-b400", "band-sqrt:3"])
def test_the_noise_has_the_covariance_that_was_promised(tmp_path, name):
    plan = small_plan(4, 2, goal=3, noise_multiplier=2.0, name=name)
    found = deviations(tmp_path / "right", plan, range(6))
    scale = 2.0 * 0.5 / 3
    assert p_value(found, plan.mechanism, scale) > 1e-4
    # The same test sees a tenth more noise than was asked for, and noise without correlation.
    louder = small_plan(4, 2, goal=3, noise_multiplier=2.2, name=name)
    assert p_value(deviations(tmp_path / "louder", louder, range(6)), plan.mechanism, scale) < 1e-6
    plain = small_plan(4, 2, goal=3, noise_multiplier=2.0, name="independent")
    assert p_value(deviations(tmp_path / "plain", plain, range(6)), plan.mechanism, scale) < 1e-6


def test_the_noise_is_not_divided_by_who_came(tmp_path):
    """The mean is over the report goal, which is fixed; more are asked, no more are counted."""
    plan = small_plan(2, 1, goal=2, over_selection=3.0, noise_multiplier=1e-6)
    with create(tmp_path, plan, {"w": np.zeros(SIZE)}, clip_norm=10.0) as server:
        released = one_round(server, update=lambda *_: np.ones(SIZE))
        np.testing.assert_allclose(released.model["w"], 1.0, atol=1e-4)
        attempt = server.begin(PEOPLE)
        attempt.report(attempt.clients[0], np.ones(SIZE), attempt.attempt)
        attempt.report(attempt.clients[1], None, attempt.attempt)
        np.testing.assert_allclose(server.commit(attempt).model["w"], 1.5, atol=1e-4)
