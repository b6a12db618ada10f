"""Plans as files: what is read back is what was saved, and nothing that claims too much."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import (
    Banded,
    FixedEpochs,
    MinSep,
    Toeplitz,
    account,
    compose,
    mechanism,
    save_mechanism,
)
from dpftrl.accounting import Hypothesis, load_guarantee, save_guarantee
from dpftrl.errors import InvalidInput
from dpftrl.plan import Budget, Fleet, Option, Plan, Question, load_plan, options, save_plan

DELTA = 1e-8
FLEET = Fleet(1300, 100, availability=0.7, over_selection=1.3, timer_days=2, rounds_per_day=1.5)
LABELS = ["blt", "blt-robust", "blt-b400", "tree", "tree-full", "band-toeplitz", "bandmf"]


def plan_of(name: str = "blt-b100", participation=None, noise_multiplier: float = 2.5) -> Plan:
    setting = participation or MinSep(20, 3)
    return Plan(FLEET, account(mechanism(name, setting), setting, noise_multiplier, DELTA))


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        question = Question(FLEET, 10, Budget(DELTA, epsilon=3.0), buffers=1)
        rows = list(options(question))
    assert all(isinstance(row, Option) for row in rows)
    return {row.label: row.plan for row in rows}


@pytest.mark.parametrize("label", LABELS)
def test_the_plan_of_every_option_survives_saving_and_loading(chosen, tmp_path, label):
    plan, path = chosen[label], tmp_path / "plan.json"
    save_plan(plan, path)
    again = load_plan(path)
    assert again == plan
    assert again.mechanism == plan.mechanism
    assert again.guarantee.epsilon == plan.guarantee.epsilon
    assert again.participation == MinSep(10, 3)


def test_plans_of_different_options_are_not_equal(chosen):
    """The control: equal plans are equal, and no two of these are."""
    assert isinstance(chosen["bandmf"].mechanism, Banded)
    assert isinstance(chosen["band-toeplitz"].mechanism, Toeplitz)
    assert not any(
        chosen[one] == chosen[other] for one in LABELS for other in LABELS if one != other
    )


OTHERS = {
    "fixed epochs": ("tree", FixedEpochs(20, 3)),
    "capped": ("blt-b400", MinSep(20, 3, 2)),
    "a bound": ("toeplitz:1,0,0.5", MinSep(20, 1)),
    "smooth": ("smooth-tree", MinSep(20, 3)),
    "a billion rounds": ("independent", MinSep(10**9, 10**6)),
    "independent": ("independent", MinSep(20, 20)),
}


@pytest.mark.parametrize(("name", "participation"), OTHERS.values(), ids=OTHERS.keys())
def test_other_mechanisms_and_participations_survive_saving_and_loading(
    tmp_path, name, participation
):
    plan, path = plan_of(name, participation), tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert type(load_plan(path).participation) is type(participation)


@given(
    noise_multiplier=st.floats(1e-3, 1e5),
    delta=st.floats(1e-300, 0.5),
    share=st.floats(1e-6, 1),
    factor=st.floats(1, 1e6),
)
def test_floats_are_read_back_to_the_last_bit(
    tmp_path_factory, noise_multiplier, delta, share, factor
):
    path = tmp_path_factory.getbasetemp() / "bits.json"
    promise = account(mechanism("blt-b400"), MinSep(20, 3), noise_multiplier, delta)
    plan = Plan(Fleet(10**9, 1, share, factor), promise)
    save_plan(plan, path)
    assert load_plan(path) == plan


def test_the_basis_of_hypotheses_is_saved(tmp_path):
    path, plain = tmp_path / "plan.json", plan_of()
    known = replace(plain.guarantee.hypotheses[0], basis="enforced")
    plan = Plan(FLEET, plain.guarantee.resting_on(known))
    save_plan(plan, path)
    assert load_plan(path).guarantee.hypotheses[0].basis == "enforced"
    assert load_plan(path) != plain


def test_saving_replaces_the_file_and_leaves_no_other_files(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(plan_of("tree"), path)
    save_plan(plan_of("blt-b400"), path)
    assert load_plan(path) == plan_of("blt-b400")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def saved(tmp_path, plan: Plan | None = None):
    path = tmp_path / "plan.json"
    save_plan(plan or plan_of(), path)
    return path, json.loads(path.read_text())


def refused(path, content=None) -> str:
    if content is not None:
        path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput) as told:
        load_plan(path)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("name", ["mu", "rho", "epsilon"])
@pytest.mark.parametrize("factor", [0.999999, 0.5, 0, -1])
def test_a_file_that_claims_a_smaller_mu_rho_or_epsilon_is_refused(tmp_path, name, factor):
    path, content = saved(tmp_path)
    content["guarantee"][name] *= factor
    assert name in refused(path, content)


def as_it_was_or_refused(path, content) -> None:
    """A file that claims too much noise or epsilon is no danger, but must change nothing."""
    path.write_text(json.dumps(content))
    try:
        plan = load_plan(path)
    except InvalidInput:
        return
    assert plan == plan_of()


def test_a_file_that_claims_a_larger_epsilon_changes_nothing(tmp_path):
    path, content = saved(tmp_path)
    path.write_text(json.dumps(content))
    assert load_plan(path) == plan_of()  # the control: writing it again is not what is refused
    content["guarantee"]["epsilon"] *= 2
    as_it_was_or_refused(path, content)


def test_a_file_with_less_noise_than_its_guarantee_needs_is_refused(tmp_path):
    path, content = saved(tmp_path)
    content["guarantee"]["runs"][0]["noise_multiplier"] *= 0.99
    assert "claims mu" in refused(path, content)


def test_a_file_with_more_participation_than_its_guarantee_covers_is_refused(tmp_path):
    for name, value in (("min_sep", 2), ("rounds", 40)):
        path, content = saved(tmp_path)
        content["guarantee"]["runs"][0]["participation"][name] = value
        content["guarantee"]["runs"][0]["participation"]["max_participations"] = 99
        refused(path, content)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sensitivity", 0.001), ("sensitivity", 1000.0), ("sensitivity_kind", "rough")],
)
def test_a_stored_sensitivity_is_recomputed(tmp_path, name, value):
    path, content = saved(tmp_path)
    content["guarantee"]["runs"][0][name] = value
    as_it_was_or_refused(path, content)


@pytest.mark.parametrize(
    ("name", "value"), [("sampler_delta", 0.0), ("unit", "everybody"), ("kind", "upper bound")]
)
def test_other_derived_fields_are_recomputed(tmp_path, name, value):
    path, content = saved(tmp_path)
    assert content["guarantee"][name] != value
    content["guarantee"][name] = value
    as_it_was_or_refused(path, content)


def honest(plan: Plan) -> bool:
    """Whether a plan promises no less than an account of its own run."""
    again = account(plan.mechanism, plan.participation, plan.noise_multiplier, plan.guarantee.delta)
    return plan.guarantee.epsilon >= again.epsilon


def test_a_common_cap_written_into_a_file_does_not_shrink_epsilon(tmp_path):
    """Nobody enforces it: what the server enforces is the plan's participation."""
    path, content = saved(tmp_path)
    content["guarantee"]["common_cap"] = 1
    path.write_text(json.dumps(content))
    try:
        plan = load_plan(path)
    except InvalidInput:
        return
    assert honest(plan)


def test_a_guarantee_under_a_common_cap_is_not_a_plan():
    promise = plan_of().guarantee
    capped = compose([promise], DELTA, max_participations=1)
    assert capped.epsilon < promise.epsilon
    with pytest.raises(InvalidInput):
        Plan(FLEET, capped)


@pytest.mark.parametrize(
    "hypotheses",
    [
        [],
        [{"name": "participation", "text": "Nothing has to be so.", "basis": "enforced"}],
        [
            {
                "name": "participation",
                "text": "Each client takes part in at most 99 of 20 rounds.",
                "basis": "assumed",
            },
        ],
    ],
    ids=["none", "nothing", "another participation"],
)
def test_a_file_cannot_drop_hypotheses(tmp_path, hypotheses):
    path, content = saved(tmp_path)
    content["guarantee"]["hypotheses"] = hypotheses
    path.write_text(json.dumps(content))
    try:
        plan = load_plan(path)
    except InvalidInput:
        return
    said = {hypothesis.text for hypothesis in plan.guarantee.hypotheses}
    assert {hypothesis.text for hypothesis in plan_of().guarantee.hypotheses} <= said


def test_a_guarantee_of_several_runs_or_devices_is_refused():
    promise = plan_of().guarantee
    for other in (compose([promise, promise], DELTA), promise.for_devices(2)):
        with pytest.raises(InvalidInput, match="the guarantee of one run, for one client"):
            Plan(FLEET, other)
    assert Plan(FLEET, compose([promise], DELTA)) == Plan(FLEET, promise)


@pytest.mark.parametrize("kind", ["composed", "devices"])
def test_a_file_with_several_runs_or_devices_is_refused(tmp_path, kind):
    promise = plan_of().guarantee
    other = compose([promise] * 2, DELTA) if kind == "composed" else promise.for_devices(3)
    save_guarantee(other, tmp_path / "other.json")
    assert load_guarantee(tmp_path / "other.json") == other
    path, content = saved(tmp_path)
    content["guarantee"] = json.loads((tmp_path / "other.json").read_text())
    assert "one run" in refused(path, content)


def drop(content, name):
    del content[name]


def set_to(*names, to):
    def edit(content):
        for name in names[:-1]:
            content = content[name]
        content[names[-1]] = to

    return edit


RUN = ("guarantee", "runs", 0)
EDITS = {
    "another format": set_to("format", to="dpftrl guarantee"),
    "another version": set_to("version", to=3),
    "no fleet": lambda content: drop(content, "fleet"),
    "no guarantee": lambda content: drop(content, "guarantee"),
    "no mu": lambda content: drop(content["guarantee"], "mu"),
    "a word more": set_to("surprise", to=1),
    "no runs": set_to("guarantee", "runs", to=[]),
    "a run of nothing": set_to("guarantee", "runs", to=[{}]),
    "text for numbers": set_to("guarantee", "epsilon", to="small"),
    "null for numbers": set_to("guarantee", "epsilon", to=None),
    "true for numbers": set_to("guarantee", "mu", to=True),
    "no delta": set_to("guarantee", "delta", to=0),
    "a delta of 1": set_to("guarantee", "delta", to=1),
    "no noise": set_to(*RUN, "noise_multiplier", to=0),
    "negative noise": set_to(*RUN, "noise_multiplier", to=-2.5),
    "next to no noise": set_to(*RUN, "noise_multiplier", to=1e-200),
    "a subnormal noise": set_to(*RUN, "noise_multiplier", to=5e-324),
    "no rounds": set_to(*RUN, "participation", "rounds", to=0),
    "too many rounds": set_to(*RUN, "participation", "rounds", to=10**19),
    "no separation": set_to(*RUN, "participation", "min_sep", to=0),
    "another kind of participation": set_to(*RUN, "participation", "kind", to="sampled"),
    "no such family": set_to(*RUN, "mechanism", "family", to="magic"),
    "a growing mechanism": set_to(*RUN, "mechanism", "parameters", "theta", to=[1.5]),
    "no devices": set_to("guarantee", "devices", to=0),
    "many devices": set_to("guarantee", "devices", to=2),
    "countless devices": set_to("guarantee", "devices", to=10**400),
    "no cap": set_to("guarantee", "common_cap", to=0),
    "another adjacency": set_to("guarantee", "adjacency", to="add-or-remove"),
    "an unknown basis": set_to("guarantee", "hypotheses", 0, "basis", to="hoped"),
    "nobody": set_to("fleet", "population", to=0),
    "more than all": set_to("fleet", "availability", to=1.5),
    "half a timer": set_to("fleet", "timer_days", to=None),
    "a fleet of text": set_to("fleet", to="large"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_invalid_file_is_refused_in_one_line(tmp_path, edit):
    path, content = saved(tmp_path)
    edit(content)
    assert str(path) in refused(path, content) or "one run" in refused(path, content)


CORRUPT = {
    "nothing": b"",
    "blanks": b" \n ",
    "binary": bytes(range(256)),
    "half a file": b'{"format": "dpftrl plan", "version": 1, "fle',
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "a list": b"[]",
    "null": b"null",
    "a number": b"3.14",
    "NaN": b'{"format": NaN}',
    "deep": b"[" * 100_000,
    "overflow": b'{"format": "dpftrl plan", "version": 1e999}',
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert "is not a plan file" in refused(path)


def test_files_of_other_kinds_are_refused(tmp_path):
    save_guarantee(plan_of().guarantee, tmp_path / "guarantee.json")
    save_mechanism(mechanism("blt-b400"), tmp_path / "mechanism.json")
    for name in ("guarantee", "mechanism"):
        wanted = f"is not a plan file: it holds a 'dpftrl {name}'"
        assert wanted in refused(tmp_path / f"{name}.json")
    path, _ = saved(tmp_path)
    with pytest.raises(InvalidInput, match="is not a guarantee file: it holds a 'dpftrl plan'"):
        load_guarantee(path)


def test_missing_files_and_folders_are_refused(tmp_path):
    assert "cannot be read" in refused(tmp_path / "nowhere.json")
    (tmp_path / "folder.json").mkdir()
    assert "is not a file" in refused(tmp_path / "folder.json")
    assert "ends in .json" in refused(tmp_path / "plan.txt")
    with pytest.raises(InvalidInput, match=r"ends in \.json"):
        save_plan(plan_of(), tmp_path / "plan.yaml")
    with pytest.raises(InvalidInput, match="cannot be written"):
        save_plan(plan_of(), tmp_path / "no" / "such" / "plan.json")
    with pytest.raises(InvalidInput, match="cannot be written"):
        save_plan(plan_of(), tmp_path / "folder.json")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.json"]


def test_a_changed_or_missing_matrix_file_is_refused(chosen, tmp_path):
    path, _ = saved(tmp_path, chosen["bandmf"])
    (matrix,) = tmp_path.glob("*.safetensors")
    content = matrix.read_bytes()
    matrix.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is not the matrix" in refused(path)
    matrix.unlink()
    assert "cannot be read" in refused(path)
    matrix.write_bytes(content)
    assert load_plan(path) == chosen["bandmf"]


def test_numpy_numbers_are_saved(tmp_path):
    path = tmp_path / "plan.json"
    promise = account(mechanism("blt-b400"), MinSep(20, 3), np.float64(2.5), np.float64(DELTA))
    fleet = Fleet(np.int64(1300), 100, np.float64(0.7))  # pyright: ignore
    save_plan(Plan(fleet, promise), path)
    assert load_plan(path) == Plan(Fleet(1300, 100, 0.7), promise)


def test_hypotheses_with_unusual_characters_survive_saving(tmp_path):
    path = tmp_path / "plan.json"
    odd = Hypothesis("remark", 'naïve "quotes"\nand 😀', "observed")
    plan = Plan(FLEET, plan_of().guarantee.resting_on(odd))
    save_plan(plan, path)
    assert load_plan(path) == plan
