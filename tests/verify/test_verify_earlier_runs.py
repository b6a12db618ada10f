"""Runs that start from a private model: verification composes the earlier runs too."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import (
    CLIENTS,
    PLAN,
    RunFolders,
    failed,
    read_records,
    rewrite,
    run_attempt,
    warned,
)
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
) -> RunFolders:
    """Record a run from a start model, and export its model to the same folder."""
    run = RunFolders(root / "run", root / "state")
    model = {"w": np.zeros(5)} if start is None else start
    run_settings = Settings(clip_norm=1.0, **settings)
    with Server.create(run.folder, plan, run_settings, model, state_folder=run.state) as server:
        for _ in range(rounds):
            run_attempt(server)
        if rounds:
            server.export(root / "model.safetensors")
    return run


def model_of(run: RunFolders) -> Path:
    return run.folder.parent / "model.safetensors"


def check(run: RunFolders, name: str) -> str:
    return next(result.text for result in run.verify().checks if result.name == name)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> RunFolders:
    """A run with another mechanism, whose matrix is in a file, and at another delta."""
    return started(tmp_path_factory.mktemp("first"), None, 4, OTHER_PLAN, population="a")


@pytest.fixture(scope="module")
def original(first, tmp_path_factory) -> RunFolders:
    return started(tmp_path_factory.mktemp("second"), StartModel.load(model_of(first)))


@pytest.fixture
def run(original, tmp_path) -> RunFolders:
    return original.copy_to(tmp_path)


def test_a_run_from_a_private_model_passes_after_every_round_with_composed_epsilon(first, tmp_path):
    run = started(tmp_path, StartModel.load(model_of(first)), rounds=0)
    verdict = run.verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})
    spent = [verdict.epsilon]
    with run.open() as server:
        assert verdict.epsilon == pytest.approx(server.epsilon, rel=1e-7)
        for _ in range(8):
            run_attempt(server)
            verdict = run.verify()
            assert (failed(verdict), warned(verdict)) == ({}, {})
            assert verdict.epsilon == pytest.approx(server.epsilon, rel=1e-6)
            spent.append(verdict.epsilon)
    assert spent == sorted(spent)
    assert spent[-1] > PLAN.guarantee.epsilon
    assert "1 earlier run(s) on the same people are composed" in check(run, "start model")


def test_a_run_after_two_earlier_runs_passes(original, tmp_path):
    third = started(tmp_path, StartModel.load(model_of(original)))
    verdict = third.verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})
    assert verdict.epsilon > original.verify().epsilon
    assert "2 earlier run(s)" in check(third, "start model")


def test_earlier_runs_on_other_people_are_a_warning_and_not_composed(first, tmp_path):
    start = StartModel.load(model_of(first), other_people=["a"])
    run = started(tmp_path, start, population="b")
    verdict = run.verify()
    assert failed(verdict) == {}
    assert "stated by the operator to be on other people" in warned(verdict)["start model"]
    assert verdict.epsilon < PLAN.guarantee.epsilon


def test_a_start_model_of_unknown_origin_is_a_warning(tmp_path):
    public = tmp_path / "public.safetensors"
    save_file({"w": np.zeros(5, np.float32)}, public)
    verdict = started(tmp_path, StartModel.load(public)).verify()
    assert failed(verdict) == {}
    assert "claimed public" in warned(verdict)["start model"]


def test_an_export_of_version_0_1_is_composed(tmp_path):
    old = tmp_path / "old.safetensors"
    metadata = {"rounds": "3", "epsilon": "8.0", "delta": "1e-05"}
    save_file({"w": np.zeros(5, np.float32)}, old, metadata)
    run = started(tmp_path, StartModel.load(old))
    verdict = run.verify()
    assert failed(verdict) == {}
    assert verdict.epsilon > 8.0


@pytest.mark.parametrize("kind", ["banded-hours", "blt-sgd", "tree-adam-names"])
def test_a_run_of_version_1_can_be_exported_and_composed(kind, tmp_path):
    """The rounding of version 1 is not covered, and the composed guarantee says so."""
    golden = Path(__file__).parent.parent / "golden" / "v1" / "runs" / kind
    shutil.copytree(golden / "finished", tmp_path / "old")
    shutil.copytree(golden / "finished-witness", tmp_path / "old-state")
    for path in (tmp_path / "old" / "private").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    with Server.resume(tmp_path / "old", state_folder=tmp_path / "old-state") as server:
        spent = server.epsilon
        server.export(tmp_path / "old.safetensors")
    start = StartModel.load(tmp_path / "old.safetensors")
    run = RunFolders(tmp_path / "run", tmp_path / "state")
    settings = Settings(clip_norm=1.0)
    with Server.create(run.folder, PLAN, settings, start, state_folder=run.state) as server:
        attempt = server.begin(CLIENTS)
        for client in attempt.clients[:3]:
            attempt.report(client, np.ones(server.layout.size), attempt.attempt)
        server.commit(attempt)
        names = {hypothesis.name for hypothesis in server.guarantee().hypotheses}
    verdict = run.verify()
    assert failed(verdict) == {}
    assert verdict.epsilon > spent
    assert {"rounding", "earlier runs"} <= names


def test_a_test_key_of_an_earlier_run_is_a_warning(tmp_path):
    run = RunFolders(tmp_path / "run", tmp_path / "state")
    model = {"w": np.zeros(5)}
    with Server.create(
        run.folder,
        PLAN,
        Settings(clip_norm=1.0),
        model,
        state_folder=run.state,
        insecure_test_key=1,
    ) as server:
        run_attempt(server)
        server.export(tmp_path / "model.safetensors")
    (tmp_path / "next").mkdir()
    later = started(tmp_path / "next", StartModel.load(tmp_path / "model.safetensors"))
    verdict = later.verify()
    assert failed(verdict) == {}
    assert "NOT PRIVATE" in warned(verdict)["start model"]


def test_version_1_of_run_json_records_no_start_model(run):
    path = run.folder / "run.json"
    content = json.loads(path.read_text())
    assert content["version"] == 2
    plain = {name: value for name, value in content.items() if name not in {"start", "buffers"}}
    path.write_text(json.dumps(plain | {"version": 1}))
    records = read_records(run)
    records[0]["settings_sha256"] = digest(path)
    rewrite(run, records)
    assert "not recorded" in check(run, "start model")
    # Whoever has the key can make the digests fit; what guarantee.json says no longer follows.
    assert "guarantee.json" in failed(run.verify())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def dropped(start: dict) -> None:
    start["earlier"] = []


def marked(start: dict) -> None:
    start["earlier"][0]["people"] = "others"


def quieter(start: dict) -> None:
    start["earlier"][0]["guarantee"]["runs"][0]["noise_multiplier"] *= 10


@pytest.mark.parametrize("edit", [dropped, marked, quieter])
def test_an_edited_start_model_fails_the_digest_of_run_json(run, edit):
    path = run.folder / "run.json"
    content = json.loads(path.read_text())
    edit(content["start"])
    path.write_text(json.dumps(content))
    assert "run.json" in failed(run.verify())["settings and plan"]


@pytest.mark.parametrize("edit", [dropped, marked, quieter])
def test_a_start_model_edited_with_the_key_contradicts_the_epsilon(run, edit):
    path = run.folder / "run.json"
    content = json.loads(path.read_text())
    edit(content["start"])
    path.write_text(json.dumps(content))
    records = read_records(run)
    records[0]["settings_sha256"] = digest(path)
    rewrite(run, records)
    assert {"journalled epsilon", "guarantee.json"} <= set(failed(run.verify()))


def test_an_earlier_run_with_too_small_mu_fails(run):
    path = run.folder / "run.json"
    content = json.loads(path.read_text())
    content["start"]["earlier"][0]["guarantee"]["mu"] /= 2
    path.write_text(json.dumps(content))
    records = read_records(run)
    records[0]["settings_sha256"] = digest(path)
    rewrite(run, records)
    assert "follows from its mechanism" in failed(run.verify())["start model"]


def test_an_edited_matrix_of_an_earlier_run_fails(run):
    (matrix,) = run.folder.glob("run-*.safetensors")
    content = matrix.read_bytes()
    matrix.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "settings and plan" in failed(run.verify())


def alone(content: dict) -> None:
    """The guarantee of the last run by itself, as if it had started from nothing."""
    limits = MinSep(3, 4)
    guarantee = account(mechanism("blt-b400"), limits, 3.0, 1e-6)
    content["runs"] = content["runs"][-1:]
    for name in ("mu", "rho", "epsilon", "sampler_delta", "kind"):
        content[name] = getattr(guarantee, name)


def without_earlier(content: dict) -> None:
    content["hypotheses"] = [
        hypothesis for hypothesis in content["hypotheses"] if hypothesis["name"] != "earlier runs"
    ]


def other_noise(content: dict) -> None:
    content["runs"][0]["noise_multiplier"] *= 2


def swapped(content: dict) -> None:
    content["runs"].reverse()


def earlier_enforced(content: dict) -> None:
    for hypothesis in content["hypotheses"]:
        if hypothesis["name"] == "participation":
            hypothesis["basis"] = "enforced"


@pytest.mark.parametrize("edit", [alone, without_earlier, other_noise, swapped, earlier_enforced])
def test_a_guarantee_without_the_earlier_runs_fails(run, edit):
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    assert "guarantee.json" in failed(run.verify())


@pytest.mark.parametrize("name", ["zero-out", "keystream", "secrecy", "identity", "earlier runs"])
@pytest.mark.parametrize("basis", ["enforced", "observed"])
def test_a_hypothesis_with_a_wrong_basis_fails(run, name, basis):
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    for hypothesis in content["hypotheses"]:
        if hypothesis["name"] == name:
            hypothesis["basis"] = basis
    path.write_text(json.dumps(content))
    assert "the basis" in failed(run.verify())["guarantee.json"]


def test_an_unknown_hypothesis_fails(run):
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    content["hypotheses"].append({"name": "trust", "text": "Trust us.", "basis": "assumed"})
    path.write_text(json.dumps(content))
    assert "what it rests on" in failed(run.verify())["guarantee.json"]


def test_the_budget_covers_composed_runs_and_the_plan_only_this_run(first, tmp_path):
    start = StartModel.load(model_of(first))
    run = started(tmp_path, start, rounds=8, budget=1000.0)
    verdict = run.verify()
    assert failed(verdict) == {}
    assert verdict.epsilon > PLAN.guarantee.epsilon
    assert "for this run by itself" in check(run, "budget")
