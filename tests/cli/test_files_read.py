"""Commands take a plan, a guarantee or the folder of a run in place of a mechanism."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import run

from dpftrl import Server, Settings, StartModel, load_guarantee, load_plan, make_plan, save_plan

PLAN = make_plan(
    population=200, report_goal=4, rounds=10, epsilon=6.0, delta=1e-5, mechanism="blt-b100"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chaining")
    save_plan(PLAN, folder / "plan.json")
    people = [f"c{i}" for i in range(200)]
    model = {"w": np.zeros(3)}
    with Server.create(
        folder / "run", PLAN, Settings(clip_norm=1.0), model, state_folder=folder / "state"
    ) as server:
        for _ in range(3):
            current = server.begin(people)
            for client in current.clients:
                if current.report(client, np.ones(3), current.attempt):
                    break
            server.commit(current)
    Server.create(
        folder / "new run", PLAN, Settings(clip_norm=1.0), model, state_folder=folder / "state"
    ).close()
    return {
        "plan": folder / "plan.json",
        "run": folder / "run",
        "new run": folder / "new run",
        "guarantee": folder / "run" / "guarantee.json",
    }


def as_json(*arguments: object) -> tuple[dict, str]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out), err


ROUNDS = {"plan": 10, "new run": 10, "run": 3, "guarantee": 3}


@pytest.mark.parametrize("kind", ROUNDS)
def test_account_states_what_the_file_states(files, kind):
    out, err = as_json("account", files[kind])
    promised = load_plan(files["plan"]).guarantee
    released = load_guarantee(files["guarantee"])
    expected = promised if ROUNDS[kind] == 10 else released
    assert out["epsilon"] == pytest.approx(expected.epsilon, rel=1e-12)
    assert out["rounds"] == ROUNDS[kind]
    said = {"plan": "the plan", "guarantee": "the guarantee"}.get(kind, "the run")
    assert err.startswith(f"from {said} {files[kind]}: blt-b100, {ROUNDS[kind]} rounds")
    assert "noise multiplier" in err
    assert "delta 1e-5" in err


@pytest.mark.parametrize("kind", ROUNDS)
@pytest.mark.parametrize("command", ["loss", "compare", "show", "calibrate"])
def test_other_commands_take_the_mechanism_and_the_participation(files, kind, command):
    more = {"calibrate": ["--epsilon", "6"], "compare": ["tree"]}.get(command, [])
    out, err = as_json(command, files[kind], *more)
    assert "from the" in err
    rows = out["mechanisms"] if command == "compare" else [out]
    (row,) = (row for row in rows if row["mechanism"] == PLAN.mechanism.name)
    if command != "show":
        assert row["rounds"] == (3 if kind == "guarantee" else 10)  # a run stands for its plan
        assert row["min_sep"] == PLAN.participation.min_sep
    if command == "calibrate" and kind != "guarantee":
        assert row["noise_multiplier"] == pytest.approx(PLAN.noise_multiplier, rel=1e-9)
        assert row["delta"] == 1e-5


def test_options_come_before_what_a_file_states(files):
    out, err = as_json("loss", files["plan"], "--rounds", "7", "--min-sep", "2")
    assert (out["rounds"], out["min_sep"]) == (7, 2)
    assert "10 rounds" not in err
    out, _ = as_json("calibrate", files["plan"], "--epsilon", "1", "--delta", "1e-3")
    assert out["delta"] == 1e-3


def test_compose_takes_plans_and_runs(files):
    out, err = as_json(
        "compose", files["run"], files["plan"], files["guarantee"], "--delta", "1e-5"
    )
    released, promised = load_guarantee(files["guarantee"]), PLAN.guarantee
    mu = np.sqrt(2 * released.mu**2 + promised.mu**2)
    assert out["mu"] == pytest.approx(mu)
    assert f"from the run {files['run']}: the rounds that it has released" in err
    assert f"from the plan {files['plan']}: all planned rounds" in err


def test_a_statement_of_a_run_needs_its_folder_only(files, tmp_path):
    state = ["--state-folder", files["run"].parent / "state"]
    code, out, err = run("statement", files["run"], "--out", tmp_path / "a", *state)
    assert code == 0, err
    code, _, _ = run(
        "statement",
        files["run"] / "plan.json",
        "--run",
        files["run"],
        "--out",
        tmp_path / "b",
        *state,
    )
    assert code == 0
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert first["summary"] == second["summary"]
    assert "verified" in out or "differentially private" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["account", "run", "--rounds", "3"], "already states"),
        (["account", "empty"], "folder without a run"),
        (["loss", "blt"], "give --rounds and --min-sep"),
        (["compare", "tree", "sqrt"], "give --rounds and --min-sep"),
        (["statement", "run", "--run", "run"], "leave out --run"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_line(files, tmp_path, arguments, reason):
    (tmp_path / "empty").mkdir()
    places = {"run": files["run"], "empty": tmp_path / "empty"}
    code, out, err = run(*(places.get(one, one) for one in arguments))
    assert (code, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2052", 2052),
        ("2_052", 2052),
        ("2,052", 2052),
        ("6.5K", 6500),
        ("6.5k", 6500),
        ("1e3", 1000),
    ],
)
def test_numbers_as_people_write_them(text, number):
    out, _ = as_json("loss", "sqrt", "--rounds", text, "--min-sep", text)
    assert out["rounds"] == number


@pytest.mark.parametrize(
    ("population", "availability"),
    [("4.21M", "60%"), ("4,210,000", "0.6"), ("4_210_000", "60.0 %")],
)
def test_populations_and_shares_as_people_write_them(population, availability):
    fleet = ["--population", population, "--availability", availability, "--report-goal", "6.5K"]
    out, _ = as_json("plan", *fleet, "--rounds", "100", "--epsilon", "4", "--delta", "1e-10")
    assert (out["population"], out["availability"], out["min_sep"]) == (4_210_000, 0.6, 388)


@pytest.mark.parametrize("wrong", ["60%%", "6O%", "1,00", "1.5", "", "K", "1,2345"])
def test_numbers_that_are_none_are_refused(wrong):
    code, out, err = run("loss", "sqrt", "--rounds", wrong, "--min-sep", "1")
    assert (code, out) == (2, "")
    assert "is not a" in err


def test_a_guarantee_for_several_devices_stays_one(tmp_path):
    limits = ["--rounds", "9", "--min-sep", "3", "--noise-multiplier", "5", "--delta", "1e-6"]
    first, _ = as_json("account", "tree", *limits, "--devices", "3", "--out", tmp_path / "g.json")
    again, err = as_json("account", tmp_path / "g.json")
    assert again["epsilon"] == pytest.approx(first["epsilon"], rel=1e-12)
    assert "3 clients (devices) of one person" in err
    more, _ = as_json("account", tmp_path / "g.json", "--devices", "4")
    assert more["epsilon"] > first["epsilon"]
    code, _, err = run("account", tmp_path / "g.json", "--devices", "1")
    assert code == 2
    assert "leave the option out" in err
    noise, _ = as_json("calibrate", tmp_path / "g.json", "--epsilon", "4")
    assert noise["devices"] == 3
    assert run("calibrate", tmp_path / "g.json", "--epsilon", "4", "--devices", "2")[0] == 2


@pytest.fixture
def chain(tmp_path) -> Path:
    """A run that starts from the export of a private run, and has released nothing."""
    people, state = [f"c{i}" for i in range(200)], tmp_path / "state"
    settings, model = Settings(clip_norm=1.0), {"w": np.zeros(3)}
    with Server.create(
        tmp_path / "first", PLAN, settings, model, state_folder=state, insecure_test_key=1
    ) as server:
        current = server.begin(people)
        for client in current.clients:
            current.report(client, np.ones(3), current.attempt)
        server.commit(current)
        server.export(tmp_path / "m.safetensors")
    start = StartModel.load(tmp_path / "m.safetensors")
    Server.create(tmp_path / "second", PLAN, settings, start, state_folder=state).close()
    return tmp_path


def test_a_run_that_has_released_nothing_counts_the_runs_behind_its_start(chain):
    with Server.resume(chain / "second", state_folder=chain / "state") as server:
        planned = server.planned
    out, _ = as_json("compose", chain / "second", "--delta", "1e-5")
    assert out["epsilon"] == pytest.approx(planned.at(1e-5).epsilon)
    assert out["epsilon"] > PLAN.guarantee.epsilon
    code, _, err = run("account", chain / "second")
    assert code == 2
    assert "covers 2 runs" in err


def test_a_run_whose_guarantee_is_missing_is_refused(files, tmp_path):
    shutil.copytree(files["run"], tmp_path / "run")
    (tmp_path / "run" / "guarantee.json").unlink()
    code, _, err = run("account", tmp_path / "run")
    assert code == 2
    assert "guarantee.json is missing" in err


def test_a_run_with_timers_by_time_states_nothing_before_its_first_round(tmp_path):
    settings = Settings(clip_norm=1.0, timer_hours=2.0)
    Server.create(
        tmp_path / "run", PLAN, settings, {"w": np.zeros(3)}, state_folder=tmp_path / "state"
    ).close()
    code, _, err = run("account", tmp_path / "run")
    assert code == 2
    assert "timers go by time" in err


def test_a_test_key_is_not_forgotten_on_the_way(chain):
    code, _, err = run("account", chain / "first", "--out", chain / "g.json")
    assert code == 0, err
    assert "NOTHING IS PRIVATE" in (chain / "g.json").read_text()
    code, out, _ = run("statement", chain / "g.json", "--out", chain / "s")
    assert "NOTHING IS PRIVATE" in (chain / "s.md").read_text()[:1500]
    code, out, _ = run("verify", chain / "first", "--state-folder", chain / "state")
    assert "NOT PRIVATE" in out.splitlines()[-1]


def test_calibration_for_a_run_is_for_all_planned_rounds(files):
    out, _ = as_json("calibrate", files["run"], "--epsilon", "6")
    planned, _ = as_json("calibrate", files["plan"], "--epsilon", "6")
    assert out["noise_multiplier"] == planned["noise_multiplier"]


@pytest.mark.parametrize("name", ["missing.json", "run.json"])
def test_a_file_that_is_none_of_these_is_named(files, name):
    path = files["run"] / name
    code, _, err = run("account", path)
    assert code == 2
    assert str(path) in err
