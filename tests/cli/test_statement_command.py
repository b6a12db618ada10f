"""`dpftrl statement`: from a file, and a run, to three files; and how mistakes are reported."""

import hashlib
import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import command_line
import pytest

import dpftrl
from dpftrl import MinSep
from dpftrl.accounting import account, compose, save_guarantee
from dpftrl.plan import Fleet, Plan, save_plan

CLIENTS = MinSep(rounds=200, min_sep=50)
PROMISED = account(dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), CLIENTS, 8.0, 1e-8)
LEDGER = "round,client,status\n0,ann,counted\n{},ann,counted\n7,bob,contacted\n"


@pytest.fixture
def run():
    """Run `dpftrl statement` in this process; return its exit code, output and error output."""
    return partial(command_line.run, "statement")


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(Plan(Fleet(50_000, 1000), PROMISED), path)
    return path


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that kept to the plan."""
    path = tmp_path / "run 1"
    path.mkdir()
    kept = (replace(old, basis="enforced") for old in PROMISED.hypotheses[:2])
    save_guarantee(PROMISED.resting_on(*kept), path / "guarantee.json")
    (path / "ledger.csv").write_text(LEDGER.format(60))
    return path


def test_a_plan_becomes_three_files(run, plan, tmp_path):
    code, out, err = run(plan)
    assert (code, err) == (0, "")
    assert "-differentially private" in out
    assert "This is a plan" in out
    for ending in ("md", "html", "json"):
        path = tmp_path / f"statement.{ending}"
        assert str(path) in out
        assert path.stat().st_size > 3000
    statement_json = json.loads((tmp_path / "statement.json").read_bytes())
    assert statement_json["input_sha256"] == hashlib.sha256(plan.read_bytes()).hexdigest()
    assert statement_json["fleet"]["population"] == 50_000


def test_json_output_equals_the_json_file(run, plan, tmp_path):
    code, out, _ = run(plan, "--json", "--devices", "4", "--out", tmp_path / "here")
    assert code == 0
    assert out.encode() == (tmp_path / "here.json").read_bytes()
    assert [row["devices"] for row in json.loads(out)["devices"]] == [1, 2, 3, 4]


def test_the_same_input_gives_the_same_bytes(run, plan, tmp_path):
    _, one, _ = run(plan, "--json")
    _, other, _ = run(plan, "--json", "--out", tmp_path / "other")
    assert one == other
    assert json.loads(one)["date"] is None
    _, dated, _ = run(plan, "--json", "--date", "2026-01-31")
    assert json.loads(dated)["date"] == "2026-01-31"


def test_a_guarantee_of_several_runs(run, tmp_path):
    path = tmp_path / "all.json"
    save_guarantee(compose([PROMISED, PROMISED], 1e-8, 6).for_devices(2), path)
    _, out, _ = run(path, "--json")
    statement_json = json.loads(out)
    assert (len(statement_json["runs"]), statement_json["kind"]) == (2, "upper bound")
    assert statement_json["unit"] == "2 clients (devices) of one person"


def test_the_files_of_a_run_that_kept_to_its_plan(run, plan, folder):
    """Without the private files of a server, what guarantee.json says is a claim."""
    code, out, _ = run(plan, "--run", folder)
    assert code == 0
    assert "what the run's guarantee file says" in out
    assert "keeps to the same limits" in out
    statement_json = json.loads((folder / "statement.json").read_bytes())
    assert statement_json["origin"] == "run"
    assert [one["name"] for one in statement_json["inputs"]] == [
        "plan.json",
        "run 1/guarantee.json",
        "run 1/ledger.csv",
    ]
    assert [one["basis"] for one in statement_json["hypotheses"]][:3] == [
        "observed",
        "claimed",
        "assumed",
    ]
    assert statement_json["verification"] is None


@pytest.mark.parametrize("accounted", [True, False])
def test_the_files_of_a_run_that_broke_its_plan(run, plan, folder, accounted):
    (folder / "ledger.csv").write_text(LEDGER.format(10))
    if not accounted:
        (folder / "guarantee.json").unlink()
    code, out, _ = run(plan, "--run", folder)
    assert code == 1
    assert out.startswith("The participation limits were not kept.")
    assert "1 of 1 clients" in out
    statement_json = json.loads((folder / "statement.json").read_bytes())
    assert statement_json["origin"] == "log"
    assert statement_json["epsilon"] > PROMISED.epsilon


OTHER_RUNS = {
    "less noise": account(dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), CLIENTS, 4.0, 1e-8),
    "other mechanism": account(dpftrl.mechanism("tree"), CLIENTS, 4.0, 1e-8),
    "shorter min-sep": account(
        dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), MinSep(rounds=200, min_sep=10), 8.0, 1e-8
    ),
}


@pytest.mark.parametrize("guarantee", OTHER_RUNS.values(), ids=OTHER_RUNS)
@pytest.mark.parametrize("with_log", [True, False])
def test_a_run_that_spent_more_than_the_plan_promises(run, plan, folder, guarantee, with_log):
    """The run keeps to its own limits, but they are those of another plan."""
    save_guarantee(guarantee, folder / "guarantee.json")
    if not with_log:
        (folder / "ledger.csv").unlink()
    code, out, _ = run(plan, "--run", folder)
    assert code == 1
    assert "The run spent more than was promised" in out
    statement_json = json.loads((folder / "statement.json").read_bytes())
    assert statement_json["epsilon"] == guarantee.epsilon > PROMISED.epsilon


def test_a_log_that_breaks_the_limits_of_the_plan_but_not_of_the_run(run, plan, folder):
    """So much noise that the run spent less than promised, with a shorter min-sep."""
    wider = account(dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), MinSep(rounds=200, min_sep=10), 80.0, 1e-8)
    save_guarantee(wider, folder / "guarantee.json")
    (folder / "ledger.csv").write_text(LEDGER.format(10))
    code, out, _ = run(plan, "--run", folder)
    assert code == 1
    assert "One client came back after 10 round(s), where at least 50 were planned." in out


def test_a_run_that_spent_less_than_the_plan_promises(run, plan, folder):
    more_noise = account(dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), CLIENTS, 9.0, 1e-8)
    save_guarantee(more_noise, folder / "guarantee.json")
    code, out, _ = run(plan, "--run", folder)
    assert code == 0
    assert "did not use the mechanism and the noise multiplier that were promised" in out


@pytest.mark.parametrize("inside", [False, True])  # of the run's folder, as our own runs have it
def test_the_commands_in_a_statement_recompute_its_epsilon(
    run, plan, folder, tmp_path, monkeypatch, inside
):
    if inside:
        plan = plan.rename(folder / "plan.json")
    _, out, _ = run(plan, "--run", folder, "--json")
    text = (folder / "statement.md").read_text(encoding="utf-8")
    console_block = re.search(r"```console\n(.*?)\n```", text, re.DOTALL)
    assert console_block is not None
    again, extract, accounting = map(shlex.split, console_block[1].splitlines())
    monkeypatch.chdir(tmp_path)
    assert again[:2] == ["dpftrl", "statement"]
    assert run(*again[2:]) == (0, out, "")
    assert extract[:2] == ["python", "-c"]
    exec(extract[2])
    _, recomputed, _ = command_line.run(*accounting[1:], "--json")
    assert json.loads(recomputed)["epsilon"] == json.loads(out)["epsilon"]


def test_a_mechanism_with_a_name_is_accounted_by_it(run, tmp_path):
    path = tmp_path / "tree.json"
    save_guarantee(account(dpftrl.mechanism("tree"), CLIENTS, 8.0, 1e-8), path)
    run(path)
    text = (tmp_path / "statement.md").read_text(encoding="utf-8")
    assert "dpftrl account tree --rounds 200 --min-sep 50" in text
    assert "python -c" not in text


# --- Mistakes ------------------------------------------------------------------------------------


def refused(run, *arguments: str | Path) -> str:
    """What the one line says."""
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dpftrl: ")
    return err


def test_a_file_of_another_kind_is_refused(run, tmp_path):
    path = tmp_path / "blt.json"
    dpftrl.save_mechanism(dpftrl.mechanism("blt-b400"), path)
    assert "has the format 'dpftrl mechanism'; a statement is made from" in refused(run, path)


def test_a_model_is_refused_with_what_a_statement_takes(run, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    message = refused(run, path)
    assert "model.safetensors is not a plan or guarantee file; a statement is made from" in message
    assert "JSON" not in message
    assert message.endswith("or the folder of a run\n")


def test_a_missing_folder_of_the_statement_is_named(run, plan, tmp_path):
    folder = tmp_path / "pub"
    assert f"there is no folder {folder}; create it" in refused(run, plan, "--out", folder / "s")
    assert not folder.exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 3}', '{"format": "dpftrl plan"}', "\xff"]
)
def test_a_corrupt_file_is_refused(run, tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("latin-1"))
    assert str(path) in refused(run, path)


def test_a_missing_file_or_a_folder_is_refused(run, tmp_path):
    assert "cannot be read" in refused(run, tmp_path / "nowhere.json")
    assert "is a folder without a run" in refused(run, tmp_path)


def test_an_edited_guarantee_is_refused(run, tmp_path):
    path = tmp_path / "guarantee.json"
    save_guarantee(PROMISED, path)
    content = json.loads(path.read_bytes())
    content["epsilon"] /= 2
    path.write_text(json.dumps(content))
    assert "it was edited" in refused(run, path)
    assert [one.name for one in tmp_path.iterdir()] == ["guarantee.json"]


def test_a_folder_that_is_not_a_run_is_refused(run, plan, folder, tmp_path):
    assert "is not a folder" in refused(run, plan, "--run", tmp_path / "nowhere")
    assert "is not a folder" in refused(run, plan, "--run", plan)
    for name in ("guarantee.json", "ledger.csv"):
        (folder / name).unlink()
    assert "neither guarantee.json nor ledger.csv" in refused(run, plan, "--run", folder)


def test_a_ledger_that_is_not_a_log_is_refused(run, plan, folder):
    (folder / "ledger.csv").write_text("when,who\n1,ann\n")
    assert "no column 'round'" in refused(run, plan, "--run", folder)


def test_overwriting_the_input_or_a_missing_folder_is_refused(run, plan, folder, tmp_path):
    before = plan.read_bytes()
    for arguments in (
        [plan, "--out", tmp_path / "plan"],
        [plan, "--out", tmp_path / "run 1" / ".." / "plan.json"],
        [plan, "--run", folder, "--out", folder / "guarantee"],
    ):
        assert "is an input of the statement" in refused(run, *arguments)
    assert plan.read_bytes() == before
    assert "cannot be written" in refused(run, plan, "--out", tmp_path / "nowhere" / "x")


def test_invalid_numbers_and_dates_are_refused(run, plan):
    assert "devices" in refused(run, plan, "--devices", "0")
    assert "2026-01-31" in refused(run, plan, "--date", "yesterday")
