"""Server optimisers, against loops written out by hand in float64."""

import math

import numpy as np
import pytest
from small_runs import PEOPLE, SIZE, create, one_round, reopen, small_plan

from dpftrl.errors import InvalidInput
from dpftrl.federated import Adam, Optimizer, Sgd
from dpftrl.workload import Workload

ROUNDS = 12
MEANS = np.random.default_rng(7).normal(size=(ROUNDS, SIZE))
START = np.random.default_rng(8).normal(size=SIZE)
COOLDOWN = "cooldown:last-quarter:0.05"


def through(optimizer: Optimizer, means: np.ndarray = MEANS, rounds: int = ROUNDS) -> np.ndarray:
    """The model after each round."""
    optimizer.check(rounds)
    model, state = START.astype(np.float32), optimizer.start(SIZE)
    models = []
    for row, mean in enumerate(means):
        model, state = optimizer.step(model, mean, state, row, rounds)
        assert model.dtype == np.float32
        assert all(vector.dtype == np.float32 for vector in state.values())
        models.append(model)
    return np.array(models)


def rates_by_hand(schedule: str | None, rate: float) -> list[float]:
    """Twelve rounds: the last quarter is three of them, which end at the last rate."""
    if schedule is None:
        return [rate] * 12
    falls = (1 - 0.05) / 3
    return [rate] * 9 + [rate * (1 - falls), rate * (1 - 2 * falls), rate * 0.05]


def sgd_by_hand(rates: list[float], momentum: float, nesterov: bool) -> np.ndarray:
    model, velocity, models = list(START), [0.0] * SIZE, []
    for rate, mean in zip(rates, MEANS, strict=True):
        for i in range(SIZE):
            velocity[i] = momentum * velocity[i] + mean[i]
            step = mean[i] + momentum * velocity[i] if nesterov else velocity[i]
            model[i] += rate * step
        models.append(list(model))
    return np.array(models)


def adam_by_hand(rates: list[float], beta1: float, beta2: float, tau: float) -> np.ndarray:
    model, first, second, models = list(START), [0.0] * SIZE, [0.0] * SIZE, []
    for rate, mean in zip(rates, MEANS, strict=True):
        for i in range(SIZE):
            first[i] = beta1 * first[i] + (1 - beta1) * mean[i]
            second[i] = beta2 * second[i] + (1 - beta2) * mean[i] ** 2
            model[i] += rate * first[i] / (math.sqrt(second[i]) + tau)
        models.append(list(model))
    return np.array(models)


@pytest.mark.parametrize("schedule", [None, COOLDOWN])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)]
)
def test_sgd_is_what_it_says(momentum, nesterov, schedule):
    by_hand = sgd_by_hand(rates_by_hand(schedule, 0.3), momentum, nesterov)
    models = through(Sgd(0.3, momentum, nesterov, schedule))
    np.testing.assert_allclose(models, by_hand, rtol=0, atol=5e-6)


def test_nesterov_and_momentum_differ():
    """The negative control."""
    plain, ahead = through(Sgd(0.3, 0.9)), through(Sgd(0.3, 0.9, nesterov=True))
    assert abs(plain - ahead).max() > 0.1


@pytest.mark.parametrize("schedule", [None, COOLDOWN])
@pytest.mark.parametrize(("beta1", "beta2", "tau"), [(0.9, 0.99, 1e-3), (0.0, 0.5, 1.0)])
def test_adam_is_what_it_says(beta1, beta2, tau, schedule):
    by_hand = adam_by_hand(rates_by_hand(schedule, 0.1), beta1, beta2, tau)
    models = through(Adam(0.1, beta1, beta2, tau, schedule))
    np.testing.assert_allclose(models, by_hand, rtol=0, atol=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", [None, COOLDOWN, "cooldown:last-tenth:0"])
def test_sgd_is_the_workload_that_plans_are_made_for(momentum, schedule):
    if schedule is None:
        workload = Workload(momentum)
    else:
        workload = Workload.with_schedule(schedule, ROUNDS, momentum)
    expected = START + workload.apply(MEANS)
    models = through(Sgd(1.0, momentum, schedule=schedule))
    np.testing.assert_allclose(models, expected, rtol=0, atol=2e-5)


def test_the_schedule_is_that_of_the_whole_run():
    """A run that ends early has not cooled down: rates go by the rounds that were planned."""
    models = through(Sgd(1.0, schedule=COOLDOWN), np.ones((9, SIZE)), rounds=ROUNDS)
    np.testing.assert_allclose(models[-1], START + 9, rtol=0, atol=1e-5)
    (whole,) = through(Sgd(1.0, schedule="cooldown:last-half:0.25"), np.ones((1, SIZE)), rounds=1)
    np.testing.assert_allclose(whole, START + 0.25, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [Sgd(0.5), Sgd(0.5, 0.9), Sgd(0.5, 0.9, True, COOLDOWN), Adam(0.1), Adam(schedule=COOLDOWN)],
    ids=["sgd", "momentum", "nesterov", "adam", "adam-cooldown"],
)
def test_a_run_that_is_resumed_in_the_middle_has_the_same_bits(tmp_path, optimizer, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    plan = small_plan(ROUNDS, 2)

    def update(client: str, row: int) -> np.ndarray:
        return np.sin(np.arange(SIZE) + row + len(client))

    whole, pieces = (
        create(tmp_path / name, plan, optimizer=optimizer, snapshot_every=5)
        for name in ("whole", "pieces")
    )
    for row in range(ROUNDS):
        one_round(whole, PEOPLE, update)
        if row % 2:
            pieces = reopen(pieces)
        one_round(pieces, PEOPLE, update)
        assert whole.model.tobytes() == pieces.model.tobytes()
    assert np.isfinite(whole.model).all()
    assert whole.model.any()
    whole.close()
    pieces.close()


def test_a_model_that_diverges_is_released_without_a_warning(tmp_path):
    with create(tmp_path, optimizer=Sgd(1e39, 0.9)) as server:
        for _ in range(3):
            one_round(server)
        assert not np.isfinite(server.model).all()
        with reopen(server) as again:
            assert again.model.tobytes() == server.model.tobytes()
            assert one_round(again).rounds == 4


@pytest.mark.parametrize(
    "optimizer",
    [
        *(Sgd(learning_rate=rate) for rate in (0.0, -1.0, math.nan, math.inf)),
        *(Sgd(momentum=share) for share in (1.0, -0.1, math.nan, math.inf)),
        Sgd(nesterov=True),
        Sgd(schedule="slower"),
        Sgd(schedule="cooldown:last-quarter:nan"),
        Adam(learning_rate=math.nan),
        *(Adam(beta1=share) for share in (1.0, -0.1, math.nan)),
        *(Adam(beta2=share) for share in (1.0, -0.1, math.nan)),
        *(Adam(tau=tau) for tau in (0.0, -1.0, math.nan, math.inf)),
    ],
    ids=repr,
)
def test_optimisers_that_make_no_sense_are_refused(optimizer, tmp_path):
    with pytest.raises(InvalidInput) as refused:
        create(tmp_path, optimizer=optimizer)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
