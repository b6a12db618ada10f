"""Names of version 0.1 still work, with a warning that says the new name."""

import sys

import numpy as np
import pytest

import dpftrl
from dpftrl._internal.deprecation import MODULES
from dpftrl.accounting import Run, delta_for, spending
from dpftrl.verify import Verdict

CLIENTS = dpftrl.MinSep(20, 5)
BLT = dpftrl.mechanism("blt-b400")


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_an_old_module_name_gives_the_new_module(old, new):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        __import__(old)
    assert sys.modules[old] is sys.modules[new]
    assert sys.modules[new].__spec__.name == new


def test_old_names_in_dpftrl():
    with pytest.warns(DeprecationWarning, match="ErrorReport"):
        assert dpftrl.Loss is dpftrl.ErrorReport


def test_sigma_is_still_taken_as_an_argument():
    with pytest.warns(DeprecationWarning, match="noise_multiplier"):
        old = dpftrl.account(BLT, CLIENTS, sigma=2.0, delta=1e-6)
    assert old == dpftrl.account(BLT, CLIENTS, 2.0, 1e-6)
    with pytest.warns(DeprecationWarning, match="noise_multiplier"):
        assert delta_for(BLT, CLIENTS, sigma=2.0, epsilon=1.0) == delta_for(BLT, CLIENTS, 2.0, 1.0)
    with pytest.warns(DeprecationWarning, match="noise_multiplier"):
        assert next(spending(BLT, 5, sigma=2.0)) == next(spending(BLT, 5, 2.0))
    key = dpftrl.NoiseKey.insecure_for_tests(1)
    with pytest.warns(DeprecationWarning, match="noise_multiplier"):
        stream = dpftrl.NoiseStream.unchecked(BLT, 3, sigma=2.0, clip_norm=1.0, key=key)
    stream.add_to(np.zeros(3))


def test_old_attributes():
    plan = dpftrl.make_plan(population=20, report_goal=4, rounds=9, epsilon=8, delta=1e-5)
    with pytest.warns(DeprecationWarning, match=r"Plan\.noise_multiplier"):
        assert plan.sigma == plan.noise_multiplier
    with pytest.warns(DeprecationWarning, match=r"Run\.noise_multiplier"):
        assert Run.of(BLT, CLIENTS, 2.0).sigma == 2.0
    with pytest.warns(DeprecationWarning, match=r"Verdict\.run_id"):
        assert Verdict("an id", (), 0, None, None).run == "an id"
    with pytest.warns(DeprecationWarning, match="error_report"):
        assert BLT.loss(CLIENTS) == BLT.error_report(CLIENTS)


def test_server_open_resumes(tmp_path):
    plan = dpftrl.make_plan(population=20, report_goal=4, rounds=9, epsilon=8, delta=1e-5)
    settings, state = dpftrl.Settings(clip_norm=1.0), tmp_path / "state"
    model = {"w": np.zeros(2)}
    dpftrl.Server.create(tmp_path / "run", plan, settings, model, state_folder=state).close()
    with (
        pytest.warns(DeprecationWarning, match=r"Server\.resume"),
        dpftrl.Server.open(tmp_path / "run", state_folder=state) as server,
    ):
        assert server.rounds == 0


def test_progress_is_still_taken_as_an_argument():
    calls = []
    with pytest.warns(DeprecationWarning, match="on_progress"):
        old = dpftrl.optimize_band_toeplitz(CLIENTS, 5, progress=lambda *call: calls.append(call))
    assert calls
    assert old.mechanism == dpftrl.optimize_band_toeplitz(CLIENTS, 5).mechanism


def test_old_names_in_simulation(tmp_path):
    from dpftrl import simulation

    with pytest.warns(DeprecationWarning, match="TrainingProgress"):
        assert simulation.Progress is simulation.TrainingProgress
    without_a_file = simulation.read_config(None, ['task="jsonl"'])
    with (
        pytest.warns(DeprecationWarning, match=r"Training\.create"),
        pytest.raises(dpftrl.InvalidInput, match="path"),
    ):
        simulation.Training.begin(without_a_file, tmp_path / "run")
