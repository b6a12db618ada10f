"""The notebooks run from top to bottom, at a small size, and are stored with their pictures."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# The parameters of the first code cell, at a size that takes seconds.
SMALL = {
    "auditing_a_run": "rounds, report_goal, canaries, sentences = 3, 8, 40, 16",
    "main_figures_of_the_paper": "rounds, min_sep = 64, 16",
    "plan_a_keyboard_fleet": (
        "population, report_goal, rounds = 60_000, 300, 400\nepsilon, delta = 8.0, 1e-6"
    ),
    "pytorch_against_opacus": (
        "epsilon, delta, epochs, batch_size, clip_norm, seeds = 8.0, 1e-5, 1, 256, 1.0, 1"
    ),
    "train_and_verify_on_chitchat": "rounds, report_goal = 3, 40",
}


def test_every_notebook_has_a_small_size():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_the_stored_notebook_has_its_pictures_and_no_errors(name):
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (parameters,) = [c for c in book.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source = SMALL[name]
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
