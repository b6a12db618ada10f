"""Everything at reduced size, through the command; then what was written is read back."""

import csv
import json

import pytest
from click.testing import CliRunner

from dpftrl._internal.progress import ignore_progress
from dpftrl.cli.reproduce import reproduce_command
from dpftrl.paper import ITEMS, chosen, reproduce

NAMES = [item.name for item in ITEMS]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder of a whole quick run, and what the command printed."""
    folder = tmp_path_factory.mktemp("paper")
    done = CliRunner().invoke(reproduce_command, ["--quick", "--json", "--out", str(folder)])
    assert done.exception is None, done.output
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("item", ITEMS, ids=NAMES)
def test_every_item_leaves_a_table_a_page_and_its_picture(quick, item):
    folder, _ = quick
    with open(folder / f"{item.name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    page = (folder / f"{item.name}.md").read_text()
    assert page.startswith(f"# {item.title}\n")
    assert f"dpftrl reproduce {item.name}" in page
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        picture = folder / f"{item.name}.{kind}"
        assert picture.exists() == (item.draw is not None)
        if item.draw is not None:
            assert picture.read_bytes().startswith(start)
            assert picture.stat().st_size > 5_000


def test_json_has_every_item_and_gives_no_verdict_at_reduced_size(quick):
    _, printed = quick
    assert [one["item"] for one in printed["items"]] == NAMES
    for one in printed["items"]:
        full_size = one["item"] == "launches"  # which is as quick in full
        assert one["quick"] != full_size
        for claim in one["claims"]:
            assert (claim["verdict"] == "not at this size") != full_size


def test_numbers_at_reduced_size_are_finite(quick):
    folder, _ = quick
    for item in ITEMS:
        text = (folder / f"{item.name}.csv").read_text()
        assert "nan" not in text.lower()
        assert "inf" not in text.lower().replace("information", "")


def test_existing_results_are_not_computed_again(quick):
    folder, _ = quick
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    messages = []
    again = list(reproduce(ITEMS, folder, True, lambda _, message: messages.append(message)))
    assert messages == []
    assert [one.item for one in again] == NAMES
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_other_settings_and_damaged_results_are_computed_again(tmp_path):
    (item,) = chosen(["fig-blt-coeff"])
    (first,) = reproduce([item], tmp_path, quick=True, on_progress=ignore_progress)
    (other,) = reproduce([item], tmp_path, quick=False, on_progress=ignore_progress)
    assert other.settings != first.settings
    assert len(other.rows) > len(first.rows)
    (tmp_path / "fig-blt-coeff.json").write_text("{")
    (again,) = reproduce([item], tmp_path, quick=False, on_progress=ignore_progress)
    assert again.rows == other.rows


def test_progress_is_the_share_of_items_that_are_done(tmp_path):
    progress = []
    items = chosen(["launches", "fig-blt-coeff"])
    list(reproduce(items, tmp_path, True, lambda *call: progress.append(call)))
    assert {done for done, _ in progress} == {0.0, 0.5}
    assert all(message.startswith(f"{items[int(2 * done)].name}: ") for done, message in progress)


def test_the_same_rows_give_the_same_picture(tmp_path):
    (item,) = chosen(["fig-blt-coeff"])
    pictures = []
    for name in ("a", "b"):
        list(reproduce([item], tmp_path / name, quick=True, on_progress=ignore_progress))
        pictures.append((tmp_path / name / "fig-blt-coeff.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_list_prints_all_items():
    done = CliRunner().invoke(reproduce_command, ["--list", "--json"])
    assert [one["item"] for one in json.loads(done.stdout)] == NAMES
    assert "fig-rmse" in CliRunner().invoke(reproduce_command, ["--list"]).stdout


def test_a_wrong_name_gets_a_hint():
    done = CliRunner().invoke(reproduce_command, ["fig-rms"])
    assert "did you mean fig-rmse" in str(done.exception)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "x")
    done = CliRunner().invoke(reproduce_command, ["launches", "--out", below])
    assert "cannot be created" in str(done.exception)
