"""Runs that start from a private model: the audit composes too, and nothing can be edited away."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audited_runs import PEOPLE, PLAN, Place, failed, play, records, rewrite, warned
from safetensors.numpy import save_file

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Server, Settings, StartModel
from dpftrl.plan import Fleet, Plan

OTHER_PLAN = Plan(
    Fleet(population=24, report_goal=3),
    account(mechanism("banded:3", MinSep(8, 4)), MinSep(8, 4), noise_multiplier=2.0, delta=1e-5),
)


def started(
    root: Path, start: StartModel | None, rounds: int = 3, plan: Plan = PLAN, **settings: Any
) -> Place:
    """A run from a start model, and its export beside it."""
    place = Place(root / "run", root / "state")
    model = {"w": np.zeros(5)} if start is None else start
    told = Settings(clip_norm=1.0, **settings)
    with Server.create(place.folder, plan, told, model, state_folder=place.state) as server:
        for _ in range(rounds):
            play(server)
        if rounds:
            server.export(root / "model.safetensors")
    return place


def model_of(place: Place) -> Path:
    return place.folder.parent / "model.safetensors"


def check(place: Place, name: str) -> str:
    return next(one.text for one in place.audit().checks if one.name == name)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Place:
    """A run with another mechanism, whose matrix is in a file, and at another delta."""
    return started(tmp_path_factory.mktemp("first"), None, 4, OTHER_PLAN, population="a")


@pytest.fixture(scope="module")
def original(first, tmp_path_factory) -> Place:
    return started(tmp_path_factory.mktemp("second"), StartModel.load(model_of(first)))


@pytest.fixture
def place(original, tmp_path) -> Place:
    return original.copy_to(tmp_path)


def test_every_round_of_a_chain_passes_and_states_the_composition(first, tmp_path):
    place = started(tmp_path, StartModel.load(model_of(first)), rounds=0)
    found = place.audit()
    assert (failed(found), warned(found)) == ({}, {})
    spent = [found.epsilon]
    with place.open() as server:
        assert found.epsilon == pytest.approx(server.epsilon, rel=1e-7)
        for _ in range(8):
            play(server)
            found = place.audit()
            assert (failed(found), warned(found)) == ({}, {})
            assert found.epsilon == pytest.approx(server.epsilon, rel=1e-6)
            spent.append(found.epsilon)
    assert spent == sorted(spent)
    assert spent[-1] > PLAN.guarantee.epsilon
    assert "1 earlier run(s) on the same people are composed" in check(place, "start model")


def test_a_chain_of_three_passes(original, tmp_path):
    third = started(tmp_path, StartModel.load(model_of(original)))
    found = third.audit()
    assert (failed(found), warned(found)) == ({}, {})
    assert found.epsilon > original.audit().epsilon
    assert "2 earlier run(s)" in check(third, "start model")


def test_other_people_are_the_operators_claim(first, tmp_path):
    start = StartModel.load(model_of(first), other_people=["a"])
    place = started(tmp_path, start, population="b")
    found = place.audit()
    assert failed(found) == {}
    assert "stated by the operator to be on other people" in warned(found)["start model"]
    assert found.epsilon < PLAN.guarantee.epsilon


def test_a_start_model_of_unknown_origin_is_a_warning(tmp_path):
    public = tmp_path / "public.safetensors"
    save_file({"w": np.zeros(5, np.float32)}, public)
    found = started(tmp_path, StartModel.load(public)).audit()
    assert failed(found) == {}
    assert "claimed public" in warned(found)["start model"]


def test_an_export_of_version_0_1_is_composed(tmp_path):
    old = tmp_path / "old.safetensors"
    told = {"rounds": "3", "epsilon": "8.0", "delta": "1e-05"}
    save_file({"w": np.zeros(5, np.float32)}, old, told)
    place = started(tmp_path, StartModel.load(old))
    found = place.audit()
    assert failed(found) == {}
    assert found.epsilon > 8.0


@pytest.mark.parametrize("kind", ["banded-hours", "blt-sgd", "tree-adam-names"])
def test_a_run_of_version_1_can_be_exported_and_composed(kind, tmp_path):
    """Its rounding is not covered, and a chain that it is in says so."""
    golden = Path(__file__).parent.parent / "golden" / "v1" / "runs" / kind
    shutil.copytree(golden / "finished", tmp_path / "old")
    shutil.copytree(golden / "finished-witness", tmp_path / "old-state")
    for path in (tmp_path / "old" / "private").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    with Server.resume(tmp_path / "old", state_folder=tmp_path / "old-state") as server:
        spent = server.epsilon
        server.export(tmp_path / "old.safetensors")
    start = StartModel.load(tmp_path / "old.safetensors")
    place = Place(tmp_path / "run", tmp_path / "state")
    told = Settings(clip_norm=1.0)
    with Server.create(place.folder, PLAN, told, start, state_folder=place.state) as server:
        attempt = server.begin(PEOPLE)
        for client in attempt.clients[:3]:
            attempt.report(client, np.ones(server.layout.size), attempt.attempt)
        server.commit(attempt)
        names = {one.name for one in server.guarantee().hypotheses}
    found = place.audit()
    assert failed(found) == {}
    assert found.epsilon > spent
    assert {"rounding", "earlier runs"} <= names


def test_a_test_key_of_an_earlier_run_is_called_out(tmp_path):
    place = Place(tmp_path / "run", tmp_path / "state")
    model = {"w": np.zeros(5)}
    with Server.create(
        place.folder,
        PLAN,
        Settings(clip_norm=1.0),
        model,
        state_folder=place.state,
        insecure_test_key=1,
    ) as server:
        play(server)
        server.export(tmp_path / "model.safetensors")
    (tmp_path / "next").mkdir()
    later = started(tmp_path / "next", StartModel.load(tmp_path / "model.safetensors"))
    found = later.audit()
    assert failed(found) == {}
    assert "NOT PRIVATE" in warned(found)["start model"]


def test_runs_of_version_1_do_not_record_it(place):
    path = place.folder / "run.json"
    content = json.loads(path.read_text())
    assert content["version"] == 2
    plain = {name: value for name, value in content.items() if name not in {"start", "buffers"}}
    path.write_text(json.dumps(plain | {"version": 1}))
    said = records(place)
    said[0]["settings_sha256"] = digest(path)
    rewrite(place, said)
    assert "not recorded" in check(place, "start model")
    # Whoever has the key can make the digests fit; what guarantee.json says no longer follows.
    assert "guarantee.json" in failed(place.audit())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def dropped(start: dict) -> None:
    start["earlier"] = []


def marked(start: dict) -> None:
    start["earlier"][0]["people"] = "others"


def quieter(start: dict) -> None:
    start["earlier"][0]["guarantee"]["runs"][0]["noise_multiplier"] *= 10


@pytest.mark.parametrize("edit", [dropped, marked, quieter])
def test_the_start_model_is_sealed(place, edit):
    path = place.folder / "run.json"
    content = json.loads(path.read_text())
    edit(content["start"])
    path.write_text(json.dumps(content))
    assert "run.json" in failed(place.audit())["settings and plan"]


@pytest.mark.parametrize("edit", [dropped, marked, quieter])
def test_with_the_key_at_hand_the_rest_does_not_follow(place, edit):
    path = place.folder / "run.json"
    content = json.loads(path.read_text())
    edit(content["start"])
    path.write_text(json.dumps(content))
    said = records(place)
    said[0]["settings_sha256"] = digest(path)
    rewrite(place, said)
    assert {"journalled epsilon", "guarantee.json"} <= set(failed(place.audit()))


def test_an_earlier_run_that_states_too_little(place):
    path = place.folder / "run.json"
    content = json.loads(path.read_text())
    content["start"]["earlier"][0]["guarantee"]["mu"] /= 2
    path.write_text(json.dumps(content))
    said = records(place)
    said[0]["settings_sha256"] = digest(path)
    rewrite(place, said)
    assert "follows from its mechanism" in failed(place.audit())["start model"]


def test_a_matrix_of_an_earlier_run_cannot_change(place):
    (matrix,) = place.folder.glob("run-*.safetensors")
    content = matrix.read_bytes()
    matrix.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "settings and plan" in failed(place.audit())


def alone(content: dict) -> None:
    """The guarantee of the last run by itself, as if it had started from nothing."""
    limits = MinSep(3, 4)
    found = account(mechanism("blt-b400"), limits, 3.0, 1e-6)
    content["runs"] = content["runs"][-1:]
    for name in ("mu", "rho", "epsilon", "sampler_delta", "kind"):
        content[name] = getattr(found, name)


def without_earlier(content: dict) -> None:
    content["hypotheses"] = [one for one in content["hypotheses"] if one["name"] != "earlier runs"]


def other_noise(content: dict) -> None:
    content["runs"][0]["noise_multiplier"] *= 2


def swapped(content: dict) -> None:
    content["runs"].reverse()


def earlier_enforced(content: dict) -> None:
    for one in content["hypotheses"]:
        if one["name"] == "participation":
            one["basis"] = "enforced"


@pytest.mark.parametrize("edit", [alone, without_earlier, other_noise, swapped, earlier_enforced])
def test_the_guarantee_cannot_leave_the_earlier_runs_out(place, edit):
    path = place.folder / "guarantee.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    assert "guarantee.json" in failed(place.audit())


@pytest.mark.parametrize("name", ["zero-out", "keystream", "secrecy", "identity", "earlier runs"])
@pytest.mark.parametrize("basis", ["enforced", "observed"])
def test_nothing_else_is_enforced(place, name, basis):
    path = place.folder / "guarantee.json"
    content = json.loads(path.read_text())
    for one in content["hypotheses"]:
        if one["name"] == name:
            one["basis"] = basis
    path.write_text(json.dumps(content))
    assert "the basis" in failed(place.audit())["guarantee.json"]


def test_a_hypothesis_of_somebody_else_is_refused(place):
    path = place.folder / "guarantee.json"
    content = json.loads(path.read_text())
    content["hypotheses"].append({"name": "trust", "text": "Trust us.", "basis": "assumed"})
    path.write_text(json.dumps(content))
    assert "what it rests on" in failed(place.audit())["guarantee.json"]


def test_the_budget_is_for_the_total_and_the_plan_for_the_run(first, tmp_path):
    start = StartModel.load(model_of(first))
    place = started(tmp_path, start, rounds=8, budget=1000.0)
    found = place.audit()
    assert failed(found) == {}
    assert found.epsilon > PLAN.guarantee.epsilon
    assert "for this run by itself" in check(place, "budget")
