"""The examples of centralized training run, and are as short as the documentation says."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "centralized"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_runs_and_states_epsilon(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "argv", [name, "1"])
    path = EXAMPLES / f"{name}.py"
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "epsilon 8" in printed or "(8.000, 1e-5)-differentially private" in printed
    assert len(path.read_text().splitlines()) < 60
