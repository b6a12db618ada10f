"""Verification of centralized runs: honest runs pass, and every lie is found."""

import hashlib
import hmac
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

from dpftrl._internal.storage import read_json
from dpftrl.accounting import calibrate_sampled
from dpftrl.centralized import Settings, TrainingRun, Units
from dpftrl.centralized.store import RunStore, Saved
from dpftrl.cli.verify import verify_command
from dpftrl.errors import UnsafeState
from dpftrl.mechanisms import BLT, Independent
from dpftrl.mechanisms.registry import mechanism
from dpftrl.participation import BallsInBins
from dpftrl.plan import Dataset, DatasetPlan, make_dataset_plan
from dpftrl.verify import Verdict, verify_run
from dpftrl.verify.centralized_epsilon import bins_gram
from dpftrl.verify.centralized_files import CentralizedFiles, GuaranteeFile
from dpftrl.verify.centralized_hypotheses import check_hypotheses
from dpftrl.verify.epsilon import epsilon_of
from dpftrl.verify.sampled_epsilon import (
    DeltaEstimate,
    estimate_bins_delta,
    overflow_probability,
    poisson_epsilon,
)

SIZE = 5  # coordinates of the model
SAMPLINGS = {
    "none": "blt",
    "poisson": "independent",
    "cyclic-poisson": "band-sqrt:4",
    "balls-in-bins": "blt-b400",
}
STEPS = 20  # of every plan here


class Run(NamedTuple):
    """The folder of a run, and the folder of its witness."""

    folder: Path
    state: Path

    def copy_to(self, root: Path) -> "Run":
        shutil.copytree(self.folder, root / "run")
        shutil.copytree(self.state, root / "state")
        return Run(root / "run", root / "state")

    def verify(self, **options) -> Verdict:
        return verify_run(self.folder, self.state, **options)

    @property
    def journal(self) -> Path:
        return self.folder / "private" / "journal.jsonl"

    @property
    def guarantee(self) -> Path:
        return self.folder / "guarantee.json"

    @property
    def checkpoint(self) -> Path:
        return max((self.folder / "private" / "checkpoints").glob("*.safetensors"))

    def records(self) -> list[dict]:
        return [json.loads(line)["record"] for line in self.journal.read_text().splitlines()]


def failed(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.text for check in verdict.checks if check.outcome == "failed"}


def warned(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.text for check in verdict.checks if check.outcome == "warning"}


def settings_for(units: Units, **changes: Any) -> Settings:
    known = {
        "clip_norm": 0.5,
        "unit": units.kind,
        "examples": units.examples,
        "examples_per_unit": units.examples_per_unit,
        "units_sha256": units.fingerprint(),
        "size": SIZE,
        "names": ("w",),
        "commit_every": 5,
        "clipping": f"The gradient of every {units.kind} is clipped to the clip norm.",
        "framework": "none",
    }
    return Settings(**known | changes)


def create(
    root: Path, plan: DatasetPlan, units: Units, test_key: int | None = None
) -> tuple[Run, TrainingRun]:
    run = Run(root / "run", root / "state")
    training = TrainingRun.create(
        run.folder,
        plan,
        settings_for(units),
        units,
        checkpoint=lambda: b"start",
        state_folder=run.state,
        insecure_test_key=test_key,
    )
    return run, training


def train(training: TrainingRun, steps: int) -> None:
    for _ in range(steps):
        drawn = training.batch(training.steps).units
        training.step(np.zeros(SIZE, np.int64), units=max(1, drawn), apply=lambda _: None)
        training.save_if_due(lambda: f"after {training.steps} steps".encode())


def record(root: Path, plan: DatasetPlan, steps: int, units: Units | None = None, **options) -> Run:
    run, training = create(root, plan, units or Units(plan.dataset.size), **options)
    train(training, steps)
    training.close()
    return run


@pytest.fixture(scope="module")
def plans() -> dict[str, DatasetPlan]:
    return {
        sampling: make_dataset_plan(
            Dataset(1_000, 100, 2), 2.0, 1e-5, sampling=sampling, mechanism_name=name
        )
        for sampling, name in SAMPLINGS.items()
    }


@pytest.fixture(scope="module")
def originals(plans, tmp_path_factory) -> dict[str, Run]:
    """A complete run of each sampling, and one of users."""
    runs = {
        sampling: record(tmp_path_factory.mktemp(sampling), plan, STEPS)
        for sampling, plan in plans.items()
    }
    owners = [f"user {i % 1_000}" for i in range(3_000)]
    units = Units(3_000, owners, examples_per_unit=2)
    runs["users"] = record(tmp_path_factory.mktemp("users"), plans["none"], STEPS, units)
    return runs


@pytest.fixture
def copy(originals, tmp_path) -> Callable[[str], Run]:
    return lambda name: originals[name].copy_to(tmp_path)


@pytest.fixture
def run(copy) -> Run:
    return copy("none")


# --- Edits ----------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def sign(run: Run, records: list[dict]) -> None:
    """Rewrite journal and witness with the noise key, so that all digests fit."""
    lines, mac = [], bytes(32)
    secret = (run.folder / "private" / "noise.key").read_bytes()
    key = hmac.digest(secret, b"\0\0\0\x07journal" + bytes(8), "sha256")
    for content in (json.dumps(record, separators=(",", ":")).encode() for record in records):
        mac = hmac.digest(key, mac + content, "sha256")
        lines.append(b'{"mac":"%s","record":%s}\n' % (mac.hex().encode(), content))
    run.journal.write_bytes(b"".join(lines))
    (witness,) = run.state.glob("*.json")
    edit(witness, lambda known: known.update(lines=len(lines), mac=mac.hex()))


def forge(run: Run, change: Callable[[dict], object], *names: str) -> None:
    """Change JSON files, and seal them again with the noise key."""
    for name in names or ("plan.json", "guarantee.json"):
        edit(run.folder / name, change)
    records = run.records()
    for field, name in (("settings_sha256", "run.json"), ("plan_sha256", "plan.json")):
        records[0][field] = hashlib.sha256((run.folder / name).read_bytes()).hexdigest()
    sign(run, records)


def forge_epsilon(run: Run, factor: float) -> None:
    """State another epsilon everywhere, with the noise key."""
    forge(run, lambda content: content.update(epsilon=content["epsilon"] * factor))
    records = run.records()
    for known in records:
        if known["kind"] == "saved":
            known["epsilon"] *= factor
    sign(run, records)


# --- Honest runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SAMPLINGS, "users"])
def test_an_honest_run_passes_without_warnings(originals, name):
    verdict = originals[name].verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})
    assert (verdict.rounds, verdict.delta) == (STEPS, 1e-5)
    assert verdict.epsilon == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("name", ["none", "poisson"])
def test_signing_again_without_a_change_passes(copy, name):
    """The negative control of all forgeries below."""
    run = copy(name)
    sign(run, run.records())
    forge(run, dict.copy)  # changes nothing
    forge_epsilon(run, 1.0)
    assert failed(run.verify()) == {}


def test_the_file_covers_the_steps_after_the_last_checkpoint(plans, tmp_path):
    run = record(tmp_path, plans["none"], 12)
    verdict = run.verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})
    assert verdict.epsilon == pytest.approx(plans["none"].after(12).epsilon, rel=1e-6)
    assert json.loads(run.guarantee.read_text())["epsilon"] >= verdict.epsilon


def test_a_file_of_the_last_checkpoint_does_not_cover_later_steps(plans, tmp_path):
    run, training = create(tmp_path, plans["none"], Units(1_000))
    train(training, 10)
    older = run.guarantee.read_bytes()
    train(training, 2)
    training.close()
    run.guarantee.write_bytes(older)
    verdict = run.verify()
    assert failed(verdict) == {}
    assert "10 steps, and the journal has 12" in warned(verdict)["guarantee.json"]
    assert json.loads(older)["epsilon"] < verdict.epsilon
    assert verdict.epsilon == pytest.approx(plans["none"].after(12).epsilon, rel=1e-6)


def test_with_sampling_an_older_file_covers_all_steps(plans, tmp_path):
    verdict = record(tmp_path, plans["poisson"], 12).verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})
    assert verdict.epsilon == plans["poisson"].guarantee.epsilon


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        ("cyclic-poisson", "banded:3"),
        ("none", "banded:3"),
        ("none", "tree"),
        ("none", "inv-sqrt:3"),
    ],
)
def test_strategies_that_are_not_toeplitz_or_have_negative_entries_pass(tmp_path, sampling, name):
    plan = make_dataset_plan(
        Dataset(1_000, 100, 2), 2.0, 1e-5, sampling=sampling, mechanism_name=name
    )
    run = record(tmp_path, plan, STEPS)
    assert failed(run.verify()) == {}
    forge_epsilon(run, 0.99)
    assert "epsilon" in failed(run.verify())


def test_a_run_before_its_first_checkpoint(plans, tmp_path):
    for steps in (0, 3):
        verdict = record(tmp_path / str(steps), plans["none"], steps).verify()
        assert (failed(verdict), warned(verdict)) == ({}, {})
        assert (verdict.epsilon == 0) == (steps == 0)


def test_a_process_killed_before_it_records_a_checkpoint_leaves_correct_files(
    plans, tmp_path, monkeypatch
):
    run, training = create(tmp_path, plans["none"], Units(1_000))
    train(training, 9)
    append = RunStore._append

    def killed(store: RunStore, record: Any) -> None:
        if isinstance(record, Saved):
            raise KeyboardInterrupt
        append(store, record)

    monkeypatch.setattr(RunStore, "_append", killed)
    with pytest.raises(KeyboardInterrupt):
        train(training, 1)
    training.close()
    verdict = run.verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})
    assert "covers 10 steps" in next(c.text for c in verdict.checks if c.name == "guarantee.json")


def test_half_a_line_at_the_end_is_a_warning(run):
    with run.journal.open("ab") as file:
        file.write(b'{"mac":"')
    assert "journal's end" in warned(run.verify())
    assert "journal's end" in failed(run.verify(witness=False))


def test_without_the_witness(run):
    shutil.rmtree(run.state)
    assert set(failed(run.verify())) == {"witness"}
    verdict = run.verify(witness=False)
    assert (failed(verdict), set(warned(verdict))) == ({}, {"witness"})


# --- Lies in guarantee.json -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "factor"),
    [("none", 0.99), ("poisson", 0.99), ("cyclic-poisson", 0.99), ("balls-in-bins", 0.95)],
)
def test_a_smaller_epsilon_is_found(copy, name, factor):
    run = copy(name)
    edit(run.guarantee, lambda content: content.update(epsilon=content["epsilon"] * factor))
    assert set(failed(run.verify())) == {"guarantee.json"}


@pytest.mark.parametrize(
    ("name", "factor"),
    [("none", 0.99), ("poisson", 0.99), ("cyclic-poisson", 0.99), ("balls-in-bins", 0.95)],
)
def test_a_smaller_epsilon_everywhere_is_found(copy, name, factor):
    run = copy(name)
    forge_epsilon(run, factor)
    verdict = run.verify()
    found = failed(verdict)
    assert "epsilon estimate" in found if name == "balls-in-bins" else "epsilon" in found
    assert name == "none" or verdict.epsilon is None


CHANGES: dict[str, dict[str, Any]] = {
    "the noise multiplier": {"noise_multiplier": 10.0},
    "the sampling": {"sampling": "poisson"},
    "the unit": {"unit": "user"},
    "the adjacency": {"adjacency": "add-or-remove"},
    "the clip norm": {"clip_norm": 0.1},
    "the data set": {
        "dataset": {"size": 2_000, "batch_size": 100, "epochs": 2, "max_batch_size": None}
    },
    "delta": {"delta": 1e-4},
    "the number of groups": {"groups": 2},
    "the identity of the run": {"run": "0" * 32},
    "the failure probability": {"failure": 1e-9},
    "the mechanism": {
        "mechanism": {
            "format": "dpftrl mechanism",
            "version": 1,
            "family": "independent",
            "parameters": {},
        }
    },
    "21 steps": {"steps": 21},
    "15 steps": {"steps": 15},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_guarantee_that_describes_another_run_is_found(run, what):
    edit(run.guarantee, lambda content: content.update(CHANGES[what]))
    found = failed(run.verify())
    assert set(found) == {"guarantee.json"}
    assert what in found["guarantee.json"]


def test_a_run_of_users_that_claims_examples_is_found(copy):
    run = copy("users")
    edit(run.guarantee, lambda content: content.update(unit="example"))
    assert set(failed(run.verify())) == {"guarantee.json"}
    forge(run, lambda content: content["settings"].update(unit="example"), "run.json")
    assert "settings and plan" in failed(run.verify())


def changed_number(hypotheses: list[dict]) -> None:
    hypotheses[3]["text"] = hypotheses[3]["text"].replace("at most 20", "at most 10")


def enforced(hypotheses: list[dict]) -> None:
    next(one for one in hypotheses if one["name"] == "start")["basis"] = "enforced"


def removed(hypotheses: list[dict]) -> None:
    del hypotheses[-1]


def added(hypotheses: list[dict]) -> None:
    hypotheses.append({"name": "more", "text": "All is well.", "basis": "enforced"})


def twice(hypotheses: list[dict]) -> None:
    hypotheses.append(hypotheses[0])


def reordered(hypotheses: list[dict]) -> None:
    hypotheses.reverse()


@pytest.mark.parametrize("change", [changed_number, enforced, removed, added, twice, reordered])
def test_an_edited_hypothesis_is_found(run, change):
    edit(run.guarantee, lambda content: change(content["hypotheses"]))
    assert set(failed(run.verify())) == {"hypotheses"}


@pytest.mark.parametrize("name", ["users", "balls-in-bins"])
def test_every_word_of_a_hypothesis_counts(copy, name):
    run = copy(name)
    original = run.guarantee.read_text()

    for position in range(len(json.loads(original)["hypotheses"])):
        run.guarantee.write_text(original)
        edit(run.guarantee, lambda c, i=position: c["hypotheses"][i].update(text="Nothing."))
        claim = read_json(run.guarantee, GuaranteeFile, "centralized guarantee")
        with pytest.raises(UnsafeState, match="was changed"):
            check_hypotheses(claim.hypotheses, CentralizedFiles(run.folder))


def test_a_missing_guarantee_is_found(run):
    run.guarantee.unlink()
    assert set(failed(run.verify())) == {"guarantee.json"}


# --- Lies in the journal --------------------------------------------------------------------------


def lines_deleted(lines: list[bytes]) -> None:
    del lines[3]


def lines_duplicated(lines: list[bytes]) -> None:
    lines.insert(4, lines[3])


def lines_swapped(lines: list[bytes]) -> None:
    lines[3], lines[4] = lines[4], lines[3]


@pytest.mark.parametrize("change", [lines_deleted, lines_duplicated, lines_swapped])
@pytest.mark.parametrize("with_key", [False, True])
def test_a_journal_with_other_steps_is_found(run, change, with_key):
    if with_key:
        records: list = run.records()
        change(records)
        sign(run, records)
    else:
        lines: list = run.journal.read_bytes().splitlines(keepends=True)
        change(lines)
        run.journal.write_bytes(b"".join(lines))
    assert set(failed(run.verify())) == {"journal"}


def repeated_digest(records: list[dict]) -> None:
    records[3]["digest"] = records[2]["digest"]


def odd_digest(records: list[dict]) -> None:
    records[3]["digest"] = "00"


def saved_too_late(records: list[dict]) -> None:
    next(record for record in records if record["kind"] == "saved")["steps"] = 6


def saved_twice(records: list[dict]) -> None:
    records.append(records[-1])


def created_twice(records: list[dict]) -> None:
    records.append(records[0])


def created_late(records: list[dict]) -> None:
    records.append(records.pop(0))


def unknown_record(records: list[dict]) -> None:
    records.append({"kind": "committed"})


def other_key(records: list[dict]) -> None:
    records[0]["key_fingerprint"] = "0" * 16


@pytest.mark.parametrize(
    "change",
    [
        repeated_digest,
        odd_digest,
        saved_too_late,
        saved_twice,
        created_twice,
        created_late,
        unknown_record,
        other_key,
    ],
)
def test_records_that_make_no_sense_are_found(run, change):
    records = run.records()
    change(records)
    sign(run, records)
    assert set(failed(run.verify())) == {"journal"}


def test_steps_removed_at_the_end_are_found(run):
    records = run.records()
    sign(run, [record for record in records if record.get("step", 0) < 15][:-1])
    assert "after 15 steps is missing" in failed(run.verify())["checkpoints"]


@pytest.mark.parametrize("name", ["none", "poisson"])
def test_more_steps_than_planned_are_found(copy, name):
    run = copy(name)
    sign(run, [*run.records(), {"kind": "step", "step": STEPS, "digest": "ab" * 16}])
    verdict = run.verify()
    assert set(failed(verdict)) == {"steps"}
    assert verdict.epsilon is None


@pytest.mark.parametrize("name", ["none", "poisson"])
def test_a_wrong_epsilon_in_the_journal_is_found(copy, name):
    run = copy(name)
    records = run.records()
    records[-1]["epsilon"] *= 0.999
    sign(run, records)
    assert set(failed(run.verify())) == {"journalled epsilon"}


def test_an_epsilon_that_falls_is_found(run):
    records = run.records()
    next(record for record in records if record["kind"] == "saved")["epsilon"] = 1.9
    sign(run, records)
    assert "falls" in failed(run.verify())["journalled epsilon"]


def test_a_folder_that_was_rolled_back_is_found(plans, tmp_path):
    run, training = create(tmp_path, plans["none"], Units(1_000))
    train(training, 10)
    shutil.copytree(run.folder, tmp_path / "backup")
    train(training, 5)
    training.close()
    assert failed(run.verify()) == {}
    shutil.rmtree(run.folder)
    shutil.copytree(tmp_path / "backup", run.folder)
    assert "rolled back" in failed(run.verify())["witness"]
    assert failed(run.verify(witness=False)) == {}


# --- Lies in other files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.json", "run.json"])
def test_an_edited_plan_or_settings_are_found(run, name):
    path = run.folder / name
    path.write_bytes(path.read_bytes() + b" ")
    verdict = run.verify()
    assert set(failed(verdict)) == {"settings and plan"}
    assert "guarantee" in warned(verdict)
    path.unlink()
    assert "settings and plan" in failed(run.verify())


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": -1.0},
        {"delta": 0.0},
        {"groups": 3},
        {"failure": 1.0},
        {"dataset": {"size": 10, "batch_size": 100, "epochs": 2, "max_batch_size": None}},
        {"dataset": {"size": 999, "batch_size": 100, "epochs": 2, "max_batch_size": None}},
    ],
)
def test_impossible_numbers_are_found(run, change):
    forge(run, lambda content: content.update(change), "plan.json")
    assert "settings and plan" in failed(run.verify())


def test_a_model_that_needs_too_many_normals_is_found(run):
    forge(run, lambda content: content["settings"].update(size=2**40), "run.json")
    assert set(failed(run.verify())) == {"steps"}


def test_a_checkpoint_that_is_not_that_of_the_journal_is_found(run):
    content = run.checkpoint.read_bytes()
    run.checkpoint.write_bytes(content + b" ")
    assert set(failed(run.verify())) == {"checkpoints"}
    run.checkpoint.write_bytes(content)
    assert failed(run.verify()) == {}
    extra = run.checkpoint.with_name("00000021.safetensors")
    shutil.copy(run.checkpoint, extra)
    assert "belongs to no step" in failed(run.verify())["checkpoints"]
    extra.unlink()
    run.checkpoint.unlink()
    assert "missing" in failed(run.verify())["checkpoints"]


def test_an_open_private_folder_and_another_key_are_found(run):
    key = run.folder / "private" / "noise.key"
    key.chmod(0o644)
    assert set(failed(run.verify())) == {"file modes"}
    key.chmod(0o600)
    key.write_bytes(bytes(32))
    assert set(failed(run.verify())) == {"journal"}


def test_a_test_key_is_found(plans, tmp_path):
    found = failed(record(tmp_path, plans["none"], 5, test_key=1).verify())
    assert set(found) == {"noise key"}
    assert "NOT PRIVATE" in found["noise key"]


def test_a_strategy_that_the_sampling_does_not_cover_is_found(copy):
    run = copy("cyclic-poisson")
    forge(run, lambda content: content.update(groups=3))
    assert "band(s)" in failed(run.verify())["sampling"]


def test_negative_entries_with_balls_in_bins_are_found(copy):
    negative = {
        "format": "dpftrl mechanism",
        "version": 1,
        "family": "gblt",
        "parameters": mechanism("gblt:0.5@-0.2").parameters(),
    }
    run = copy("balls-in-bins")
    forge(run, lambda content: content.update(mechanism=negative))
    assert "negative" in failed(run.verify())["sampling"]


def test_the_failure_probability_of_a_certificate(copy):
    run = copy("balls-in-bins")
    forge(run, lambda content: content.update(failure=1e-3))
    verdict = run.verify()
    assert failed(verdict) == {}
    assert "0.001" in warned(verdict)["certificate"]
    forge(run, lambda content: content.update(failure=0.0))
    assert "certificate" in failed(run.verify())


@pytest.mark.parametrize("estimate", [(0.0, 0.0), (5e-6, 2e-6)])
def test_an_estimate_that_decides_nothing_is_a_warning(originals, monkeypatch, estimate):
    poor = DeltaEstimate(*estimate, samples=100)
    monkeypatch.setattr(
        "dpftrl.verify.centralized_epsilon.estimate_bins_delta", lambda *_: (poor, poor)
    )
    verdict = originals["balls-in-bins"].verify()
    assert failed(verdict) == {}
    assert "too imprecise" in warned(verdict)["epsilon estimate"]


def test_batches_that_are_cut_cost_delta(copy, tmp_path):
    plan = make_dataset_plan(
        Dataset(1_000, 100, 2, max_batch_size=160),
        2.0,
        1e-5,
        sampling="poisson",
        mechanism_name="independent",
    )
    assert failed(record(tmp_path / "honest", plan, STEPS).verify()) == {}
    run = copy("poisson")
    forge(run, lambda content: content["dataset"].update(max_batch_size=110))
    assert "batches are cut" in failed(run.verify())["epsilon"]
    forge(run, lambda content: content["dataset"].update(max_batch_size=156))
    assert "less than recomputed" in failed(run.verify())["epsilon"]


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("none", "20 steps, epsilon 2.000 at delta 1e-05, recomputed"),
        ("balls-in-bins", "20 steps, epsilon 2.000 at delta 1e-05, confirmed by an estimate"),
    ],
)
def test_the_command_prints_a_verdict(originals, name, end):
    run = originals[name]
    arguments = [str(run.folder), "--state-folder", str(run.state)]
    result = CliRunner().invoke(verify_command, arguments)
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == f"passed: {end}"


def test_the_command_fails_with_exit_code_1(run):
    run.guarantee.unlink()
    assert CliRunner().invoke(verify_command, [str(run.folder), "--no-witness"]).exit_code == 1


# --- Epsilon --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "probability", "compositions", "delta"),
    [(1.0, 0.01, 300, 1e-6), (0.6, 0.02, 40, 1e-5), (4.0, 0.3, 50, 1e-8), (0.3, 0.01, 3, 1e-5)],
)
def test_poisson_epsilon_agrees_with_dp_accounting(scale, probability, compositions, delta):
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(
        scale, sampling_prob=probability, value_discretization_interval=3e-4
    )
    expected = one.self_compose(compositions).get_epsilon_for_delta(delta)
    epsilon = poisson_epsilon(scale, probability, compositions, delta)
    assert epsilon == pytest.approx(expected, rel=2e-4)


def test_poisson_epsilon_of_all_examples_is_that_of_a_gaussian():
    expected = epsilon_of(1e-6, math.sqrt(10) / 2)
    epsilon = poisson_epsilon(2.0, 1.0, 10, 1e-6)
    assert expected <= epsilon <= expected * (1 + 5e-5)


def test_without_noise_enough_epsilon_is_not_finite_or_large():
    assert poisson_epsilon(0.02, 0.5, 10, 1e-5) > 1_000


@pytest.mark.parametrize("bins", [1, 3, 7, 20, 25])
@pytest.mark.parametrize("name", ["blt-b400", "band-sqrt:4"])
def test_the_gram_matrix_of_bins(bins, name):
    chosen = mechanism(name)
    strategy = chosen.strategy(STEPS)
    sums = np.zeros((STEPS, bins))
    for step in range(STEPS):
        sums[:, step % bins] += strategy[:, step]
    expected = sums.T @ sums
    assert bins_gram(strategy, bins) == pytest.approx(expected)
    column = chosen.first_column(STEPS)
    assert column is not None
    assert bins_gram(column, bins) == pytest.approx(expected)


def test_the_estimate_for_one_bin_is_that_of_a_gaussian():
    mu, epsilon = 1.0, epsilon_of(1e-6, 1.0)
    for estimate in estimate_bins_delta(np.array([[mu**2]]), 1.0, epsilon):
        assert abs(estimate.value - 1e-6) < 5 * estimate.standard_error
        assert estimate.standard_error < 2e-8


def test_the_estimate_for_two_bins_agrees_with_an_integral():
    """Both directions, by integration in two dimensions on a grid."""
    gram, scale, epsilon = np.array([[1.38, 0.92], [0.92, 1.25]]), 1.7, 1.0
    factor = np.linalg.cholesky(gram / scale**2)
    axis = np.linspace(-10, 10, 1_001)
    points = np.stack(np.meshgrid(axis, axis), axis=-1) @ factor.T
    density = np.exp(-(axis[:, None] ** 2 + axis[None, :] ** 2) / 2) / (2 * math.pi)
    density *= (axis[1] - axis[0]) ** 2
    ratio = np.exp(points - np.diag(gram) / scale**2 / 2).mean(axis=-1)
    expected = (
        (density * np.maximum(ratio - math.exp(epsilon), 0)).sum(),
        (density * np.maximum(1 - math.exp(epsilon) * ratio, 0)).sum(),
    )
    for estimate, delta in zip(estimate_bins_delta(gram, scale, epsilon), expected, strict=True):
        assert abs(estimate.value - delta) < 5 * estimate.standard_error
        assert estimate.standard_error < 0.02 * delta


def test_the_overflow_probability_is_a_binomial_tail():
    exact = sum(math.comb(30, k) * 0.2**k * 0.8 ** (30 - k) for k in range(13, 31))
    assert overflow_probability(30, 0.2, 7, 12) == pytest.approx(7 * exact)
    assert overflow_probability(30, 0.2, 7, 30) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "scale", "epsilon"),
    [
        # From `calibrate_sampled` for 1,000 steps, 100 bins and delta 1e-6, rounded.
        (BLT([0.925], [0.226]), 5.494, 1.0),
        (BLT([0.947, 0.0], [0.191, 0.075]), 3.494, 2.0),
        (BLT([0.947, 0.0], [0.191, 0.075]), 1.67, 8.0),
        # Not from a certificate: about the noise multiplier for this delta.
        (Independent(), 3.74, 0.5),
    ],
)
def test_the_estimate_finds_an_epsilon_that_is_5_percent_too_small(chosen, scale, epsilon):
    column = chosen.first_column(1_000)
    assert column is not None
    gram = bins_gram(column, 100)
    honest = estimate_bins_delta(gram, scale, epsilon)
    assert all(estimate.least <= 1e-6 for estimate in honest)
    assert max(estimate.value for estimate in honest) > 0.7e-6
    assert max(estimate.standard_error for estimate in honest) < 0.04e-6
    lie = estimate_bins_delta(gram, scale, 0.95 * epsilon)
    assert max(estimate.least for estimate in lie) > 1e-6


@pytest.mark.slow
def test_the_estimate_agrees_with_a_certificate_of_the_library():
    chosen, sampling = BLT([0.947, 0.0], [0.191, 0.075]), BallsInBins(100, 10, 40)
    scale = calibrate_sampled(chosen, sampling, 2.0, 1e-5).noise_multiplier
    column = chosen.first_column(40)
    assert column is not None
    estimates = estimate_bins_delta(bins_gram(column, 10), scale, 2.0)
    assert all(estimate.least <= 1e-5 for estimate in estimates)
    assert max(estimate.value for estimate in estimates) > 0.9e-5


@pytest.mark.slow
def test_the_estimate_for_many_bins_is_affordable():
    column = BLT([0.99], [0.1]).first_column(8_192)
    assert column is not None
    estimates = estimate_bins_delta(bins_gram(column, 4_096), 1.0, 3.0)
    assert all(math.isfinite(estimate.value) for estimate in estimates)
    assert estimates[0].samples >= 1_000
