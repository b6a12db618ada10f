"""JAX clients against a plain loop, in any cohort, and in another process."""

import hashlib
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpftrl._internal.arrays import Layout
from dpftrl.errors import InvalidInput
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining, client_batches, client_order
from dpftrl.tasks.language_model import Lstm, Window, logits
from dpftrl.tasks.task import Users
from dpftrl.tasks.vocabulary import BEGIN, PAD, UNKNOWN

COUNTS = {"ann": 1, "bob": 4, "cy": 5, "dee": 11, "eve": 23}
LOCAL = LocalTraining(learning_rate=0.3, batch_size=4, epochs=2)
MODELS = [Window(19, 4, 2, 5), Lstm(19, 4, 6, 5)]


def people() -> Users:
    draws = np.random.default_rng(0)
    rows = draws.integers(4, 19, (sum(COUNTS.values()), 8)).astype(np.int32)
    rows[:, 0] = BEGIN
    for row, length in zip(rows, draws.integers(1, 8, len(rows)), strict=True):
        row[length + 1 :] = PAD
    return Users(tuple(COUNTS), rows, np.cumsum([0, *COUNTS.values()]))


def started(model):
    parameters = model.init(5)
    return np.concatenate([parameters[name].ravel() for name in sorted(parameters)])


def plain_loss(parameters, batch, model):
    likely = jax.nn.log_softmax(logits(model, parameters, batch[:, :-1]))
    chosen = jnp.take_along_axis(likely, batch[:, 1:, None], -1)[..., 0]
    counted = batch[:, 1:] > UNKNOWN
    return -jnp.sum(chosen * counted) / jnp.sum(counted)


SLOPE = jax.jit(jax.grad(plain_loss), static_argnums=2)


def by_hand(model, name, round_number, local=LOCAL):
    """Return the update by its definition: no padding, no compiled loop, no blocks."""
    users = people()
    rows = users.of(users.names.index(name))
    parameters = start = model.init(5)

    order, done = client_order(7, round_number, name), 0
    for _ in range(local.epochs):
        shuffled = rows[order.permutation(len(rows))]
        for first in range(0, len(rows), local.batch_size):
            if done == local.most_batches:
                break
            gradient = SLOPE(parameters, shuffled[first:][: local.batch_size], model)
            parameters = {
                n: parameters[n] - np.float32(local.learning_rate) * np.asarray(gradient[n])
                for n in gradient
            }
            done += 1
    return np.concatenate([np.ravel(parameters[n] - start[n]) for n in sorted(start)])


@cache
def clients(model, local=LOCAL, seed=7):
    """Return clients that are compiled once for all tests."""
    return JaxClients(model, people(), local, seed)


@pytest.mark.parametrize("model", MODELS)
def test_updates_equal_those_of_a_plain_loop(model):
    for name, update in clients(model).updates(started(model), ["dee", "bob"], 3):
        expected = by_hand(model, name, 3)
        assert update.dtype == np.float32
        assert np.linalg.norm(expected) > 0.1
        np.testing.assert_allclose(update, expected, rtol=1e-3, atol=2e-6)


def test_batches_can_be_capped():
    local = LocalTraining(learning_rate=0.3, batch_size=4, epochs=2, most_batches=4)
    ((_, update),) = clients(MODELS[0], local).updates(started(MODELS[0]), ["dee"], 0)
    np.testing.assert_allclose(update, by_hand(MODELS[0], "dee", 0, local), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("model", MODELS)
def test_an_update_does_not_depend_on_the_others(model):
    fleet, start = clients(model), started(model)
    together = dict(fleet.updates(start, list(COUNTS), 2))
    for cohort in (["eve", "cy"], ["cy", "bob", "eve"], ["dee"], list(COUNTS)[::-1]):
        for name, update in fleet.updates(start, cohort, 2):
            np.testing.assert_array_equal(update, together[name])
    ((_, later),) = fleet.updates(start, ["eve"], 3)
    assert not np.array_equal(later, together["eve"])


def test_updates_come_in_the_order_of_the_cohort():
    cohort = ["eve", "ann", "dee", "bob", "cy"] * 4
    updates = clients(MODELS[0]).updates(started(MODELS[0]), cohort, 0)
    assert [name for name, _ in updates] == cohort


def test_one_compilation_serves_all_clients():
    fleet = clients(MODELS[0])
    for round_number, cohort in enumerate((["ann"], ["eve", "bob"], list(COUNTS))):
        list(fleet.updates(started(MODELS[0]) * (round_number + 1), cohort, round_number))
    assert fleet._train._cache_size() == 1


def test_remaining_updates_of_a_round_can_be_dropped():
    updates = clients(MODELS[0]).updates(started(MODELS[0]), list(COUNTS) * 50, 0)
    assert next(updates)[0] == "ann"
    updates.close()
    assert list(updates) == []


def test_the_server_may_overwrite_its_model_during_a_round():
    start = started(MODELS[0])
    updates = clients(MODELS[0]).updates(start, ["bob", "eve"], 0)
    start[:] = np.nan
    assert all(np.isfinite(update).all() for _, update in updates)


def test_the_update_of_a_diverged_client_is_passed_on():
    broken = np.full_like(started(MODELS[0]), np.nan)
    ((_, update),) = clients(MODELS[0]).updates(broken, ["bob"], 0)
    assert np.isnan(update).all()


def test_the_flat_order_is_the_server_s():
    parameters = MODELS[1].init(5)
    np.testing.assert_array_equal(Layout.of(parameters).flat(parameters), started(MODELS[1]))


def test_invalid_models_cohorts_and_settings_are_refused():
    fleet, start = clients(MODELS[0]), started(MODELS[0])
    with pytest.raises(InvalidInput, match="'zoe', which is not one of the users"):
        fleet.updates(start, ["ann", "zoe"], 0)
    with pytest.raises(InvalidInput, match=r"numbers of float32, got \(3,\)"):
        fleet.updates(start[:3], ["ann"], 0)
    with pytest.raises(InvalidInput, match="float64"):
        fleet.updates(start.astype(np.float64), ["ann"], 0)
    for wrong in (0.0, float("nan"), -1.0):
        with pytest.raises(InvalidInput, match="learning_rate"):
            LocalTraining(wrong)
    with pytest.raises(InvalidInput, match="most_batches"):
        LocalTraining(0.1, most_batches=0)


def test_batches_hold_each_sentence_once_per_epoch():
    rows = np.arange(1, 12, dtype=np.int32)[:, None] * np.ones(3, np.int32)
    local = LocalTraining(0.1, batch_size=4, epochs=2)
    batches = client_batches(rows, local, client_order(0, 0, "ann"), room=9)
    assert batches.shape == (9, 4, 3)
    assert not batches[6:].any()
    first, second = batches[:3, :, 0].ravel(), batches[3:6, :, 0].ravel()
    for epoch in (first, second):
        assert sorted(epoch) == [0, *range(1, 12)]
        assert epoch[-1] == PAD
    assert not np.array_equal(first, second)


def test_the_order_of_sentences_differs_by_client_and_round():
    keys = [(0, 0, "ann"), (1, 0, "ann"), (0, 1, "ann"), (0, 0, "bob"), (0, 11, "a"), (0, 1, "1a")]
    orders = [tuple(client_order(*key).permutation(20)) for key in keys]
    assert len(set(orders)) == len(keys)
    assert orders == [tuple(client_order(*key).permutation(20)) for key in keys]


def digest() -> str:
    """Return a digest of the updates of both models; another process prints it too."""
    whole = hashlib.sha256()
    for model in MODELS:
        for _, update in clients(model).updates(started(model), list(COUNTS), 1):
            whole.update(update.tobytes())
    return whole.hexdigest()


def test_another_process_gives_the_same_bits():
    folder = __file__.rsplit("/", 1)[0]
    program = f"import sys; sys.path.insert(0, {folder!r}); import test_jax_clients as t"
    command = [sys.executable, "-c", f"{program}; print(t.digest())"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == digest()
