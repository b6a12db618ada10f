"""Guarantee files: they load as they were saved, and are refused if damaged or edited.

Every number in a file is changed, up and down: a changed file is refused, or it loads and claims no
more than the guarantee that was saved.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import EVERY, Family, draw_case, participations
from dpftrl import DpftrlError, FixedEpochs, MinSep
from dpftrl.accounting import (
    Guarantee,
    Hypothesis,
    account,
    compose,
    guarantee_of,
    load_guarantee,
    save_guarantee,
)
from dpftrl.errors import InvalidInput

every = pytest.mark.parametrize("family", EVERY, ids=str)
CLIENTS = MinSep(200, 40, 3)


def blt_run() -> Guarantee:
    return account(dpftrl.mechanism("blt-b400"), CLIENTS, 3.7, 1e-6)


def banded_run() -> Guarantee:
    return account(dpftrl.mechanism("banded:4", MinSep(30, 5)), FixedEpochs(30, 5, 2), 1.3, 1e-6)


def capped() -> Guarantee:
    return compose([blt_run(), banded_run()], 1e-7, 4)


def known() -> Guarantee:
    seen = Hypothesis("participation", "Nobody took part more than once.", "observed")
    return blt_run().resting_on(seen)


SEVERAL = {
    "one run": blt_run,
    "a matrix beside": banded_run,
    "composed": lambda: compose([blt_run(), banded_run(), blt_run()], 1e-7),
    "composed with a cap": capped,
    "one run with a cap": lambda: compose([blt_run()], 1e-7, 2),
    "three devices": lambda: blt_run().for_devices(3),
    "three devices, composed with a cap": lambda: capped().for_devices(3),
    "another delta": lambda: blt_run().at(1e-10),
    "something known": known,
    "a bound": lambda: account(dpftrl.Toeplitz([1.0, 0.0, 0.5]), MinSep(90, 1), 2.0, 1e-6),
    "an epsilon of 0": lambda: account(dpftrl.mechanism("tree"), CLIENTS, 1e6, 0.1),
    "a huge epsilon": lambda: account(dpftrl.mechanism("tree"), CLIENTS, 1e-6, 1e-12),
}
several = pytest.mark.parametrize("make", SEVERAL.values(), ids=SEVERAL)


def refused(path: Path) -> str:
    """Check that loading fails with a one-line DpftrlError."""
    with pytest.raises(InvalidInput) as error:
        load_guarantee(path)
    message = str(error.value)
    assert message
    assert len(message.splitlines()) == 1
    return message


def saved(folder: Path, guarantee: Guarantee) -> dict[str, Any]:
    save_guarantee(guarantee, folder / "g.json")
    return json.loads((folder / "g.json").read_text())


def write(folder: Path, what: object) -> Path:
    path = folder / "edited.json"
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    return path


# --- There and back ----------------------------------------------------------------------------


@several
def test_a_guarantee_reads_back_equal(tmp_path, make):
    guarantee = make()
    content = saved(tmp_path, guarantee)
    again = load_guarantee(tmp_path / "g.json")
    assert again == guarantee
    for name in ("mu", "rho", "epsilon", "delta", "sampler_delta", "kind", "unit", "devices"):
        assert content[name] == getattr(again, name) == getattr(guarantee, name)
    save_guarantee(again, tmp_path / "again.json")
    assert load_guarantee(tmp_path / "again.json") == guarantee


@every
@settings(max_examples=6)
@given(data=st.data())
def test_guarantees_of_every_mechanism_read_back_equal(tmp_path_factory, family: Family, data):
    mech, rounds = draw_case(data, family, 20)
    clients = data.draw(participations(rounds))
    guarantee = account(mech, clients, data.draw(st.floats(0.01, 100)), 1e-6)
    folder = tmp_path_factory.mktemp("guarantee")
    saved(folder, guarantee)
    assert load_guarantee(folder / "g.json") == guarantee
    other = account(mech, clients, guarantee.runs[0].noise_multiplier * 1.5, 1e-6)
    assert load_guarantee(folder / "g.json") != other


def test_devices_of_devices_read_back_equal(tmp_path):
    for noise_multiplier in np.linspace(1.0, 9.0, 40):
        alone = account(dpftrl.mechanism("blt-b400"), CLIENTS, float(noise_multiplier), 1e-6)
        guarantee = alone.for_devices(3).for_devices(7)
        saved(tmp_path, guarantee)
        assert load_guarantee(tmp_path / "g.json") == guarantee


@several
def test_a_file_that_calls_a_client_a_device_reads_back_equal(tmp_path, make):
    guarantee = make()
    content = saved(tmp_path, guarantee)
    content["unit"] = "device" if guarantee.devices == 1 else "3 devices of one person"
    for hypothesis in content["hypotheses"]:
        hypothesis["text"] = hypothesis["text"].replace("client", "device")
    assert any("device" in hypothesis["text"] for hypothesis in content["hypotheses"])
    assert load_guarantee(write(tmp_path, content)) == guarantee
    # A negative control: another unit in the old words is refused.
    content["unit"] = "4 devices of one person"
    with pytest.raises(InvalidInput, match="unit 4 clients"):
        load_guarantee(write(tmp_path, content))


def test_a_guarantee_replaces_the_one_that_was_there(tmp_path):
    for guarantee in (banded_run(), blt_run(), capped(), banded_run()):
        save_guarantee(guarantee, str(tmp_path / "g.json"))
        assert load_guarantee(str(tmp_path / "g.json")) == guarantee


def test_a_guarantee_can_be_moved_only_together_with_its_matrix_file(tmp_path):
    home = tmp_path / "here"
    home.mkdir()
    saved(home, banded_run())
    home.rename(tmp_path / "there")
    assert load_guarantee(tmp_path / "there" / "g.json") == banded_run()
    for matrix in (tmp_path / "there").glob("*.safetensors"):
        matrix.unlink()
    refused(tmp_path / "there" / "g.json")


def test_a_replaced_matrix_file_is_refused(tmp_path):
    saved(tmp_path, banded_run())
    (matrix,) = tmp_path.glob("*.safetensors")
    raw = bytearray(matrix.read_bytes())
    raw[-1] ^= 1
    matrix.write_bytes(bytes(raw))
    refused(tmp_path / "g.json")


def test_numbers_of_other_libraries_can_be_saved(tmp_path):
    for noise_multiplier in (np.float64(3.0), np.int64(3), 3):
        guarantee = account(
            dpftrl.mechanism("blt-b400"), CLIENTS, noise_multiplier, np.float64(1e-6)
        )
        saved(tmp_path, guarantee)
        assert load_guarantee(tmp_path / "g.json") == guarantee


# --- Claims ------------------------------------------------------------------------------------


def numbers(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number in a file, with its place."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from numbers(value, (*at, key))
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield at, content


def edited(content: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(content)
    place = whole
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    return whole


def loaded_or_refused(path: Path) -> Guarantee | None:
    """The loaded guarantee; None if it was refused with a one-line DpftrlError."""
    try:
        return load_guarantee(path)
    except DpftrlError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


def check_claim(path: Path, truth: Guarantee) -> bool:
    """Check that the file is refused, or claims nothing better than the true guarantee."""
    loaded = loaded_or_refused(path)
    if loaded is None:
        return False
    assert loaded.devices <= truth.devices
    alone = truth.mu / truth.devices
    real = replace(truth, mu_of_one=alone, devices=loaded.devices, delta=loaded.delta)
    said = json.loads(path.read_text())
    close = 1 - 1e-8
    for name in ("mu", "rho", "epsilon", "sampler_delta"):
        assert getattr(loaded, name) >= getattr(real, name) * close, f"loads a smaller {name}"
        assert said[name] >= getattr(real, name) * close, f"says a smaller {name}"
    for run, real_run in zip(said["runs"], truth.runs, strict=True):
        assert run["sensitivity"] >= real_run.sensitivity.value * close, "says less sensitivity"
        assert run["rounding"] >= real_run.rounding * close, "says less rounding"
    return True


@several
def test_a_file_that_was_not_edited_passes_the_check_of_claims(tmp_path, make):
    assert check_claim(write_saved(tmp_path, make()), make())


def write_saved(folder: Path, guarantee: Guarantee) -> Path:
    return write(folder, saved(folder, guarantee))


@pytest.mark.parametrize("name", ["mu", "rho", "epsilon"])
@several
def test_a_lower_claim_is_refused(tmp_path, make, name: str):
    content = saved(tmp_path, make())
    was = content[name]
    for lower in (was * 0.5, was * (1 - 1e-6), 0.0, -was, -1e-3):
        if lower < was:
            assert name in refused(write(tmp_path, edited(content, (name,), lower)))


PLACES = {
    "/".join(map(str, at)): at
    for at in [
        ("mu",),
        ("rho",),
        ("epsilon",),
        ("delta",),
        ("sampler_delta",),
        ("devices",),
        ("common_cap",),
        *(
            ("runs", run, *rest)
            for run in (0, 1)
            for rest in [
                ("noise_multiplier",),
                ("sensitivity",),
                ("rounding",),
                ("participation", "rounds"),
                ("participation", "min_sep"),
                ("participation", "max_participations"),
            ]
        ),
        *(
            ("runs", 0, "mechanism", "parameters", name, i)
            for name in ("theta", "omega")
            for i in range(4)
        ),
    ]
}


@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
def test_no_number_can_be_changed_for_a_better_claim(tmp_path, at: tuple[Any, ...]):
    truth = capped().for_devices(3)
    content = saved(tmp_path, truth)
    was = dict(numbers(content))[at]
    if isinstance(was, int):
        changes = [was - 2, was - 1, was + 1, was + 2, 10 * was, 100 * was, 0, -was]
    else:
        changes = [was * factor for factor in (0.0, 0.5, 1 - 1e-6, 1 + 1e-6, 2.0, 100.0, -1.0)]
    for value in changes:
        check_claim(write(tmp_path, edited(content, at, value)), truth)


def test_every_number_of_a_file_is_tried(tmp_path):
    found = {at for at, _ in numbers(saved(tmp_path, capped().for_devices(3)))}
    versions = {at for at in found if at[-1] == "version"}
    assert found - versions == set(PLACES.values())


def test_the_rounding_of_the_buffers_cannot_be_edited_away(tmp_path):
    """A file with float32 buffers must state that their rounding is not covered."""
    guarantee = blt_run()
    content = saved(tmp_path, guarantee)
    assert content["runs"][0]["buffers"] == "float64"
    (run,) = guarantee.runs
    ideal = guarantee_of([replace(run, buffers="float32")], guarantee.delta)
    assert (ideal.mu, ideal.epsilon) < (guarantee.mu, guarantee.epsilon)
    claims = {name: getattr(ideal, name) for name in ("mu", "rho", "epsilon", "sampler_delta")}
    smaller = copy.deepcopy(content) | claims
    smaller["runs"][0]["rounding"] = 0.0
    refused(write(tmp_path, smaller))
    smaller["runs"][0]["buffers"] = "float32"
    assert "rounding" in refused(write(tmp_path, smaller))
    for buffers in ("float32", "float16", None):
        refused(write(tmp_path, edited(content, ("runs", 0, "buffers"), buffers)))


def test_a_file_of_version_2_that_says_version_1_claims_no_more(tmp_path):
    loaded = loaded_or_refused(write(tmp_path, saved(tmp_path, blt_run()) | {"version": 1}))
    assert loaded is None or (loaded.mu, loaded.epsilon) == (blt_run().mu, blt_run().epsilon)


def test_a_file_whose_noise_was_raised_with_all_its_claims_is_another_run(tmp_path):
    """The file alone cannot show this, since a file is only checked against itself."""
    louder = account(dpftrl.mechanism("blt-b400"), CLIENTS, 7.4, 1e-6)
    assert check_claim(write_saved(tmp_path, louder), louder)
    with pytest.raises(AssertionError):
        check_claim(write_saved(tmp_path, louder), blt_run())


@pytest.mark.parametrize(
    ("name", "better"),
    [("kind", "exact"), ("unit", "5 clients (devices) of one person"), ("unit", "person")],
)
def test_words_that_claim_more_are_refused(tmp_path, name: str, better: str):
    content = saved(tmp_path, capped())
    assert content[name] != better
    refused(write(tmp_path, edited(content, (name,), better)))


def test_a_kind_of_sensitivity_that_claims_more_is_refused(tmp_path):
    content = saved(tmp_path, SEVERAL["a bound"]())
    assert content["runs"][0]["sensitivity_kind"] == "upper bound"
    refused(write(tmp_path, edited(content, ("runs", 0, "sensitivity_kind"), "exact")))


def test_hypotheses_cannot_be_left_out(tmp_path):
    """A guarantee with fewer hypotheses would be a stronger claim."""
    content = saved(tmp_path, capped())
    for i in range(len(content["hypotheses"])):
        fewer = copy.deepcopy(content)
        del fewer["hypotheses"][i]
        refused(write(tmp_path, fewer))
    refused(write(tmp_path, edited(content, ("hypotheses",), [])))


def test_a_participation_and_what_is_said_of_it_stay_together(tmp_path):
    """If it loads, its numbers follow from the participation that its hypotheses state."""
    content = saved(tmp_path, blt_run())
    at = ("runs", 0, "participation", "min_sep")
    loaded = loaded_or_refused(write(tmp_path, edited(content, at, 100)))
    assert loaded is None or loaded.runs[0].hypothesis in loaded.hypotheses


# --- Damage ------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused(tmp_path):
    text = json.dumps(saved(tmp_path, capped()))
    for cut in range(0, len(text), 97):
        refused(write(tmp_path, text[:cut]))


@pytest.mark.parametrize(
    "text",
    ["", " \n", "[]", "5", "null", '"guarantee"', "{}", "[" * 100_000, '{"format": "dpftrl'],
    ids=lambda text: text[:9] or "empty",
)
def test_files_that_are_not_guarantees_are_refused(tmp_path, text: str):
    refused(write(tmp_path, text))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("format",), "dpftrl mechanism"),
        (("format",), None),
        (("version",), 3),
        (("version",), 0),
        (("version",), "1"),
        (("adjacency",), "add-or-remove"),
        (("runs",), []),
        (("runs",), {}),
        (("runs", 0), None),
        (("runs", 0, "mechanism", "family"), "nonsense"),
        (("runs", 0, "mechanism", "format"), "dpftrl guarantee"),
        (("runs", 0, "mechanism", "parameters", "theta"), [2.0, 0.5, 0.5, 0.5]),
        (("runs", 0, "mechanism", "parameters", "theta"), []),
        (("runs", 0, "mechanism", "parameters", "omega"), "x"),
        (("runs", 0, "participation", "kind"), "poisson"),
        (("runs", 0, "participation", "rounds"), 10**19),
        (("runs", 0, "participation", "rounds"), 1.5),
        (("runs", 1, "participation", "rounds"), 31),
        (("runs", 0, "noise_multiplier"), "3.7"),
        (("runs", 0, "noise_multiplier"), 0),
        (("delta",), 0),
        (("delta",), 1),
        (("delta",), "small"),
        (("devices",), 0),
        (("devices",), 1.5),
        (("devices",), None),
        (("common_cap",), 0),
        (("common_cap",), "4"),
        (("hypotheses",), None),
        (("hypotheses", 0), "trust me"),
        (("hypotheses", 0, "basis"), "proved"),
    ],
    ids=lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:20],
)
def test_a_wrong_value_is_refused(tmp_path, at: tuple[Any, ...], value: Any):
    refused(write(tmp_path, edited(saved(tmp_path, capped()), at, value)))


PARTS = {
    "file": (),
    "run": ("runs", 0),
    "mechanism": ("runs", 0, "mechanism"),
    "parameters": ("runs", 0, "mechanism", "parameters"),
    "participation": ("runs", 0, "participation"),
    "hypothesis": ("hypotheses", 0),
}


@pytest.mark.parametrize("at", PARTS.values(), ids=PARTS)
def test_unknown_and_missing_fields_are_refused(tmp_path, at: tuple[Any, ...]):
    content = saved(tmp_path, capped())
    refused(write(tmp_path, edited(content, (*at, "surprise"), 1)))
    part = content
    for key in at:
        part = part[key]
    for name in part:
        if name == "basis":  # assumed, if nothing is said
            continue
        fewer = copy.deepcopy(content)
        place = fewer
        for key in at:
            place = place[key]
        del place[name]
        refused(write(tmp_path, fewer))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "null", "9" * 5000])
def test_null_and_non_numbers_are_refused_in_every_number_field(tmp_path, word: str):
    content = saved(tmp_path, capped())
    for at in PLACES.values():
        if (at, word) == (("common_cap",), "null"):  # no cap: a larger mu, which the file lacks
            continue
        text = json.dumps(edited(content, at, "HERE")).replace('"HERE"', word)
        refused(write(tmp_path, text))


@pytest.mark.parametrize(
    "at",
    [("devices",), ("common_cap",), ("runs", 0, "participation", "min_sep")],
    ids=lambda at: at[-1],
)
@pytest.mark.parametrize("vast", [10**18, 10**30, 10**400], ids=lambda vast: f"1e{len(str(vast))}")
def test_huge_integers_are_accepted_or_raise_a_dpftrl_error(tmp_path, at, vast: int):
    loaded_or_refused(write(tmp_path, edited(saved(tmp_path, capped()), at, vast)))


def test_invalid_paths_are_refused(tmp_path):
    guarantee = blt_run()
    for wrong in (tmp_path / "g.txt", tmp_path / "no" / "g.json"):
        with pytest.raises(InvalidInput):
            save_guarantee(guarantee, wrong)
        refused(wrong)
    (tmp_path / "folder.json").mkdir()
    refused(tmp_path / "folder.json")
    mechanism = tmp_path / "m.json"
    dpftrl.save_mechanism(dpftrl.mechanism("blt-b400"), mechanism)
    refused(mechanism)


def test_a_failed_save_leaves_the_old_file_unchanged(tmp_path, monkeypatch):
    save_guarantee(blt_run(), tmp_path / "g.json")

    def crash(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("dpftrl._internal.storage.os.fsync", crash)
        with pytest.raises(InvalidInput):
            save_guarantee(capped(), tmp_path / "g.json")
    assert load_guarantee(tmp_path / "g.json") == blt_run()
    assert [p.name for p in tmp_path.iterdir()] == ["g.json"]


def test_reading_a_guarantee_with_a_matrix_writes_nothing(tmp_path):
    clients = MinSep(12, 3)
    banded = dpftrl.Banded([[1.0] * 12, [0.5] * 11 + [0.0]])
    save_guarantee(account(banded, clients, 4.0, 1e-6), tmp_path / "g.json")
    (tmp_path / "g.json").rename(tmp_path / "renamed.json")
    before = sorted(path.name for path in tmp_path.iterdir())
    load_guarantee(tmp_path / "renamed.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
