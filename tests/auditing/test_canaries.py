"""Canaries: their directions and coins, how they enter a run, and that they change nothing else."""

import stat

import numpy as np
import pytest
from canary_runs import GOAL, PARTICIPATION, ROUNDS, SIZE, create, plan_for, train

from dpftrl import Grid, InvalidInput, Server, verify_run
from dpftrl.auditing.canaries import (
    PUBLIC,
    SECRET,
    SEEN,
    Canaries,
    Directions,
    canary_file,
    read_canary_file,
    read_seen,
)
from dpftrl.errors import UnsafeState
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.statement.from_files import statement_of_files

GRID = Grid(step=2.0**-30, clip_norm=0.5)


def test_directions_are_orthogonal_and_have_the_clip_norm():
    directions = Directions(30, 1000, np.random.default_rng(1))
    every = np.array(
        [GRID.values(directions.steps(np.arange(30) == one, GRID)) for one in range(30)]
    )
    gram = every @ every.T
    assert np.allclose(gram, 0.25 * np.eye(30), atol=1e-6)
    assert np.all(np.sqrt(np.diag(gram)) <= 0.5)
    products = np.array([directions.products(one) for one in every])
    assert np.allclose(products, 0.5 * np.eye(30), atol=1e-6)


def test_the_sum_is_that_of_the_included():
    directions = Directions(30, 1000, np.random.default_rng(1))
    included = np.arange(30) % 3 == 0
    one_by_one = sum(
        directions.steps(np.arange(30) == one, GRID) for one in np.flatnonzero(included)
    )
    assert np.array_equal(directions.steps(included, GRID), one_by_one)


def test_canaries_keep_to_the_participation():
    file = canary_file(10, plan_for(), PARTICIPATION, SIZE)
    assert tuple(file.updates) in set(PARTICIPATION.patterns())
    assert set(file.updates.values()) <= {1, -1}
    assert np.flatnonzero(file.updates_by_round).tolist() == list(file.updates)


def test_more_canaries_than_coordinates_are_refused():
    with pytest.raises(InvalidInput, match="coordinates of its own"):
        canary_file(SIZE + 1, plan_for(), PARTICIPATION, SIZE)


def test_a_run_with_canaries_verifies_and_says_so(tmp_path):
    with create(tmp_path / "run", 200) as server:
        train(server)
    verdict = verify_run(tmp_path / "run", tmp_path / "state")
    assert verdict.passed
    assert verdict.epsilon == pytest.approx(8.0, rel=1e-3)
    statement = statement_of_files(
        tmp_path / "run" / "plan.json", tmp_path / "run", state_folder=tmp_path / "state"
    )
    assert "200 artificial participants" in statement.markdown()
    with ledger_file(tmp_path / "run") as ledger:
        lines = ledger.read_text().splitlines()
    # They take nobody's place: as many clients are counted as in any run.
    assert sum(line.endswith("counted") for line in lines) == ROUNDS * GOAL
    mode = (tmp_path / "run" / SECRET).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_without_canaries_nothing_is_said(tmp_path):
    with create(tmp_path / "run", 0) as server:
        train(server, 1)
    assert read_canary_file(tmp_path / "run") is None
    statement = statement_of_files(
        tmp_path / "run" / "plan.json", tmp_path / "run", state_folder=tmp_path / "state"
    )
    assert "canar" not in statement.markdown()
    assert b"canar" not in statement.json_bytes()


def test_the_public_file_is_sealed(tmp_path):
    with create(tmp_path / "run", 200) as server:
        train(server, 1)
    path = tmp_path / "run" / PUBLIC
    path.write_bytes(path.read_bytes().replace(b"200", b"300"))
    assert not verify_run(tmp_path / "run", tmp_path / "state").passed
    with pytest.raises(UnsafeState):
        Server.resume(tmp_path / "run", state_folder=tmp_path / "state")


def test_a_resumed_run_goes_on_with_the_same_canaries(tmp_path):
    with create(tmp_path / "run", 200) as server:
        train(server, 3)
    secret = (tmp_path / "run" / SECRET).read_bytes()
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as server:
        train(server)
    assert (tmp_path / "run" / SECRET).read_bytes() == secret
    _, rounds = read_seen(tmp_path / "run" / SEEN)
    assert rounds == ROUNDS


def test_a_round_is_observed_once(tmp_path):
    with create(tmp_path / "run", 200) as server:
        canaries = Canaries.resume(tmp_path / "run", server.plan, 0)
        mean = np.ones(SIZE)
        canaries.observe(0, 0 * mean, mean)
        canaries.save()
        once, _ = read_seen(tmp_path / "run" / SEEN)
        again = Canaries.resume(tmp_path / "run", server.plan, 1)
        again.observe(0, 0 * mean, mean)
        again.save()
        twice, _ = read_seen(tmp_path / "run" / SEEN)
    assert np.array_equal(once, twice)


def test_lost_secrets_are_noticed(tmp_path):
    with create(tmp_path / "run", 200) as server:
        train(server, 1)
        (tmp_path / "run" / SECRET).unlink()
        with pytest.raises(UnsafeState, match="is gone"):
            Canaries.resume(tmp_path / "run", server.plan, 1)


def test_coins_differ_from_run_to_run(tmp_path):
    secrets = set()
    for name in ("one", "two"):
        with create(tmp_path / name, 200) as server:
            Canaries.resume(tmp_path / name, server.plan, 0)
        secrets.add((tmp_path / name / SECRET).read_bytes())
    assert len(secrets) == 2
