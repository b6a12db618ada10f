"""Commands take a plan, a guarantee or the folder of a run in place of a mechanism."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run

from dpftrl import Server, Settings, load_guarantee, load_plan, make_plan, save_plan

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
        assert row["rounds"] == ROUNDS[kind]
        assert row["min_sep"] == PLAN.participation.min_sep
    if command == "calibrate" and ROUNDS[kind] == 10:
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
