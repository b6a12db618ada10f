"""A statement says "enforced" and "observed" where there is evidence, and "claimed" elsewhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from command_line import refused_in_one_line, run
from safetensors.numpy import save_file

from dpftrl import MinSep, account, mechanism
from dpftrl.accounting import compose, load_guarantee, save_guarantee
from dpftrl.federated import Server, Settings, StartModel, write_ledger
from dpftrl.plan import Fleet, Plan, save_plan

PEOPLE = [f"client {i}" for i in range(24)]
PROMISE = account(mechanism("blt-b400"), MinSep(8, 4), noise_multiplier=3.0, delta=1e-6)
PLAN = Plan(Fleet(population=24, report_goal=3), PROMISE)
GOLDEN = Path(__file__).parent.parent / "golden" / "v1"


class Place(NamedTuple):
    """A run and the folder of its witness."""

    folder: Path
    state: Path

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def guarantee(self) -> Path:
        return self.folder / "guarantee.json"

    @property
    def model(self) -> Path:
        return self.folder.parent / "model.safetensors"

    def copy_to(self, root: Path) -> "Place":
        shutil.copytree(self.folder, root / "run")
        shutil.copytree(self.state, root / "state")
        return Place(root / "run", root / "state")

    def state_it(self, *options: object, promised: Path | None = None) -> tuple[int, dict]:
        """Exit code and JSON of the statement."""
        arguments = ("statement", promised or self.plan, "--run", self.folder, *options)
        code, _, _ = run(*arguments, "--state-folder", self.state)
        return code, json.loads((self.folder / "statement.json").read_bytes())


def trained(root: Path, start: StartModel | None = None, rounds: int = 5, **settings: Any) -> Place:
    place = Place(root / "run", root / "state")
    model = {"w": np.zeros(5)} if start is None else start
    chosen = Settings(clip_norm=1.0, **settings)
    with Server.create(place.folder, PLAN, chosen, model, state_folder=place.state) as server:
        for number in range(rounds):
            attempt = server.begin(PEOPLE, None if chosen.timer_hours is None else 0.7 * number)
            for client in list(attempt.clients):
                attempt.report(client, np.ones(5), attempt.attempt)
            server.commit(attempt)
        server.export(place.model)
    return place


def stated(path: Path, *options: object) -> dict:
    """The JSON of the statement of a file."""
    stem = path.with_name("made")
    code, _, err = run("statement", path, *options, "--out", stem)
    assert (code, err) == (0, "")
    return json.loads(stem.with_suffix(".json").read_bytes())


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Place:
    return trained(tmp_path_factory.mktemp("original"), population="a")


@pytest.fixture
def place(original, tmp_path) -> Place:
    return original.copy_to(tmp_path)


@pytest.fixture(scope="module")
def chained(original, tmp_path_factory) -> Place:
    return trained(tmp_path_factory.mktemp("chained"), StartModel.load(original.model))


def bases(statement_json: dict) -> dict[str, str]:
    return {one["name"]: one["basis"] for one in statement_json["hypotheses"]}


def edit(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def all_enforced(content: dict) -> None:
    """The edit that used to give five check marks."""
    for one in content.get("guarantee", content)["hypotheses"]:
        one["basis"] = "enforced"


# --- A file alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["enforced", "observed"])
def test_what_a_guarantee_file_calls_enforced_is_claimed(tmp_path, basis):
    path = tmp_path / "guarantee.json"
    save_guarantee(PROMISE, path)
    edit(path, all_enforced)
    path.write_text(path.read_text().replace("enforced", basis))
    statement_json = stated(path)
    assert set(bases(statement_json).values()) == {"claimed"}
    page = (tmp_path / "made.md").read_text(encoding="utf-8")
    assert (
        page.count("✔ enforced") == page.count("◉ observed") == 1
    )  # where the signs are explained
    assert "0 enforced, 0 observed, 5 claimed, 0 assumed" in page


def test_a_plan_enforces_nothing(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    edit(path, all_enforced)
    assert set(bases(stated(path)).values()) == {"claimed"}


def test_texts_of_hypotheses_come_from_the_program(tmp_path):
    path = tmp_path / "guarantee.json"
    save_guarantee(PROMISE, path)
    before = stated(path)["hypotheses"]

    def reworded(content: dict) -> None:
        for one in content["hypotheses"]:
            one["text"] = "Nothing to see here: this was proven by an auditor."

    edit(path, reworded)
    assert stated(path)["hypotheses"] == before


def test_an_unknown_hypothesis_is_refused(tmp_path):
    path = tmp_path / "guarantee.json"
    save_guarantee(PROMISE, path)
    more = {"name": "certified", "text": "By an auditor.", "basis": "enforced"}
    edit(path, lambda content: content["hypotheses"].append(more))
    assert "'certified', which is no hypothesis of dpftrl" in refused_in_one_line("statement", path)


def test_a_guarantee_of_a_log_is_a_claim_when_it_is_read_back(tmp_path):
    log = tmp_path / "ledger.csv"
    log.write_text("round,client,status\n0,ann,counted\n6,ann,counted\n7,bo,counted\n")
    path, plan = tmp_path / "g.json", tmp_path / "plan.json"
    save_plan(PLAN, plan)
    code, _, err = run("account", plan, "--log", log, "--out", path)
    assert code == 0, err
    assert load_guarantee(path).hypotheses[0].basis == "observed"
    assert bases(stated(path))["participation"] == "claimed"


# --- A run's folder ------------------------------------------------------------------------------


def test_a_run_that_verifies_is_the_evidence(place):
    code, statement_json = place.state_it()
    assert code == 0
    assert bases(statement_json) == {
        "participation": "enforced",
        "clipping": "enforced",
        "identity": "assumed",
        "zero-out": "assumed",
        "keystream": "assumed",
        "secrecy": "assumed",
    }
    assert statement_json["verification"]["verified"] is True
    assert [one["name"] for one in statement_json["inputs"]] == [
        "run/plan.json",
        "run/guarantee.json",
        "run/ledger.csv",
        "run/run.json",
    ]
    assert (statement_json["population"], statement_json["start"], statement_json["warnings"]) == (
        "a",
        None,
        [],
    )
    assert "the run's files verify" in (place.folder / "statement.md").read_text(encoding="utf-8")


def test_published_files_alone_are_no_evidence(place):
    write_ledger(place.folder, place.folder / "ledger.csv")
    shutil.rmtree(place.folder / "private")
    code, statement_json = place.state_it()
    assert code == 0
    assert (bases(statement_json)["participation"], bases(statement_json)["clipping"]) == (
        "observed",
        "claimed",
    )
    (place.folder / "ledger.csv").unlink()
    code, statement_json = place.state_it()
    assert (code, bases(statement_json)["participation"]) == (0, "claimed")
    page = (place.folder / "statement.md").read_text(encoding="utf-8")
    assert "nothing shows whether its server enforced it" in page


def test_an_edited_guarantee_in_a_folder_of_its_own(place, tmp_path):
    (tmp_path / "alone").mkdir()
    shutil.copy(place.guarantee, tmp_path / "alone")
    edit(tmp_path / "alone" / "guarantee.json", all_enforced)
    statement_json = stated(place.plan, "--run", tmp_path / "alone")
    assert set(bases(statement_json).values()) == {"claimed"}


def without_a_row(place: Place) -> None:
    path = place.folder / "ledger.csv"
    write_ledger(place.folder, path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")


def with_all_enforced(place: Place) -> None:
    edit(place.guarantee, all_enforced)


def without_journal(place: Place) -> None:
    (place.folder / "private" / "journal.jsonl").unlink()


def without_run_file(place: Place) -> None:
    (place.folder / "run.json").unlink()


@pytest.mark.parametrize(
    "change", [without_a_row, with_all_enforced, without_journal, without_run_file]
)
def test_a_run_that_does_not_verify_enforces_nothing(place, change):
    change(place)
    code, statement_json = place.state_it()
    assert code == 1
    assert not {"enforced", "observed"} & set(bases(statement_json).values())
    assert statement_json["warnings"][0].startswith("The run does not verify")
    assert statement_json["verification"]["verified"] is False
    code, out, _ = run(
        "statement", place.plan, "--run", place.folder, "--state-folder", place.state
    )
    assert code == 1
    assert out.startswith("The run does not verify")


def test_a_guarantee_of_fewer_rounds_is_called_out_with_the_true_epsilon(place):
    save_guarantee(account(mechanism("blt-b400"), MinSep(1, 4), 3.0, 1e-6), place.guarantee)
    code, statement_json = place.state_it()
    assert code == 1
    assert "By the run's journal and plan, epsilon is" in statement_json["warnings"][1]


def test_the_witness_can_be_left_out_knowingly(place, tmp_path):
    shutil.rmtree(place.state)
    code, statement_json = place.state_it()
    assert code == 1
    assert statement_json["verification"]["checks"]["failed"] == ["witness"]
    assert str(tmp_path) not in json.dumps(
        statement_json
    )  # no folder of whoever ran it is published
    code, statement_json = place.state_it("--no-witness")
    assert code == 0
    assert bases(statement_json)["participation"] == "enforced"
    assert "may be an older copy" in statement_json["warnings"][0]
    assert "--no-witness" in (place.folder / "statement.md").read_text(encoding="utf-8")


def test_the_witness_is_looked_for_where_the_server_puts_it(place, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(place.state))
    assert stated(place.plan, "--run", place.folder)["verification"]["verified"]


def test_timers_by_time_are_observed_by_a_server_that_verifies(tmp_path):
    place = trained(tmp_path, timer_hours=2.0)
    assert bases(place.state_it()[1])["participation"] == "observed"
    without_journal(place)
    code, statement_json = place.state_it()
    assert (code, bases(statement_json)["participation"]) == (1, "claimed")


@pytest.mark.parametrize("when", ["stopped", "finished"])
def test_runs_of_version_1_verify_and_say_what_they_do_not_record(when, tmp_path):
    folder = shutil.copytree(GOLDEN / "train" / when, tmp_path / "run")
    for path in (folder / "private", *(folder / "private").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    place = Place(folder, shutil.copytree(GOLDEN / "train" / f"{when}-witness", tmp_path / "state"))
    code, statement_json = place.state_it()
    assert code == 0
    assert (bases(statement_json)["participation"], bases(statement_json)["clipping"]) == (
        "enforced",
        "enforced",
    )
    assert (statement_json["start"], statement_json["population"]) == (None, None)
    page = (folder / "statement.md").read_text(encoding="utf-8")
    assert "What the run started from is not recorded" in page


# --- A run that starts from a private model ------------------------------------------------------


def test_a_chain_states_the_composition(original, chained):
    code, statement_json = chained.state_it()
    alone = load_guarantee(original.guarantee)
    together = compose([alone, alone], 1e-6)
    assert code == 0
    assert statement_json["epsilon"] == together.epsilon > alone.epsilon
    assert statement_json["accounted"]["epsilon"] == alone.epsilon  # this run by itself
    (earlier,) = statement_json["start"]["earlier_runs"]
    assert (earlier["population"], earlier["composed"]) == ("a", True)
    assert earlier["epsilon"] == alone.epsilon
    assert statement_json["observed"]["kept_to_limits"] is True
    page = (chained.folder / "statement.md").read_text(encoding="utf-8")
    assert f"Starts from a private model: run {earlier['run']} (epsilon " in page
    assert "on the same people; composed" in page
    assert "all 2 runs together" in page
    rows = [(one["name"], one["basis"]) for one in statement_json["hypotheses"]]
    assert rows[:2] == [("participation", "claimed"), ("participation", "enforced")]
    assert ("earlier runs", "claimed") in rows
    assert statement_json["warnings"] == []


def test_a_chain_whose_guarantee_was_cut_to_the_last_run(original, chained, tmp_path):
    """The start model is in run.json too: the statement composes all the same."""
    place = chained.copy_to(tmp_path)
    save_guarantee(load_guarantee(original.guarantee), place.guarantee)
    code, statement_json = place.state_it()
    assert code == 1
    assert statement_json["epsilon"] == chained.state_it()[1]["epsilon"]


def test_the_guarantee_of_a_chain_by_itself_and_as_the_promised_one(chained):
    statement_json = stated(chained.guarantee)
    assert (len(statement_json["runs"]), bases(statement_json)["earlier runs"]) == (2, "claimed")
    code, both = chained.state_it(promised=chained.guarantee)
    assert (code, both["warnings"]) == (0, [])
    assert both["epsilon"] == statement_json["epsilon"]


def test_other_people_are_stated_as_a_claim(original, tmp_path):
    start = StartModel.load(original.model, other_people=["a"])
    place = trained(tmp_path, start, population="b")
    code, statement_json = place.state_it()
    assert code == 0
    assert statement_json["epsilon"] == load_guarantee(original.guarantee).epsilon
    assert bases(statement_json)["other people"] == "claimed"
    page = (place.folder / "statement.md").read_text(encoding="utf-8")
    assert "stated by the operator: on other people (claimed); not composed" in page


def test_a_start_model_of_unknown_origin_is_claimed_public(tmp_path):
    public = tmp_path / "public.safetensors"
    save_file({"w": np.zeros(5, np.float32)}, public)
    place = trained(tmp_path, StartModel.load(public))
    code, statement_json = place.state_it()
    assert code == 0
    assert bases(statement_json)["start model"] == "claimed"
    page = (place.folder / "statement.md").read_text(encoding="utf-8")
    assert "origin is not known to dpftrl" in page
    assert "claimed public" in page
