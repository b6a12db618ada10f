"""Canary clients: they train like clients, are clipped like clients, and replace nobody."""

import numpy as np
import pytest
from sentence_runs import create, trained

from dpftrl import Grid, InvalidInput, verify_run
from dpftrl.auditing.canaries import SECRET, read_secrets
from dpftrl.auditing.sentences import read_sentence_file
from dpftrl.errors import UnsafeState
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.simulation.training import Training

FEW = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("canaries")


@pytest.fixture(scope="module")
def finished(place):
    return trained(place / "finished", rounds=3, canaries=FEW)


def test_a_run_with_canary_sentences_verifies(finished):
    verdict = verify_run(finished, finished.parent / "state")
    assert verdict.passed
    assert verdict.epsilon == pytest.approx(8.0, rel=1e-3)


def test_they_take_nobodys_place(finished):
    with ledger_file(finished) as ledger:
        lines = ledger.read_text().splitlines()
    assert sum(line.endswith("counted") for line in lines) == 3 * 4
    assert not any("canary" in line for line in lines)


def test_the_sum_has_the_clipped_updates_of_those_whose_coin_says_yes(place):
    from dpftrl.simulation.canary_clients import open_canaries
    from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
    from dpftrl.simulation.training import network

    with create(place / "sum", rounds=3, canaries=FEW) as training:
        server = training.server
        model = network(training.config.model, training.task)
        local = LocalTraining(1.0, batch_size=4)
        canaries = open_canaries(server, model, local, seed=0)
        grid = Grid(step=2.0**-30, clip_norm=0.5)
        file, secret = read_sentence_file(server.folder.root), read_secrets(server.folder.root)
        included = secret.included(FEW)
        clients = JaxClients(model, file.users(secret), local, seed=0)
        expected = np.zeros(server.model.size)
        for name, update in clients.updates(server.model, clients.names, 1):
            if included[int(name.removeprefix("canary-"))]:
                norm = float(np.linalg.norm(update.astype(float)))
                assert norm > 0
                expected += update * min(1.0, 0.5 / norm)
        found = canaries.updates(1, grid)
        assert found.updates == included.sum()  # min-sep is 1: all take part in every round
        assert np.allclose(grid.values(found.steps), expected, atol=1e-6)
        assert canaries.updates(99, grid) is None
        assert str(included.sum()) not in repr(canaries).replace(str(FEW), "")


def test_a_canary_whose_update_is_not_finite_counts_as_zeros(place, monkeypatch):
    from dpftrl.simulation.jax_clients import JaxClients

    with create(place / "nan", rounds=3, canaries=FEW) as training:
        canaries = training._loop._canaries
        grid = Grid(step=2.0**-30, clip_norm=0.5)

        def diverged(_, model, names, _number):
            return ((name, np.full(model.size, np.nan, np.float32)) for name in names)

        monkeypatch.setattr(JaxClients, "updates", diverged)
        found = canaries.updates(0, grid)
    assert found.updates == 0
    assert not found.steps.any()


def test_a_resumed_run_goes_on_with_the_same_canaries(place):
    root = place / "resumed"
    with create(root, rounds=4, canaries=FEW) as training:
        training.run(should_stop=lambda: training.server.rounds == 2)
    secret = (root / "run" / SECRET).read_bytes()
    with Training.resume(root / "run", state_folder=root / "state") as training:
        assert training.run() is not None
    assert (root / "run" / SECRET).read_bytes() == secret
    assert verify_run(root / "run", root / "state").passed


def test_lost_secrets_are_noticed(place):
    root = place / "lost"
    with create(root, rounds=4, canaries=FEW) as training:
        training.run(should_stop=lambda: training.server.rounds == 1)
    (root / "run" / SECRET).unlink()
    with pytest.raises(UnsafeState, match="is gone"):
        Training.resume(root / "run", state_folder=root / "state")


@pytest.mark.parametrize("kind", ["gradients", "sentences"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"clip_norm": "adaptive"}, "adaptive clipping"), ({"hours": 24.0}, "timer_hours")],
)
def test_settings_whose_guarantee_canaries_cannot_be_compared_with(
    tmp_path, kind, changes, message
):
    import msgspec
    from sentence_runs import config

    settings = config(tmp_path, 8.0, 3)
    if "hours" in changes:
        simulation = msgspec.structs.replace(settings.simulation, timer_hours=changes["hours"])
        settings = msgspec.structs.replace(settings, simulation=simulation)
    else:
        settings = msgspec.structs.replace(settings, **changes)
    with pytest.raises(InvalidInput, match=message):
        Training.create(settings, tmp_path / "run", canaries=8, canary_kind=kind)
    assert not (tmp_path / "run").exists()
