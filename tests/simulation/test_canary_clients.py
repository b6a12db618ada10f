"""Canary clients: they train like clients, are clipped like clients, and replace nobody."""

import msgspec
import numpy as np
import pytest
from sentence_runs import config, create

from dpftrl import Grid, InvalidInput, verify_run
from dpftrl.auditing.canaries import SECRET, read_secrets
from dpftrl.auditing.sentences import read_sentence_file
from dpftrl.errors import UnsafeState
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
from dpftrl.simulation.training import Training, network

FEW = 40


GRID = Grid(step=2.0**-30, clip_norm=2.0)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A training before its first round."""
    root = tmp_path_factory.mktemp("opened")
    with create(root, rounds=3, canaries=FEW) as training:
        yield training


def test_the_sum_has_the_clipped_updates_of_those_whose_coin_says_yes(opened):
    server = opened.server
    model = network(opened.config.model, opened.task)
    file, secret = read_sentence_file(server.folder.root), read_secrets(server.folder.root)
    included = secret.included(FEW)
    clients = JaxClients(model, file.users(secret), LocalTraining(1.0, batch_size=4), seed=0)
    expected, norms = np.zeros(server.model.size), []
    for name, update in clients.updates(server.model, clients.names, 1):
        if included[int(name.removeprefix("canary-"))]:
            norms.append(float(np.linalg.norm(update.astype(float))))
            expected += update * min(1.0, 2.0 / norms[-1])
    canaries = opened._loop._canaries
    found = canaries.updates(1, GRID)
    assert found.updates == included.sum()  # min-sep is 1: all take part in every round
    assert np.allclose(GRID.values(found.steps), expected, atol=1e-5)
    assert min(norms) > 0
    assert canaries.updates(99, GRID) is None
    assert repr(canaries) == f"CanaryClients({FEW})"  # not how many were included


def test_a_canary_whose_update_is_not_finite_counts_as_zeros(opened, monkeypatch):
    def diverged(_, model, names, _number):
        return ((name, np.full(model.size, np.nan, np.float32)) for name in names)

    monkeypatch.setattr(JaxClients, "updates", diverged)
    found = opened._loop._canaries.updates(0, GRID)
    assert found.updates == 0
    assert not found.steps.any()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was stopped, that could not be resumed without its secrets, and was resumed."""
    root = tmp_path_factory.mktemp("finished")
    folder, state = root / "run", root / "state"
    with create(root, rounds=4, canaries=FEW) as training:
        training.run(should_stop=lambda: training.server.rounds == 2)
    content = (folder / SECRET).read_bytes()
    (folder / SECRET).unlink()
    with pytest.raises(UnsafeState, match="is gone"):
        Training.resume(folder, state_folder=state)
    (folder / SECRET).write_bytes(content)
    (folder / SECRET).chmod(0o600)
    with Training.resume(folder, state_folder=state) as training:
        assert training.run() is not None
    assert (folder / SECRET).read_bytes() == content
    return folder


def test_a_resumed_run_with_canary_sentences_verifies(finished):
    verdict = verify_run(finished, finished.parent / "state")
    assert verdict.passed
    assert verdict.rounds == 4
    assert verdict.epsilon == pytest.approx(8.0, rel=1e-3)


def test_canaries_take_nobodys_place(finished):
    with ledger_file(finished) as ledger:
        lines = ledger.read_text().splitlines()
    assert sum(line.endswith("counted") for line in lines) == 4 * 4
    assert not any("canary" in line for line in lines)


@pytest.mark.parametrize("kind", ["gradients", "sentences"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"clip_norm": "adaptive"}, "adaptive clipping"), ({"hours": 24.0}, "timer_hours")],
)
def test_settings_whose_guarantee_canaries_cannot_be_compared_with(
    tmp_path, kind, changes, message
):
    settings = config(tmp_path, 8.0, 3)
    if "hours" in changes:
        simulation = msgspec.structs.replace(settings.simulation, timer_hours=changes["hours"])
        settings = msgspec.structs.replace(settings, simulation=simulation)
    else:
        settings = msgspec.structs.replace(settings, **changes)
    with pytest.raises(InvalidInput, match=message):
        Training.create(settings, tmp_path / "run", canaries=8, canary_kind=kind)
    assert not (tmp_path / "run").exists()
