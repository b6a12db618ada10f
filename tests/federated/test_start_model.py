"""A run that starts from a private model states what all runs behind the model spent together."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_runs import DELTA, PEOPLE, SIZE, create, one_round, records, reopen, small_plan

from dpftrl import MinSep, account, calibrate, mechanism
from dpftrl.accounting import compose, load_guarantee
from dpftrl.errors import InvalidInput, RunOver, TooLarge, UnsafeState
from dpftrl.federated import Server, StartModel
from dpftrl.federated.start_model import PROVENANCE
from dpftrl.plan import Fleet, Plan
from dpftrl.verify.epsilon import epsilon_of as epsilon_by_halving


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def trained(place: Path, rounds: int = 3, model: Any = None, **settings: Any) -> Path:
    """Run so many rounds in a new folder, and export the model."""
    plan = settings.pop("plan", None) or small_plan(noise_multiplier=2.0)
    with create(place, plan, model, **settings) as server:
        for _ in range(rounds):
            one_round(server)
        server.export(place / "model.safetensors")
    return place / "model.safetensors"


def opened(place: Path) -> Server:
    return Server.resume(place / "run", state_folder=place / "state")


def metadata_of(model: Path) -> dict[str, str]:
    content = model.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def provenance_of(model: Path) -> dict[str, Any]:
    return json.loads(metadata_of(model)[PROVENANCE])


def edited(model: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the model whose provenance was changed."""
    provenance = provenance_of(model)
    change(provenance)
    target = model.with_name("edited.safetensors")
    save_file(load_file(model), target, {PROVENANCE: json.dumps(provenance)})
    return target


# --- What an export carries ----------------------------------------------------------------------


def test_an_export_names_its_run_and_what_it_guarantees(tmp_path):
    model = trained(tmp_path, population="es-ES keyboards")
    with opened(tmp_path) as server:
        alone, run = server.guarantee(), server.run_id
    said = provenance_of(model)
    assert (said["format"], said["version"], said["matrices"]) == ("dpftrl provenance", 1, {})
    (only,) = said["runs"]
    assert (only["run"], only["population"], only["test_key"]) == (run, "es-ES keyboards", True)
    assert only["guarantee"]["epsilon"] == alone.epsilon
    (earlier,) = StartModel.load(model).start.earlier
    assert earlier.guarantee == alone
    assert metadata_of(model)["epsilon"] == repr(alone.epsilon)


def test_an_export_holds_nothing_private(tmp_path):
    model = trained(tmp_path)
    content = model.read_bytes()
    with opened(tmp_path) as server:
        key = server.folder.key.read_bytes()
        secrets = [record["digest"] for record in records(server) if "digest" in record]
        clients = [record["clients"][:16] for record in records(server) if "clients" in record]
    for secret in (*secrets, *clients, *PEOPLE, key.hex(), str(tmp_path)):
        assert secret.encode() not in content
    assert key not in content


@pytest.mark.parametrize("name", ["banded:4", "tree", "smooth-tree", "toeplitz:1,0.2,0.6"])
def test_an_export_needs_no_other_file(tmp_path, name):
    model = trained(tmp_path / "first", plan=small_plan(9, 4, noise_multiplier=2.0, name=name))
    moved = model.rename(tmp_path / "moved.safetensors")
    (earlier,) = StartModel.load(moved).start.earlier
    with opened(tmp_path / "first") as server:
        assert earlier.guarantee == server.guarantee()
    second = tmp_path / "second"
    trained(second, model=StartModel.load(moved))
    with opened(second) as server:  # from run.json and the matrices beside it
        assert server.start is not None
        assert server.start.earlier == (earlier,)


def test_matrices_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    plan = small_plan(9, 4, noise_multiplier=2.0, name="banded:4")
    with create(tmp_path, plan) as server:
        one_round(server)
        monkeypatch.setattr("dpftrl.federated.start_model.MOST_PROVENANCE_BYTES", 1000)
        with pytest.raises(TooLarge, match=r"guarantee\.json"):
            server.export(tmp_path / "model.safetensors")


# --- Composition ---------------------------------------------------------------------------------


def test_two_runs_at_epsilon_8_state_more_than_12(tmp_path):
    """Before runs were composed, the second one stated 8 as well."""
    limits, delta = MinSep(4, 4), 1e-5
    blt = mechanism("blt-b400", limits)
    plan = Plan(Fleet(60, 3), account(blt, limits, calibrate(blt, limits, 8.0, delta), delta))
    first = trained(tmp_path / "first", rounds=4, plan=plan)
    second = trained(tmp_path / "second", rounds=4, plan=plan, model=StartModel.load(first))
    assert float(metadata_of(first)["epsilon"]) == pytest.approx(8.0, rel=1e-6)
    expected = epsilon_by_halving(delta, math.sqrt(2) * plan.guarantee.mu)
    assert expected == pytest.approx(12.2565, abs=1e-4)
    assert float(metadata_of(second)["epsilon"]) == pytest.approx(expected, rel=1e-6)


def test_three_runs_compose_and_every_file_says_so(tmp_path):
    sigmas, model, alone = (2.0, 1.5, 1.0), None, []
    for number, noise_multiplier in enumerate(sigmas):
        place, plan = tmp_path / str(number), small_plan(noise_multiplier=noise_multiplier)
        start = None if model is None else StartModel.load(model)
        model = trained(place, rounds=number + 2, plan=plan, model=start)
        limits = MinSep(number + 2, 4, plan.participation.max_participations)
        alone.append(account(plan.mechanism, limits, noise_multiplier, DELTA))
        together = compose(alone, DELTA)
        with opened(place) as server:
            assert server.epsilon == server.guarantee().epsilon == together.epsilon
            assert records(server)[-1]["epsilon"] == together.epsilon
            assert server.guarantee().mu == pytest.approx(
                math.sqrt(sum(one.mu**2 for one in alone)), rel=1e-12
            )
        assert load_guarantee(place / "run" / "guarantee.json").epsilon == together.epsilon
        assert float(metadata_of(model)["epsilon"]) == together.epsilon
        assert len(provenance_of(model)["runs"]) == number + 1


def test_each_round_is_stated_with_the_earlier_runs(tmp_path):
    first = trained(tmp_path / "first")
    start = StartModel.load(first)
    before = start.start.earlier[0].guarantee
    plan = small_plan(noise_multiplier=2.0)
    server = create(tmp_path / "second", plan, start)
    assert server.epsilon == before.epsilon  # the model that it starts from has been spent on
    for rounds in range(1, 5):
        released = one_round(server)
        alone = account(plan.mechanism, MinSep(rounds, 4), plan.noise_multiplier, DELTA)
        assert released.epsilon == server.epsilon == compose([before, alone], DELTA).epsilon
        server = reopen(server)
        assert server.epsilon == released.epsilon
    assert server.planned.epsilon == compose([before, plan.guarantee], DELTA).epsilon
    assert np.array_equal(start.arrays["w"], load_file(first)["w"])
    server.close()


def test_labels_that_differ_are_no_proof(tmp_path):
    first = trained(tmp_path / "first", population="a")
    second = trained(tmp_path / "second", population="b", model=StartModel.load(first))
    assert float(metadata_of(second)["epsilon"]) > float(metadata_of(first)["epsilon"])


def test_the_guarantee_names_what_it_takes_for_granted(tmp_path):
    first = trained(tmp_path / "first")
    trained(tmp_path / "second", model=StartModel.load(first))
    found = load_guarantee(tmp_path / "second" / "run" / "guarantee.json")
    bases = [(one.name, one.basis) for one in found.hypotheses]
    assert bases.count(("participation", "enforced")) == 1  # its own, not that of the first run
    assert bases.count(("participation", "assumed")) == 1
    assert ("earlier runs", "assumed") in bases
    assert found.kind == "upper bound"


def test_a_test_key_behind_the_start_model_stays_visible(tmp_path):
    first = trained(tmp_path / "first")
    plan, place = small_plan(noise_multiplier=2.0), tmp_path / "second"
    with Server.create(
        place / "run",
        plan,
        reopened_settings(tmp_path / "first"),
        StartModel.load(first),
        state_folder=place / "state",
    ) as server:
        one_round(server)
        secrecy = [one for one in server.guarantee().hypotheses if one.name == "secrecy"]
    assert ["NOTHING IS PRIVATE" in one.text for one in secrecy] == [True]


def reopened_settings(place: Path):
    with opened(place) as server:
        return server.settings


# --- Other people --------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["run", "label"])
def test_others_are_not_composed_if_the_operator_says_so(tmp_path, by):
    first = trained(tmp_path / "first", population="es-ES")
    name = provenance_of(first)["runs"][0]["run"] if by == "run" else "es-ES"
    start = StartModel.load(first, other_people=[name])
    second = trained(tmp_path / "second", population="pt-PT", model=start)
    assert float(metadata_of(second)["epsilon"]) == float(metadata_of(first)["epsilon"])
    found = load_guarantee(tmp_path / "second" / "run" / "guarantee.json")
    assert ("other people", "assumed") in [(one.name, one.basis) for one in found.hypotheses]
    assert [one["people"] for one in provenance_of(second)["runs"]] == ["others", "same"]


def test_what_one_operator_stated_does_not_hold_for_the_next(tmp_path):
    """The third run may be on the people of the first: only its operator knows."""
    first = trained(tmp_path / "first", population="a")
    start = StartModel.load(first, other_people=["a"])
    second = trained(tmp_path / "second", population="b", model=start)
    third = StartModel.load(second).start
    assert [one.people for one in third.earlier] == ["same", "same"]
    third = StartModel.load(second, other_people=["a"]).start
    assert [one.people for one in third.earlier] == ["others", "same"]


def test_a_run_that_is_not_there_cannot_be_of_other_people(tmp_path):
    first = trained(tmp_path, population="a")
    with pytest.raises(InvalidInput, match=r"other_people names 'b'.*\(a\)"):
        StartModel.load(first, other_people=["b"])


def test_people_of_one_label_are_not_others(tmp_path):
    first = trained(tmp_path / "first", population="a")
    start = StartModel.load(first, other_people=["a"])
    with pytest.raises(InvalidInput, match="both runs have the population label 'a'"):
        trained(tmp_path / "second", population="a", model=start)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("label", ["", "  ", "two\nlines", "x" * 201, "\u202egnp", 5])
def test_a_label_is_a_short_line(tmp_path, label):
    with pytest.raises(InvalidInput, match=r"population|settings"):
        create(tmp_path, population=label)


# --- A start model without provenance ------------------------------------------------------------


def test_a_model_of_unknown_origin_is_recorded_by_its_digest(tmp_path):
    public = tmp_path / "public.safetensors"
    save_file({"w": np.ones(SIZE, np.float32)}, public, {"made by": "somebody"})
    trained(tmp_path / "run", model=StartModel.load(public))
    sha256 = hashlib.sha256(public.read_bytes()).hexdigest()
    kept = json.loads((tmp_path / "run" / "run" / "run.json").read_text())["start"]
    assert kept == {"sha256": sha256, "earlier": []}
    found = load_guarantee(tmp_path / "run" / "run" / "guarantee.json")
    assert ("start model", "assumed") in [(one.name, one.basis) for one in found.hypotheses]
    assert len(found.runs) == 1


def test_an_export_of_version_0_1_is_composed_by_its_epsilon(tmp_path):
    old = tmp_path / "old.safetensors"
    alone = account(mechanism("blt-b400"), MinSep(20, 4), 2.0, 1e-5)
    told = {"rounds": "20", "epsilon": repr(alone.epsilon), "delta": "1e-05"}
    save_file({"w": np.ones(SIZE, np.float32)}, old, told)
    (earlier,) = StartModel.load(old).start.earlier
    assert earlier.run is None
    assert alone.mu <= earlier.guarantee.mu * (1 + 1e-4)  # the sampler's part of delta
    trained(tmp_path / "new", model=StartModel.load(old))
    with opened(tmp_path / "new") as server:
        assert len(server.guarantee().runs) == 2
        assert server.epsilon > alone.at(DELTA).epsilon
    others = StartModel.load(old, other_people=["not recorded"]).start
    assert others.composed == ()


@pytest.mark.parametrize("epsilon", ["nan", "none", "-1", "inf"])
def test_an_export_of_version_0_1_with_nonsense_is_refused(tmp_path, epsilon):
    old = tmp_path / "old.safetensors"
    told = {"rounds": "20", "epsilon": epsilon, "delta": "1e-05"}
    save_file({"w": np.ones(SIZE, np.float32)}, old, told)
    with pytest.raises(InvalidInput, match="export it again"):
        StartModel.load(old)


def halved(said: dict[str, Any]) -> None:
    said["runs"][0]["guarantee"]["epsilon"] /= 2


def louder(said: dict[str, Any]) -> None:
    said["runs"][0]["guarantee"]["runs"][0]["noise_multiplier"] *= 10


def nameless(said: dict[str, Any]) -> None:
    said["runs"][0]["run"] = "../../etc"


def emptied(said: dict[str, Any]) -> None:
    said["runs"] = []


def unknown(said: dict[str, Any]) -> None:
    said["surprise"] = 1


def later(said: dict[str, Any]) -> None:
    said["version"] = 2


def escaping(said: dict[str, Any]) -> None:
    said["matrices"] = {"../up.safetensors": "AAAA"}


def not_base64(said: dict[str, Any]) -> None:
    said["matrices"] = {"x.safetensors": "?"}


def several(said: dict[str, Any]) -> None:
    said["runs"][0]["guarantee"]["devices"] = 2


@pytest.mark.parametrize(
    "change",
    [halved, louder, nameless, emptied, unknown, later, escaping, not_base64, several],
)
def test_a_provenance_that_contradicts_itself_is_refused(tmp_path, change):
    model = edited(trained(tmp_path), change)
    with pytest.raises(InvalidInput, match=r"\A[^\n]*edited\.safetensors: its provenance") as error:
        StartModel.load(model)
    assert "/tmp/tmp" not in str(error.value)


def test_what_is_no_model_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"no model at all")
    with pytest.raises(InvalidInput, match="is not a model"):
        StartModel.load(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        StartModel.load(tmp_path / "nowhere.safetensors")


def test_an_export_ends_in_safetensors_and_has_a_round(tmp_path):
    with create(tmp_path) as server:
        with pytest.raises(InvalidInput, match="released nothing"):
            server.export(tmp_path / "model.safetensors")
        one_round(server)
        with pytest.raises(InvalidInput, match=r"\.safetensors"):
            server.export(tmp_path / "model.bin")


# --- Budget, resuming, and edits -----------------------------------------------------------------


def test_the_budget_is_for_the_total(tmp_path):
    first = StartModel.load(trained(tmp_path / "first"))
    before = first.start.earlier[0].guarantee
    plan = small_plan(noise_multiplier=2.0)
    allowed = [
        compose([before, account(plan.mechanism, MinSep(rounds, 4), 2.0, DELTA)], DELTA).epsilon
        for rounds in (2, 3)
    ]
    server = create(tmp_path / "second", plan, first, budget=sum(allowed) / 2)
    one_round(server)
    one_round(server)
    with pytest.raises(RunOver, match="earlier runs spent"):
        server.begin(PEOPLE)
    assert server.rounds == 2
    server.close()


def test_a_budget_that_the_earlier_runs_have_spent(tmp_path):
    first = StartModel.load(trained(tmp_path / "first"))
    spent = first.start.earlier[0].guarantee.epsilon
    with create(tmp_path / "second", model=first, budget=spent) as server:
        assert "earlier runs spent" in (server.ended() or "")


def test_a_run_that_goes_on_cannot_forget_its_start_model(tmp_path):
    first = trained(tmp_path / "first")
    trained(tmp_path / "second", model=StartModel.load(first))
    path = tmp_path / "second" / "run" / "run.json"
    content = json.loads(path.read_text())
    content["start"] = None
    path.write_text(json.dumps(content))
    with pytest.raises(UnsafeState, match="not what it was when the run began"):
        opened(tmp_path / "second")


def test_arrays_that_are_handed_over_are_no_file(tmp_path):
    trained(tmp_path)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["start"] is None
    with opened(tmp_path) as server:
        assert server.start is None


def with_tensor(path: Path, kind: str, shape: list[int], data: bytes) -> Path:
    """A safetensors file with one tensor, as programs with other types of numbers write it."""
    entry = {"w": {"dtype": kind, "shape": shape, "data_offsets": [0, len(data)]}}
    header = json.dumps(entry).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_a_model_in_bfloat16_becomes_float32(tmp_path):
    values = np.array([[1.0, -2.5], [0.0, 3.0e38]], np.float32)
    upper_halves = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    path = with_tensor(tmp_path / "m.safetensors", "BF16", [2, 2], upper_halves)
    loaded = StartModel.load(path).arrays["w"]
    assert loaded.dtype == np.float32
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(loaded, expected)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "I8", "BOOL"])
def test_a_model_of_other_numbers_is_refused_with_their_type(tmp_path, kind):
    path = with_tensor(tmp_path / "m.safetensors", kind, [2], b"\x01\x00")
    with pytest.raises(InvalidInput, match=f"has the type {kind}; save it as one of BF16"):
        StartModel.load(path)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "<f2"), ("F32", "<f4"), ("F64", "<f8")])
def test_models_of_usual_numbers_are_read_as_they_are(tmp_path, kind, dtype):
    values = np.array([1.5, -2.0], dtype)
    path = with_tensor(tmp_path / "m.safetensors", kind, [2], values.tobytes())
    loaded = StartModel.load(path).arrays["w"]
    assert np.array_equal(loaded, values)
    assert loaded.dtype == values.dtype
