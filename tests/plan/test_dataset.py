"""Plans for a data set: the schemes that are compared, and the mechanisms behind their names."""

import json

import pytest

from dpftrl import BallsInBins, CyclicPoisson, Dataset, FixedEpochs, InvalidInput, Poisson
from dpftrl.accounting import balls_in_bins
from dpftrl.accounting.amplification import SampledGuarantee
from dpftrl.mechanisms import BLT, Independent, Toeplitz
from dpftrl.optimize import sampled
from dpftrl.plan import (
    SAMPLINGS,
    DatasetOption,
    DatasetPlan,
    Missing,
    account_dataset,
    calibrate_dataset,
    load_dataset_plan,
    mechanism_for_dataset,
    options_for_dataset,
    save_dataset_plan,
)

SMALL = Dataset(size=1_000, batch_size=100, epochs=4)
TARGET = {"epsilon": 2.0, "delta": 1e-4}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(balls_in_bins, "DEFAULT_SAMPLES", 2**15)  # fewer than users get
        patch.setattr(sampled, "SAMPLES", 2**10)
        patch.setattr(sampled, "EVALUATIONS", 8)
        return list(options_for_dataset(SMALL, **TARGET))


def test_steps_and_samplings_of_a_data_set():
    assert (SMALL.steps_per_epoch, SMALL.steps) == (10, 40)
    assert SMALL.in_order == FixedEpochs(rounds=40, min_sep=10, max_participations=4)
    assert SMALL.sampling("poisson") == Poisson(1_000, 100, 40)
    assert SMALL.sampling("cyclic-poisson", 3) == CyclicPoisson(1_000, 100, 40, 3)
    assert SMALL.sampling("balls-in-bins") == BallsInBins(1_000, 100, 40)
    assert SMALL.sampling_for(Toeplitz([1.0, 0.5, 0.2]), "cyclic-poisson").groups == 3
    uneven = Dataset(size=1_001, batch_size=100, epochs=2)
    assert (uneven.steps_per_epoch, uneven.steps) == (11, 22)
    assert "1,001 examples" in str(uneven)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 1, 1), "dataset_size"),
        ((10, 0, 1), "batch_size must be a whole number of at least 1, got 0"),
        ((10, 11, 1), "larger than the data set"),
        ((10, 5, 0), "epochs"),
        ((10, 5, 1.5), "epochs"),
        ((10, 5, 1, 4), "below the expected batch size"),
    ],
    ids=["empty", "empty batch", "batch too large", "no epoch", "half epoch", "cap below batch"],
)
def test_a_data_set_that_cannot_be_is_refused(numbers, words):
    with pytest.raises(InvalidInput, match=words):
        Dataset(*numbers)


def test_every_scheme_reaches_the_target_and_says_what_it_rests_on(rows):
    schemes = {(row.label, row.sampling): row for row in rows if isinstance(row, DatasetOption)}
    assert set(schemes) == {
        ("dp-sgd", "poisson"),
        ("band-toeplitz", "cyclic-poisson"),
        ("bandmf", "cyclic-poisson"),
        ("blt", "none"),
        ("blt", "balls-in-bins"),
    }
    for row in schemes.values():
        assert row.guarantee.epsilon <= 2.0 * (1 + 1e-12)
        assert row.guarantee.delta == 1e-4
        assert row.guarantee.adjacency == "zero-out"
        assert row.rms_noise == row.noise_multiplier * row.mechanism.rms_error(40)
        assert (row.failure > 0) == (row.sampling == "balls-in-bins")


def test_sampling_helps_and_balls_in_bins_helps_most(rows):
    noise = {(row.label, row.sampling): row.rms_noise for row in rows if hasattr(row, "sampling")}
    assert noise["blt", "balls-in-bins"] < noise["band-toeplitz", "cyclic-poisson"]
    assert noise["band-toeplitz", "cyclic-poisson"] < noise["dp-sgd", "poisson"]
    assert noise["blt", "balls-in-bins"] < 0.8 * noise["blt", "none"]
    assert noise["bandmf", "cyclic-poisson"] < noise["band-toeplitz", "cyclic-poisson"]


def test_every_plan_is_the_same_after_its_file(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(balls_in_bins, "DEFAULT_SAMPLES", 2**16)
    for row in rows:
        path = tmp_path / f"{row.label} {row.sampling}.json"
        save_dataset_plan(DatasetPlan(row.sampling, row.guarantee, SMALL), path)
        loaded = load_dataset_plan(path)
        assert (loaded.dataset, loaded.sampling) == (SMALL, row.sampling)
        assert loaded.guarantee == row.guarantee


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("epsilon", 1.8, "epsilon"),
        ("delta", 0.6e-4, "epsilon"),
        ("noise_multiplier", 0.94, "epsilon"),
        ("epsilon", 0.0, "epsilon"),
        ("delta", 1.5, "delta"),
        ("sampling", "uniform", "sampling"),
        ("seed", 3, "seed"),
        ("version", 9, "version"),
    ],
)
def test_a_file_that_claims_more_than_its_noise_gives_is_refused(
    rows, tmp_path, monkeypatch, field, value, words
):
    monkeypatch.setattr(balls_in_bins, "DEFAULT_SAMPLES", 2**15)
    for row in rows:
        path = tmp_path / "plan.json"
        save_dataset_plan(DatasetPlan(row.sampling, row.guarantee, SMALL), path)
        content = json.loads(path.read_text())
        factor = content[field] if field == "noise_multiplier" else 1
        path.write_text(json.dumps({**content, field: value * factor if factor != 1 else value}))
        with pytest.raises(InvalidInput, match=words):
            load_dataset_plan(path)


def test_a_file_cannot_ask_for_a_certificate_that_is_less_sure(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(balls_in_bins, "DEFAULT_SAMPLES", 2**16)
    (row,) = [row for row in rows if row.sampling == "balls-in-bins"]
    path = tmp_path / "plan.json"
    save_dataset_plan(DatasetPlan(row.sampling, row.guarantee, SMALL), path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "failure": 0.5}))
    assert load_dataset_plan(path).guarantee == row.guarantee
    path.write_text(json.dumps({**content, "failure": -0.5}))
    with pytest.raises(InvalidInput, match="failure"):
        load_dataset_plan(path)


def test_other_files_are_no_plans_for_a_data_set(tmp_path):
    with pytest.raises(InvalidInput, match=r"ends in \.json"):
        load_dataset_plan(tmp_path / "plan.txt")
    with pytest.raises(InvalidInput, match="nothing"):
        load_dataset_plan(tmp_path / "nothing.json")


def test_the_samplings_can_be_restricted_and_a_slow_mechanism_is_left_out_with_a_reason():
    only = list(options_for_dataset(SMALL, **TARGET, samplings=("none", "poisson")))
    assert [(row.label, row.sampling) for row in only] == [("dp-sgd", "poisson"), ("blt", "none")]
    long = Dataset(1_000, 100, 41)
    rows = list(options_for_dataset(long, **TARGET, samplings=("cyclic-poisson",)))
    assert isinstance(rows[1], Missing)
    assert "--with-bandmf" in rows[1].note


def test_a_scheme_that_is_impossible_is_left_out_and_the_others_are_not():
    capped = Dataset(1_000, 100, 4, max_batch_size=110)
    samplings = ("none", "poisson")
    rows = {row.label: row for row in options_for_dataset(capped, **TARGET, samplings=samplings)}
    assert isinstance(rows["blt"], DatasetOption)
    assert "too often" in rows["dp-sgd (poisson)"].note


def test_names_stand_for_what_the_sampling_needs():
    assert mechanism_for_dataset("independent", SMALL, "poisson") == Independent()
    assert isinstance(mechanism_for_dataset("blt", SMALL, "none"), BLT)
    tiny = Dataset(100, 50, 2)
    best = mechanism_for_dataset("band-toeplitz", tiny, "cyclic-poisson", 2.0, 1e-4)
    assert isinstance(best, Toeplitz)
    with pytest.raises(InvalidInput, match="depends on epsilon"):
        mechanism_for_dataset("blt", SMALL, "balls-in-bins")
    with pytest.raises(InvalidInput, match="cyclic-poisson"):
        mechanism_for_dataset("band-toeplitz", SMALL, "poisson", 2.0, 1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_calibrated_is_accounted_the_same(sampling):
    chosen = Independent()
    calibrated = calibrate_dataset(chosen, SMALL, sampling, 2.0, 1e-4)
    noise = DatasetOption(sampling, calibrated).noise_multiplier
    accounted = account_dataset(chosen, SMALL, sampling, noise, 1e-4)
    assert accounted.epsilon == pytest.approx(2.0, rel=0.02)
    assert isinstance(accounted, SampledGuarantee) == (sampling != "none")
